"""datasets.convert: every layout and every real archive as a converted store; killed and continued."""

import fcntl
import json
import multiprocessing
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

from datasets import convert as conversion
from datasets.archive import Archive, TrainingStore, open_archive
from datasets.convert import check_packing, choose_packing, main, parse_grid
from datasets.fields import Decoding
from datasets.grid import area_weights
from errors import ConfigError, DataError
from tests.sample_archives import NAMES, anemoi, arco, cds_old, file_a_variable, packed_zarr, weatherbench
from tests.test_archive import needs
from tests.test_grid import globe

LAYOUTS = [weatherbench, arco, file_a_variable, cds_old, packed_zarr]
SHORT_SHARDS = 4  # dates: of the real size a small archive is one object, and slow to write


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_DATES", SHORT_SHARDS)


def convert(source: str, target: Path, *options: str) -> Archive:
    assert main([source, str(target), *options]) == 0
    return open_archive(str(target))


def bound(exact: np.ndarray, path: Path, name: str) -> np.ndarray:
    """Largest error by the store's attributes."""
    array = json.loads((path / name.replace(":", "_") / "zarr.json").read_text())["attributes"]
    small = 2.0**-25 * array["scale_factor"] + 2.0**-23 * np.abs(exact)
    return 2.0**-11 * np.abs(exact - array["add_offset"]) + small


def assert_equal_stores(one: Path, other: Path) -> None:
    """Values, dates, static fields and attributes; not the bytes of the files."""
    ours, theirs = open_archive(str(one)), open_archive(str(other))
    assert ours.variables == theirs.variables and ours.static_variables == theirs.static_variables
    np.testing.assert_array_equal(ours.times, theirs.times)
    count = len(ours.times)
    np.testing.assert_array_equal(
        ours.read_block(0, count, ours.variables), theirs.read_block(0, count, ours.variables)
    )
    for name in ours.static_variables:
        np.testing.assert_array_equal(ours.read_static(name), theirs.read_static(name))
    for name in ours.variables:
        attributes, expected = (attributes_of(path, name) for path in (one, other))
        assert attributes.keys() == expected.keys()
        for key, value in expected.items():
            assert attributes[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-12))


def attributes_of(path: Path, name: str) -> dict:
    return json.loads((path / name.replace(":", "_") / "zarr.json").read_text())["attributes"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_come_back(layout: Callable, tmp_path: Path, truth: xr.Dataset) -> None:
    """Names, dates, grid, static fields and holes as in the source; float32 bit-exact, float16 near.

    tests/test_layouts.py reads all layouts.
    """
    (tmp_path / "in").mkdir()
    source = layout(tmp_path / "in", truth)
    archive = open_archive(source)
    wanted = archive.read_block(0, 5, NAMES)
    for dtype in ("float32", "float16") if layout in (weatherbench, cds_old) else ("float32",):
        target = tmp_path / dtype
        found = convert(source, target, "--dtype", dtype)
        assert set(found.variables) == set(archive.variables)
        assert found.grid.same_as(archive.grid) and (found.times == archive.times).all()
        block = found.read_block(0, 5, NAMES)
        if dtype == "float32":
            np.testing.assert_array_equal(block, wanted)
        else:
            assert (np.isnan(block) == np.isnan(wanted)).all()
            for v, name in enumerate(NAMES):
                error = np.abs(block[:, v].astype("f8") - wanted[:, v])
                assert np.nanmax(error - bound(wanted[:, v].astype("f8"), target, name)) <= 0
        np.testing.assert_array_equal(
            found.read_static("land_sea_mask") if "land_sea_mask" in found.static_variables else 0,
            archive.read_static("land_sea_mask") if "land_sea_mask" in archive.static_variables else 0,
        )


def test_anemoi_comes_back(tmp_path: Path, truth: xr.Dataset) -> None:
    found = convert(anemoi(tmp_path, truth), tmp_path / "out", "--dtype", "float32")
    assert sorted(found.variables) == ["2m_temperature", "land_sea_mask", "temperature:500"]
    t2m = found.read_block(0, 5, ["2m_temperature"])[:, 0]
    np.testing.assert_array_equal(t2m, truth["2m_temperature"].values)
    np.testing.assert_array_equal(found.read_static("land_sea_mask"), truth.land_sea_mask.values)


@pytest.mark.parametrize(
    "path",
    ["gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc", "odd_data/storm_1996.nc", "era5_europe_2020"],
)
def test_real_archives_come_back(path: str, tmp_path: Path) -> None:
    archive = open_archive(needs(path))
    found = convert(needs(path), tmp_path / "out")
    assert set(found.variables) == set(archive.variables) and (found.times == archive.times).all()
    for name in archive.variables:
        exact, ours = (each.read_block(0, len(each.times), [name]).astype("f8") for each in (archive, found))
        assert (np.isnan(exact) == np.isnan(ours)).all()
        assert np.nanmax(np.abs(ours - exact) - bound(exact, tmp_path / "out", name)) <= 0
        assert found.units(name) == archive.units(name)


def test_xarray_reads_the_same(tmp_path: Path, truth: xr.Dataset) -> None:
    """Offset, scale, dates and missing values by CF's names."""
    source = weatherbench(tmp_path, truth)
    found = convert(source, tmp_path / "out")
    with xr.open_zarr(tmp_path / "out", consolidated=True) as ds:
        assert (ds.time.values == truth.time.values).all()
        theirs = ds["2m_temperature"].values.astype("f4")
        np.testing.assert_allclose(theirs, found.read_block(0, 5, ["2m_temperature"])[:, 0], rtol=1e-6)


def test_a_bit_that_turned_over_in_a_value_is_seen(tmp_path: Path, truth: xr.Dataset) -> None:
    """lz4 unpacks another number without a word; zarr-python and the loader's threads both look."""
    store = convert(weatherbench(tmp_path, truth), tmp_path / "out", "--dtype", "float32")
    assert isinstance(store, TrainingStore)
    path = tmp_path / "out/2m_temperature/c/0/0/0"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="2m_temperature.* checksum"):
        open_archive(str(tmp_path / "out")).read(0, ["2m_temperature"])
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(path.parents[3], mode="r")[0]


# -- selection


def test_variables_levels_and_period(tmp_path: Path, truth: xr.Dataset) -> None:
    source = weatherbench(tmp_path, truth)
    chosen = ["--variables", "geopotential", "temperature:850", "--levels", "500", "1000"]
    found = convert(source, tmp_path / "a", *chosen, "--period", "2019-12-31T12", "2020-01-01")
    assert set(found.variables) == {"geopotential:500", "geopotential:1000", "temperature:850"}
    assert len(found.times) == 4
    assert set(convert(source, tmp_path / "b", "--levels", "850").variables) == {
        "geopotential:850",
        "temperature:850",
        "2m_temperature",
    }
    part = convert(source, tmp_path / "c", "--region", "80", "-90", "-20", "50")
    assert part.grid.latitude.tolist() == [75, 45, 15, -15] and part.grid.longitude.tolist()[0] == -90


def test_another_grid_keeps_the_area_mean(tmp_path: Path) -> None:
    fine, coarse = globe(12, 16), parse_grid("7x8")
    field = np.random.default_rng(0).normal(size=(2, *fine.shape))
    time = np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")
    coords = {"time": time, "latitude": fine.latitude, "longitude": fine.longitude}
    ds = xr.Dataset({"t2m": (tuple(coords), field.astype("f4"))}, coords)
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    found = convert(str(tmp_path / "a.nc"), tmp_path / "out", "--grid", "7x8", "--dtype", "float32")
    block = found.read_block(0, 2, ["2m_temperature"])[:, 0]
    assert found.grid.same_as(coarse)
    pairs = (field, fine), (block, coarse)
    means = [(values * area_weights(grid.latitude)[:, None]).mean((1, 2)) for values, grid in pairs]
    np.testing.assert_allclose(*means, atol=1e-6)


# -- float16


def test_packing_is_exact_in_binary_and_keeps_zeros() -> None:
    packing = choose_packing(3.1e-3, 4.7e-3)
    assert (packing.scale, packing.offset) == (2.0**-8, 2.0**-8)
    check_packing(np.zeros(3, "f4"), packing, "")
    assert packing.decode(np.array([-packing.offset / packing.scale], "f2")) == 0
    assert choose_packing(float("nan"), float("nan")) == Decoding()
    assert choose_packing(101325, 0).scale == 128  # a constant: as near as float16 has it


def test_float16_refuses_what_it_cannot_store(tmp_path: Path, truth: xr.Dataset) -> None:
    """A date unlike those that the packing was estimated from."""
    for value in (1e9, 3e6):
        with pytest.raises(DataError, match="--dtype float32"):
            field = np.full((6, 8), value, "f4") + np.arange(8, dtype="f4") * 1e3
            check_packing(field, Decoding(scale=8.0, offset=280.0), "")
    ds = truth.copy(deep=True)
    ds["2m_temperature"] = ds["2m_temperature"].where(ds.time != ds.time[1], 1e9)
    many = xr.concat([ds.isel(time=[0]), *[ds.isel(time=[4])] * 30], "time", data_vars="minimal")
    times = np.datetime64("2020-01-01", "ns") + np.arange(31) * np.timedelta64(6, "h")
    many = many.assign_coords(time=times)
    many["2m_temperature"][7] = 1e9
    source = weatherbench(tmp_path, many)
    with pytest.raises(DataError, match="2m_temperature at 2020-01-02T18:00:00: .*--dtype float32"):
        convert(source, tmp_path / "out")
    with pytest.raises(DataError, match="its conversion has not ended"):
        open_archive(str(tmp_path / "out"))


# -- killed, continued, in parallel


def long_source(path: Path, dates: int = 14) -> str:
    """Four-hourly, so that no shard is full at the end."""
    rng = np.random.default_rng(1)
    time = np.datetime64("2020-01-01", "ns") + np.arange(dates) * np.timedelta64(4, "h")
    coords = {"time": time, "latitude": np.arange(75.0, -80, -30), "longitude": np.arange(0, 360, 45.0)}
    fields = {
        name: (tuple(coords), rng.normal(280, 9, (40, 6, 8))[:dates]) for name in ("t2m", "msl", "sp", "u10")
    }
    ds = (
        xr.Dataset(fields, coords)
        .astype("f4")
        .assign(lsm=(("latitude", "longitude"), np.eye(6, 8, dtype="f4")))
    )
    ds["t2m"][4:8] = np.nan  # a whole shard
    ds.to_netcdf(path / f"{dates}.nc", engine="h5netcdf")
    return str(path / f"{dates}.nc")


def in_a_process(argv: list[str]) -> None:
    conversion.SHARD_DATES = SHORT_SHARDS
    main(argv)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_continued_gives_equal_values(tmp_path: Path, workers: int) -> None:
    """Killed at five random moments, with one process and with two dask workers."""
    source, target, seed = long_source(tmp_path), tmp_path / "killed", random.Random(workers)
    convert(source, tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_convert"])
    arguments = [source, str(target), "--workers", str(workers)]
    for _ in range(5):
        process = context.Process(target=in_a_process, args=(arguments,))
        process.start()
        while not (target / "sums").exists() and process.is_alive():
            pass
        process.join(seed.uniform(0, 0.15 if workers == 1 else 3.0))
        process.kill()
        process.join()
    convert(source, target)
    assert_equal_stores(target, tmp_path / "whole")


def test_a_cluster_gives_equal_values(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    source = long_source(tmp_path)
    convert(source, tmp_path / "one", "--grid", "5x4")
    options = {"processes": False, "dashboard_address": None, "threads_per_worker": 1}
    with distributed.LocalCluster(n_workers=2, **options) as cluster:
        convert(source, tmp_path / "two", "--grid", "5x4", "--scheduler", cluster.scheduler_address)
    assert_equal_stores(tmp_path / "one", tmp_path / "two")


def fail_after(number: int, monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """Convert, with an error after so many parts."""
    write_part, count = conversion.Conversion.write_part, [0]

    def fail_late(self, part):
        count[0] += 1
        if count[0] > number:
            raise DataError("the source is gone")
        return write_part(self, part)

    with monkeypatch.context() as patch, pytest.raises(DataError, match="the source is gone"):
        patch.setattr(conversion.Conversion, "write_part", fail_late)
        main(argv)


@pytest.mark.parametrize("change", ["later dates", "a date less", "other values"])
def test_a_source_that_changes_while_a_conversion_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Later dates are appended; a date that is lost, and other values than those written, are refused."""
    sources = [long_source(tmp_path, dates) for dates in (14, 19)]
    source, target = tmp_path / "source.nc", tmp_path / "target"
    shutil.copy(sources[change == "a date less"], source)
    argv = [str(source), str(target), "--dtype", "float32"]
    fail_after(5, monkeypatch, argv)
    with pytest.raises(DataError, match="its conversion has not ended"):
        open_archive(str(target))
    source.unlink()
    shutil.copy(sources[change == "later dates"], source)
    if change == "other values":
        with xr.open_dataset(sources[0]) as ds:
            (ds + 5).to_netcdf(source, engine="h5netcdf")
        with pytest.raises(DataError, match="is not what it was when it was converted; remove .*target"):
            main(argv)
        return
    if change == "a date less":
        with pytest.raises(ConfigError, match="it no longer has 2020-01-03T08:00:00"):
            main(argv)
        return
    assert main(argv) == 0
    ours, exact = open_archive(str(target)), open_archive(sources[1])
    np.testing.assert_array_equal(ours.times, exact.times)
    names = ours.variables
    np.testing.assert_array_equal(ours.read_block(0, 19, names), exact.read_block(0, 19, names))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_complete_store_grows_with_its_source(tmp_path: Path, dtype: str) -> None:
    """Values, moments and sums are those of a conversion at once; what was there before is compared."""
    source, target = tmp_path / "source.nc", tmp_path / "target"
    (tmp_path / "a").mkdir()
    full = long_source(tmp_path / "a", 19)
    for dates in (14, 14, 19):
        with xr.open_dataset(full) as ds:
            ds.isel(time=slice(dates)).to_netcdf(tmp_path / "part.nc", engine="h5netcdf")
        os.replace(tmp_path / "part.nc", source)
        grown = convert(str(source), target, "--dtype", dtype)
    assert isinstance(grown, TrainingStore)
    exact = open_archive(full)
    np.testing.assert_array_equal(grown.times, exact.times)
    if dtype == "float32":
        at_once = convert(full, tmp_path / "once", "--dtype", dtype)
        assert isinstance(at_once, TrainingStore)
        names = at_once.variables
        np.testing.assert_array_equal(grown.read_block(0, 19, names), exact.read_block(0, 19, names))
        np.testing.assert_array_equal(grown.rows(names), at_once.rows(names))
        for start in range(0, 19, SHORT_SHARDS):
            for name in names:
                pair = grown.read_sums(name, start), at_once.read_sums(name, start)
                np.testing.assert_array_equal(*pair)
    with xr.open_dataset(full) as ds:
        changed = ds.copy(deep=True)
        changed["u10"][18] += 1
        changed.to_netcdf(tmp_path / "part.nc", engine="h5netcdf")
    os.replace(tmp_path / "part.nc", source)
    with pytest.raises(DataError, match="10m_u_component_of_wind at 2020-01-04T00:00:00 is not what it was"):
        convert(str(source), target, "--dtype", dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_store_grows_when_its_source_has_lost_the_first_dates(tmp_path: Path, dtype: str) -> None:
    """Of a source that has the newest dates alone, as of a centre's last days. Also after an interruption."""
    source, target, full = tmp_path / "source.nc", tmp_path / "target", long_source(tmp_path, 19)
    for start, stop in ((0, 14), (13, 19)):
        with xr.open_dataset(full) as ds:
            ds.isel(time=slice(start, stop)).to_netcdf(tmp_path / "part.nc", engine="h5netcdf")
        os.replace(tmp_path / "part.nc", source)
        if start:
            with pytest.MonkeyPatch.context() as patch:
                fail_after(1, patch, [str(source), str(target), "--dtype", dtype])
        grown = convert(str(source), target, "--dtype", dtype)
    # As of all dates at once, with the packing of the first ones.
    with pytest.MonkeyPatch.context() as patch:
        packings = {name: {**attributes_of(target, name)} for name in grown.variables}
        patch.setattr(conversion.Conversion, "estimate_packings", lambda _: packings)
        at_once = convert(full, tmp_path / "once", "--dtype", dtype)
    assert isinstance(grown, TrainingStore) and isinstance(at_once, TrainingStore)
    names = at_once.variables
    np.testing.assert_array_equal(grown.times, at_once.times)
    np.testing.assert_array_equal(grown.read_block(0, 19, names), at_once.read_block(0, 19, names))
    np.testing.assert_array_equal(grown.rows(names), at_once.rows(names))


def test_a_folder_of_somebody_else_is_not_touched(tmp_path: Path, truth: xr.Dataset) -> None:
    """Even one that contains a folder of the name that conversions once used."""
    source, target = weatherbench(tmp_path, truth), tmp_path / "work"
    for name in ("conversion", "sums", "results"):
        (target / name).mkdir(parents=True)
    (target / "thesis.tex").write_text("all of it")
    (target / "zarr.json").write_text('{"attributes": {"rossby_training_store": 1}}')
    for _ in range(2):
        with pytest.raises(ConfigError, match="TARGET"):
            convert(source, target)
        (target / "zarr.json").unlink(missing_ok=True)
    assert (target / "thesis.tex").read_text() == "all of it" and (target / "results").is_dir()


# -- what is refused


def test_two_variables_with_one_array_are_refused(tmp_path: Path, truth: xr.Dataset) -> None:
    """The height on a level, and a variable of that name: one was written over the other."""
    ds = truth[["temperature"]].rename(temperature="hgt")
    ds.assign(hgt_500=ds.hgt.sel(level=500, drop=True) + 1).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(ConfigError, match="hgt_500.*its array hgt_500 would be that of hgt:500"):
        convert(str(tmp_path / "a.nc"), tmp_path / "out")
    assert len(convert(str(tmp_path / "a.nc"), tmp_path / "out", "--variables", "hgt").variables) == 3


def test_what_is_refused(tmp_path: Path, truth: xr.Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a line that names the option; TARGET is not changed."""
    monkeypatch.chdir(tmp_path)
    source, target = weatherbench(tmp_path, truth), tmp_path / "out"
    convert(source, target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    for argv, message in (
        ([source, str(target), "--dtype", "float32"], "--dtype = 'float32'"),
        ([source, str(target), "--variables", "geopotential"], "--variables"),
        ([source, str(tmp_path / "mine")], "mine.*no store of datasets.convert"),
        ([source, "s3://bucket/a.zarr"], "a local folder expected"),
        ([source, f"{source}/inside"], "TARGET"),
        ([source, source], "TARGET"),
        ([source, "/proc/store.zarr"], "TARGET = '/proc/store.zarr': it cannot be written to"),
        ([source, str(tmp_path)], "TARGET"),
        ([source], "TARGET"),
        ([source, str(target), "--stepz"], "--stepz"),
        ([source, "new", "--grid", "121"], "--grid = '121'"),
        ([source, "new", "--region", "2", "0", "1", "1"], "0 x 1 points of the grid"),
        ([source, "new", "--region", "2", "0", "3", "1"], "--region"),
        ([source, "new", "--workers", "0"], "--workers = 0"),
        ([source, "new", "--variables", "t2m"], "t2m.*nearest: '2m_temperature'"),
        ([source, "new", "--levels", "700"], "--levels = 700"),
        ([source, "new", "--period", "1999-01-01", "1999-02-01"], "--period"),
        ([source, "new", "--select", "member=0"], "no such dimension"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            main(argv)
    with (tmp_path / ".out.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing it"):
            convert(source, target)
    assert before == {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    assert not Path("new").exists()
