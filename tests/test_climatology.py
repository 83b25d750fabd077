"""WeatherBench2's recipe against loops in plain Python, its storage, and the climatology as a forecast."""

import shutil
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

NAMES = ["geopotential:500", "2m_temperature"]


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
        "2m_temperature": (("time", "latitude", "longitude"), lower),
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
            field = ds["2m_temperature"].sel(time=date).values[::-1].astype("f8")
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
            found = stored["2m_temperature"].sel(hour=hour, dayofyear=day).values
            np.testing.assert_allclose(found, loop(ds, hour, day), rtol=1e-7)
    monkeypatch.setattr(module, "SUMS_BYTES", 1)
    compute_climatology(archive, NAMES, np.arange(len(archive.times)), str(tmp_path / "c.zarr"))
    xr.testing.assert_allclose(xr.open_zarr(tmp_path / "c.zarr"), stored, rtol=1e-7)


def test_reading_it_back(path: Path) -> None:
    opened, stored = open_climatology(str(path)), xr.open_zarr(path)
    assert sorted(opened.variables) == sorted(NAMES)
    for text, day in (("2021-12-31T12", 365), ("2024-12-31T00", 366), ("2023-01-01T00", 1)):
        time = np.datetime64(text, "s")
        found = opened.field(time, NAMES)
        wanted = stored.sel(hour=int(text[-2:]), dayofyear=day)
        np.testing.assert_array_equal(found[0], wanted.geopotential.sel(level=500).values)
        np.testing.assert_array_equal(found[1], wanted["2m_temperature"].values)
    for text, names in (("2020-01-01T06", NAMES), ("2020-01-01T00", ["geopotential:850"])):
        with pytest.raises(DataError):
            opened.field(np.datetime64(text, "s"), names)


def test_weatherbench2_stores_with_other_orders(path: Path, tmp_path: Path) -> None:
    """dayofyear before hour, longitude before latitude, latitude ascending."""
    stored = xr.open_zarr(path).load().isel(latitude=slice(None, None, -1))
    turned = stored.transpose("dayofyear", "longitude", "latitude", "level", "hour").drop_encoding()
    again = open_climatology(write(turned, tmp_path / "turned.zarr"))
    time = np.datetime64("2021-06-01T12", "s")
    expected = open_climatology(str(path)).field(time, NAMES)
    np.testing.assert_array_equal(again.field(time, NAMES), expected)


def test_less_than_a_year_gives_means_by_hour_of_day(tmp_path: Path) -> None:
    """31 December of a short year counts once, not twice as by day of year."""
    truth = analyses(grid(4, 6, poles=False), 40)
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    compute_climatology(archive, ["2m_temperature"], np.arange(40), str(tmp_path / "c.zarr"))
    stored = xr.open_zarr(tmp_path / "c.zarr")
    assert set(stored["2m_temperature"].dims) == {"hour", "latitude", "longitude"}
    expected = truth["2m_temperature"].isel(latitude=slice(None, None, -1)).astype("f8")
    expected = expected.groupby("time.hour").mean()
    np.testing.assert_allclose(stored["2m_temperature"].values, expected.values, rtol=1e-7)
    opened = open_climatology(str(tmp_path / "c.zarr"))
    field = opened.field(np.datetime64("1999-07-07T18", "s"), ["2m_temperature"])
    np.testing.assert_array_equal(field[0], stored["2m_temperature"].sel(hour=18).values)
    # One that is damaged is computed again.
    exact, chunk = stored.load(), tmp_path / "c.zarr/hour/c/0"
    chunk.write_bytes(chunk.read_bytes()[:-1])
    compute_climatology(archive, ["2m_temperature"], np.arange(40), str(tmp_path / "c.zarr"))
    xr.testing.assert_identical(xr.open_zarr(tmp_path / "c.zarr").load(), exact)


@pytest.mark.parametrize(("first", "step", "hours"), [(0, 3, list(range(0, 24, 3))), (6, 12, [6, 18])])
def test_it_has_the_hours_that_the_analyses_have(
    first: int, step: int, hours: list[int], tmp_path: Path
) -> None:
    """3-hourly analyses, and such as have a part of the day only."""
    truth = analyses(grid(4, 6, poles=False), 40)
    times = np.datetime64("2020-01-01", "ns") + (first + step * np.arange(40)) * np.timedelta64(1, "h")
    archive = open_archive(write(truth.assign_coords(time=times), tmp_path / "truth.zarr"))
    compute_climatology(archive, ["2m_temperature"], np.arange(40), str(tmp_path / "c.zarr"))
    stored = xr.open_zarr(tmp_path / "c.zarr")
    assert stored.hour.values.tolist() == hours
    expected = truth["2m_temperature"][:: len(hours)].astype("f8").mean("time")[::-1]
    np.testing.assert_allclose(stored["2m_temperature"].sel(hour=first), expected, rtol=1e-7)


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
    shutil.copytree(
        tmp_path / "killed.zarr", tmp_path / "torn.zarr.incomplete"
    )  # killed while it was created
    shutil.rmtree(tmp_path / "torn.zarr.incomplete/2m_temperature")
    compute_on_ranks(years[1].path, tmp_path / "torn.zarr")
    assert calls == [(["geopotential:500"], [0]), (["2m_temperature"], [0]), (["geopotential:500"], [12])] + [
        (["2m_temperature"], [12])
    ]
    for name in ("two", "killed", "torn"):
        xr.testing.assert_equal(xr.open_zarr(tmp_path / f"{name}.zarr"), xr.open_zarr(path))
        assert not (tmp_path / f"{name}.zarr/done").exists()


def test_an_hour_of_few_days_has_no_annual_cycle(tmp_path: Path) -> None:
    """Its days without a date would be NaN."""
    noons = np.arange("2019-01-01T12", "2020-01-01T12", np.timedelta64(24, "h"), dtype="datetime64[ns]")
    evenings = noons[:30] + np.timedelta64(6, "h")
    for name, times in (("year", noons), ("month", np.sort([*noons, *evenings]))):
        truth = analyses(grid(2, 3, poles=False), len(times)).assign_coords(time=times)
        archive = open_archive(write(truth[["2m_temperature"]], tmp_path / f"{name}.zarr"))
        compute_climatology(
            archive, ["2m_temperature"], np.arange(len(times)), tmp_path / f"{name}-mean.zarr"
        )
        stored = xr.open_zarr(tmp_path / f"{name}-mean.zarr")["2m_temperature"]
        assert ("dayofyear" in stored.dims) == (name == "year") and stored.notnull().all()


def test_days_and_hours_are_found_by_label(path: Path, tmp_path: Path) -> None:
    """One of the summer alone answered 1 February with a day of June, and July with an IndexError."""
    opened = open_climatology(str(path))
    assert not opened.has(np.datetime64("2021-02-28T06")) and opened.has(np.datetime64("2021-02-28T12"))
    with pytest.raises(DataError, match="lacks its hour"):
        opened.field(np.datetime64("2021-02-28T06"), NAMES)
    stored = xr.open_zarr(path).load().drop_encoding()
    some = {"summer": np.arange(152, 244), "365": np.arange(1, 366), "turned": np.arange(366, 0, -1)}
    for name, days in some.items():
        part = open_climatology(write(stored.sel(dayofyear=days), tmp_path / f"{name}.zarr"))
        for date in ("2021-02-01T12", "2021-07-15T00", "2020-12-31T12", "2021-12-31T00"):
            time = np.datetime64(date, "s")
            day = (time.astype("M8[D]") - time.astype("M8[Y]").astype("M8[D]")).astype(int) + 1
            assert part.has(time) == (day in days)
            if day in days:
                np.testing.assert_array_equal(part.field(time, NAMES), opened.field(time, NAMES))
            else:
                with pytest.raises(DataError, match="lacks its dayofyear"):
                    part.field(time, NAMES)


def test_as_a_forecast_it_is_the_mean_of_the_valid_time(path: Path) -> None:
    opened = open_climatology(str(path))
    times = np.array(["2021-02-28T00", "2021-12-31T12"], "datetime64[s]")
    leads = np.array([12, 24], "timedelta64[h]").astype("timedelta64[s]")
    block = Baseline(opened, NAMES, times, leads).read_block(slice(0, 2), slice(0, 2), NAMES)
    assert block.shape == (2, 2, 2, 2, 3)
    np.testing.assert_array_equal(block[0, 1], opened.field(np.datetime64("2021-03-01T00"), NAMES))
    np.testing.assert_array_equal(block[1, 0], opened.field(np.datetime64("2022-01-01T00"), NAMES))


def test_any_stored_type_is_read_as_float32(path: Path, tmp_path: Path) -> None:
    """One of float64 or packed numbers ended an evaluation with a traceback about types."""
    double = xr.open_zarr(path).load().drop_encoding().astype("f8")
    time = np.datetime64("2021-02-28T12", "s")
    field = open_climatology(write(double, tmp_path / "double.zarr")).field(time, NAMES)
    np.testing.assert_array_equal(field, open_climatology(str(path)).field(time, NAMES), strict=True)
