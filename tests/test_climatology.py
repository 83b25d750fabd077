"""WeatherBench2's recipe against loops in plain Python, its storage, and the climatology as a forecast."""

import shutil
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from datasets.archive import Archive, open_archive
from errors import DataError
from tests.forecasts import analyses, grid, write
from verification import climatology as module
from verification.baselines import Baseline
from verification.climatology import compute_climatology, open_climatology

T2M = "2m_temperature"
NAMES = ["geopotential:500", T2M]


@pytest.fixture(scope="module")
def years(tmp_path_factory: pytest.TempPathFactory) -> tuple[xr.Dataset, Archive]:
    """Two years, the second a leap year, twice a day, with a missing date and a missing cell."""
    times = np.arange("2019-01-01", "2021-01-01", np.timedelta64(12, "h"), dtype="datetime64[ns]")
    rng, axes = np.random.default_rng(0), {"level": [500], **grid(2, 3, poles=False)}
    upper = rng.normal(500, 90, (len(times), 1, 2, 3)).astype("f4")
    lower = rng.normal(280, 9, (len(times), 2, 3)).astype("f4")
    lower[100, 1, 2] = np.nan
    data = {
        "geopotential": (("time", *axes), upper),
        T2M: (("time", "latitude", "longitude"), lower),
    }
    ds = xr.Dataset(data, {"time": times, **axes}).drop_sel(time=np.datetime64("2019-03-05T12"))
    return ds, open_archive(write(ds, tmp_path_factory.mktemp("years") / "analyses.zarr"))


@pytest.fixture(scope="module")
def path(years, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The climatology of all their dates."""
    path, (_, archive) = tmp_path_factory.mktemp("climatology") / "c.zarr", years
    compute_climatology(archive, NAMES, np.arange(len(archive.times)), str(path))
    return path


def loop(ds: xr.Dataset, hour: int, day: int) -> np.ndarray:
    """The mean of "2m_temperature" (H, W) for one hour and day, straight from the recipe."""
    total, weight = np.zeros((2, 3)), np.zeros((2, 3))
    for offset in range(-30, 31):
        wanted = (day - 1 + offset) % 366 + 1
        for year in (2019, 2020):
            length = 366 if year == 2020 else 365
            number = min(wanted, length)  # the last day stands in for day 366
            date = np.datetime64(f"{year}-01-01T{hour:02d}", "ns") + np.timedelta64(number - 1, "D")
            if date not in ds.time.values:
                continue
            field = ds[T2M].sel(time=date).values[::-1].astype("f8")
            factor = 1 - abs(offset) / 30
            total += np.where(np.isnan(field), 0, factor * field)
            weight += factor * ~np.isnan(field)
    return total / weight


def test_the_recipe(years, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no two variables nor hours fit into memory together."""
    ds, archive = years
    stored = xr.open_zarr(path)
    assert dict(stored.sizes) == {"hour": 2, "dayofyear": 366, "level": 1, "latitude": 2, "longitude": 3}
    assert stored.hour.values.tolist() == [0, 12] and stored.longitude.values[0] == 0
    for hour in (0, 12):
        for day in (1, 50, 64, 335, 365, 366):
            found = stored[T2M].sel(hour=hour, dayofyear=day).values
            np.testing.assert_allclose(found, loop(ds, hour, day), rtol=1e-7)
    monkeypatch.setattr(module, "SUMS_BYTES", 1)
    compute_climatology(archive, NAMES, np.arange(len(archive.times)), str(tmp_path / "c.zarr"))
    xr.testing.assert_allclose(xr.open_zarr(tmp_path / "c.zarr"), stored, rtol=1e-7)


@pytest.mark.parametrize(("first", "step"), [(0, 6), (0, 3), (6, 12)])
def test_less_than_a_year_gives_means_by_hour_of_day(first: int, step: int, tmp_path: Path) -> None:
    """31 December of a short year counts once, not twice as by day of year. Of the hours that there are."""
    truth = analyses(grid(4, 6, poles=False), 40)[[T2M]]
    path = tmp_path / "c.zarr"
    times = truth.time.values[0] + (first + step * np.arange(40)) * np.timedelta64(1, "h")
    truth = truth.assign_coords(time=times)
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    compute_climatology(archive, [T2M], np.arange(40), str(path))
    stored = xr.open_zarr(path).load()
    expected = truth[T2M].sortby("latitude", ascending=False).astype("f8").groupby("time.hour").mean()
    xr.testing.assert_allclose(stored[T2M], expected.transpose("hour", ...), rtol=1e-7)
    field = open_climatology(str(path)).field(np.datetime64("1999-07-07T18", "s"), [T2M])
    np.testing.assert_array_equal(field[0], stored[T2M].sel(hour=18).values)
    # It is computed once; one that is damaged is computed again.
    chunk = path / "hour/c/0"
    written = chunk.stat().st_mtime_ns
    compute_climatology(archive, [T2M], np.arange(40), str(path))
    assert chunk.stat().st_mtime_ns == written
    chunk.write_bytes(chunk.read_bytes()[:-1])
    compute_climatology(archive, [T2M], np.arange(40), str(path))
    xr.testing.assert_identical(xr.open_zarr(path).load(), stored)


def compute_on_ranks(source: str, path: Path) -> None:
    archive = open_archive(source)
    compute_climatology(archive, NAMES, np.arange(len(archive.times)), path)


def test_ranks_share_the_work_and_a_killed_one_continues(ranks, years, path, tmp_path, monkeypatch) -> None:
    """One rank computed it while the others waited, for 600 s at most, and began again after a kill."""
    ranks(2).run(compute_on_ranks, years[1].path, tmp_path / "two.zarr")
    monkeypatch.setattr(module, "SUMS_BYTES", 1)  # an hour of a variable after the other
    whole, calls = module.day_sums, []

    def count(*arguments):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(arguments[1:4:2])
        return whole(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "day_sums", count)
        compute_on_ranks(years[1].path, tmp_path / "killed.zarr")
    with monkeypatch.context() as patch:
        patch.setattr(module, "day_sums", lambda *each: calls.append(each[1:4:2]) or whole(*each))
        compute_on_ranks(years[1].path, tmp_path / "killed.zarr")
    torn = tmp_path / "torn.zarr.incomplete"  # killed while it was created
    shutil.copytree(tmp_path / "killed.zarr", torn, ignore=shutil.ignore_patterns(T2M))
    compute_on_ranks(years[1].path, tmp_path / "torn.zarr")
    assert calls == [([name], [hour]) for hour in (0, 12) for name in NAMES]
    for name in ("two", "killed", "torn"):
        xr.testing.assert_equal(xr.open_zarr(tmp_path / f"{name}.zarr"), xr.open_zarr(path))
        assert not (tmp_path / f"{name}.zarr/done").exists()


def test_an_hour_of_few_days_has_no_annual_cycle(tmp_path: Path) -> None:
    """Its days without a date would be NaN."""
    noons = np.arange("2019-01-01T12", "2020-01-01T12", np.timedelta64(24, "h"), dtype="datetime64[ns]")
    evenings = noons[:30] + np.timedelta64(6, "h")
    for name, times in (("year", noons), ("month", np.sort([*noons, *evenings]))):
        truth = analyses(grid(2, 3, poles=False), len(times)).assign_coords(time=times)
        archive = open_archive(write(truth[[T2M]], tmp_path / f"{name}.zarr"))
        compute_climatology(archive, [T2M], np.arange(len(times)), tmp_path / f"{name}-mean.zarr")
        stored = xr.open_zarr(tmp_path / f"{name}-mean.zarr")[T2M]
        assert ("dayofyear" in stored.dims) == (name == "year") and stored.notnull().all()


def test_days_and_hours_are_found_by_label(path: Path, tmp_path: Path) -> None:
    """One of the summer alone answered 1 February with a day of June, and July with an IndexError."""
    opened, stored = open_climatology(str(path)), xr.open_zarr(path).load().drop_encoding()
    assert sorted(opened.variables) == sorted(NAMES) and not opened.has(np.datetime64("2021-02-28T06"))
    for date, names in (("2021-02-28T06", NAMES), ("2021-02-28T12", ["geopotential:850"])):
        with pytest.raises(DataError, match="lacks its hour" if names is NAMES else "geopotential:850"):
            opened.field(np.datetime64(date), names)
    some = {"summer": np.arange(152, 244), "365": np.arange(1, 366), "turned": np.arange(366, 0, -1)}
    dates = {"2021-02-01T12": 32, "2021-07-15T00": 196, "2020-12-31T12": 366, "2021-12-31T00": 365}
    for (name, days), (date, day) in product(some.items(), dates.items()):
        found = open_climatology(write(stored.sel(dayofyear=days), tmp_path / f"{name}{day}.zarr"))
        time = np.datetime64(date, "s")
        assert found.has(time) == (day in days)
        if day in days:
            wanted = stored.sel(hour=int(date[-2:]), dayofyear=day)
            expected = [wanted.geopotential.sel(level=500), wanted[T2M]]
            np.testing.assert_array_equal(found.field(time, NAMES), expected)
        else:
            with pytest.raises(DataError, match="lacks its dayofyear"):
                found.field(time, NAMES)


def test_as_a_forecast_it_is_the_mean_of_the_valid_time(path: Path) -> None:
    opened = open_climatology(str(path))
    times = np.array(["2021-02-28T00", "2021-12-31T12"], "datetime64[s]")
    leads = np.array([12, 24], "timedelta64[h]").astype("timedelta64[s]")
    block = Baseline(opened, NAMES, times, leads).read_block(slice(0, 2), slice(0, 2), NAMES)
    assert block.shape == (2, 2, 2, 2, 3)
    np.testing.assert_array_equal(block[0, 1], opened.field(np.datetime64("2021-03-01T00"), NAMES))
    np.testing.assert_array_equal(block[1, 0], opened.field(np.datetime64("2022-01-01T00"), NAMES))


def test_stores_of_other_orders_and_types(path: Path, tmp_path: Path) -> None:
    """One of float64 or packed numbers ended an evaluation with a traceback about types."""
    stored = xr.open_zarr(path).load().isel(latitude=slice(None, None, -1)).astype("f8").drop_encoding()
    turned = write(
        stored.transpose("dayofyear", "longitude", "latitude", "level", "hour"), tmp_path / "t.zarr"
    )
    time = np.datetime64("2021-06-01T12", "s")
    found, expected = (open_climatology(str(each)).field(time, NAMES) for each in (turned, path))
    np.testing.assert_array_equal(found, expected, strict=True)


def test_one_of_several_and_a_damaged_one_are_refused(path: Path, tmp_path: Path) -> None:
    """The first of several was taken without a word."""
    for name in "ab":
        shutil.copytree(path, tmp_path / f"several/{name}.zarr")
    with pytest.raises(DataError, match="2 files: name one"):
        open_climatology(str(tmp_path / "several"))
    (tmp_path / "several/a.zarr/hour/c/0").write_bytes(b"")
    with pytest.raises(DataError, match="cannot read .*a.zarr"):
        open_climatology(str(tmp_path / "several/a.zarr"))
