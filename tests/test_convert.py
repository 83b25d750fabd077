"""datasets.convert: layouts and real archives as a converted store; killed, continued, and grown."""

import fcntl
import json
import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from datasets import convert as conversion
from datasets.archive import TrainingStore, open_archive
from datasets.convert import check_packing, choose_packing, main
from datasets.fields import Decoding
from datasets.grid import global_grid
from datasets.regrid import Regridder
from errors import ConfigError, DataError
from tests.sample_archives import anemoi, arco, cds_old, file_a_variable, packed_zarr, weatherbench
from tests.test_layouts import needs

LAYOUTS = [weatherbench, arco, file_a_variable, cds_old, packed_zarr, anemoi]
REAL = "gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc odd_data/storm_1996.nc era5_europe_2020"
SHORT_SHARDS = 4  # dates: of the real size a small archive is one object, and slow to write


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "SHARD_DATES", SHORT_SHARDS)


@pytest.fixture
def source(tmp_path: Path, truth: xr.Dataset) -> str:
    (tmp_path / "in").mkdir()
    return weatherbench(tmp_path / "in", truth)


def convert(source: str | Path, target: Path, *options: str) -> TrainingStore:
    assert main([str(source), str(target), *options]) == 0
    store = open_archive(str(target))
    assert isinstance(store, TrainingStore)
    return store


def attributes_of(path: Path, name: str) -> dict:
    return json.loads((path / name.replace(":", "_") / "zarr.json").read_text())["attributes"]


def assert_near(source: str, store: TrainingStore) -> None:
    """Names, dates, grid, units, static fields and holes are the same; float32 bit-exact, float16 as near as
    the attributes of the store say.
    """
    archive, path = open_archive(source), Path(store.path)
    assert set(store.variables) == set(archive.variables) and (store.times == archive.times).all()
    assert store.grid.same_as(archive.grid)
    for name in archive.static_variables:
        np.testing.assert_array_equal(store.read_static(name), archive.read_static(name))
    for name in archive.variables:
        exact, ours = (each.read_block(0, len(each.times), [name]) for each in (archive, store))
        assert store.units(name) == archive.units(name)
        np.testing.assert_array_equal(np.isnan(exact), np.isnan(ours))
        packing, exact = attributes_of(path, name), exact.astype("f8")
        bound = np.zeros(exact.shape)
        if "scale_factor" in packing:
            bound += 2.0**-25 * packing["scale_factor"] + 2.0**-23 * np.abs(exact)
            bound += 2.0**-11 * np.abs(exact - packing["add_offset"])
        assert np.nanmax(np.abs(ours - exact) - bound) <= 0


def assert_equal_stores(one: TrainingStore, other: TrainingStore) -> None:
    """Values as they are stored, attributes of arrays, and sums; not the bytes of the files."""
    paths = [Path(store.path) for store in (one, other)]
    stored = [xr.open_zarr(path, decode_cf=False).load() for path in paths]
    xr.testing.assert_identical(*(ds.drop_attrs(deep=False) for ds in stored))
    sums = [{file.name: dict(np.load(file)) for file in path.rglob("sums/**/*.npz")} for path in paths]
    assert sums[0]
    np.testing.assert_equal(sums[0], sums[1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_come_back(layout: Callable, dtype: str, tmp_path: Path, truth: xr.Dataset) -> None:
    """tests/test_layouts.py reads all layouts."""
    (tmp_path / "in").mkdir()
    source = layout(tmp_path / "in", truth)
    assert_near(source, convert(source, tmp_path / "out", "--dtype", dtype))


@pytest.mark.parametrize("path", REAL.split())
def test_real_archives_come_back(path: str, tmp_path: Path) -> None:
    assert_near(needs(path), convert(needs(path), tmp_path / "out"))


def test_xarray_reads_the_same(source: str, tmp_path: Path, truth: xr.Dataset) -> None:
    """Offset, scale, dates and missing values by CF's names."""
    store = convert(source, tmp_path / "out")
    with xr.open_zarr(tmp_path / "out", consolidated=True) as ds:
        assert (ds.time.values == truth.time.values).all()
        theirs = ds["2m_temperature"].values.astype("f4")
        np.testing.assert_allclose(theirs, store.read_block(0, 5, ["2m_temperature"])[:, 0], rtol=1e-6)


def test_variables_levels_period_and_region(source: str, tmp_path: Path) -> None:
    options = "--variables geopotential temperature:850 --levels 500 1000 --period 2019-12-31T12 2020-01-01"
    store = convert(source, tmp_path / "a", *options.split())
    assert set(store.variables) == {"geopotential:500", "geopotential:1000", "temperature:850"}
    assert len(store.times) == 4
    store = convert(source, tmp_path / "b", *"--levels 850 --region 80 -90 -20 50".split())
    assert set(store.variables) == {"geopotential:850", "temperature:850", "2m_temperature"}
    assert store.grid.same_as(open_archive(source, region=(80.0, -90.0, -20.0, 50.0)).grid)


def test_another_grid_is_that_of_conservative_means(source: str, tmp_path: Path) -> None:
    store = convert(source, tmp_path / "out", "--grid", "7x8", "--dtype", "float32")
    archive, coarse = open_archive(source), global_grid((7, 8), poles=True)
    assert store.grid.same_as(coarse)
    fields = torch.from_numpy(archive.read_block(0, 5, archive.variables))
    expected = Regridder(archive.grid, coarse)(fields)
    np.testing.assert_allclose(store.read_block(0, 5, archive.variables), expected, rtol=1e-6, atol=1e-6)


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
    times = np.datetime64("2020-01-01", "ns") + np.arange(31) * np.timedelta64(6, "h")
    many = truth.isel(time=[4] * 31).assign_coords(time=times)
    many["2m_temperature"][7] = 1e9
    with pytest.raises(DataError, match="2m_temperature at 2020-01-02T18:00:00: .*--dtype float32"):
        convert(weatherbench(tmp_path, many), tmp_path / "out")
    with pytest.raises(DataError, match="its conversion has not ended"):
        open_archive(str(tmp_path / "out"))


# -- killed, continued, in parallel


@pytest.fixture
def full(tmp_path: Path) -> xr.Dataset:
    """19 dates four hours apart, so that no shard is full at the end; also full.nc."""
    rng = np.random.default_rng(1)
    time = np.datetime64("2020-01-01", "ns") + np.arange(19) * np.timedelta64(4, "h")
    coords = {"time": time, "latitude": np.arange(75.0, -80, -30), "longitude": np.arange(0, 360, 45.0)}
    names = ("t2m", "msl", "sp", "u10")
    fields = {name: (tuple(coords), rng.normal(280, 9, (19, 6, 8)).astype("f4")) for name in names}
    ds = xr.Dataset(fields, coords).assign(lsm=(("latitude", "longitude"), np.eye(6, 8, dtype="f4")))
    ds["t2m"][4:8] = np.nan  # a whole shard
    write(ds, tmp_path / "full.nc")
    return ds


def write(ds: xr.Dataset, source: Path) -> None:
    """Write a file, or replace it, since parts of it are open."""
    ds.to_netcdf(source.with_suffix(".new"), engine="h5netcdf")
    os.replace(source.with_suffix(".new"), source)


def in_a_process(argv: list[str]) -> None:
    conversion.SHARD_DATES = SHORT_SHARDS
    main(argv)


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_and_continued_gives_equal_values(full: xr.Dataset, tmp_path: Path, workers: int) -> None:
    """Killed at random moments, with one process and with two dask workers."""
    source, target = tmp_path / "full.nc", tmp_path / "killed"
    seed = random.Random(workers)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_convert"])
    arguments = [str(source), str(target), "--workers", str(workers)]
    for _ in range(4 if workers == 1 else 2):
        process = context.Process(target=in_a_process, args=(arguments,))
        process.start()
        while not (target / "sums").exists() and process.is_alive():
            pass
        process.join(seed.uniform(0, 0.15 if workers == 1 else 3.0))
        process.kill()
        process.join()
    assert_equal_stores(convert(source, target), convert(source, tmp_path / "at_once"))


def test_a_cluster_gives_equal_values(full: xr.Dataset, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    words = (tmp_path / "full.nc", tmp_path / "two", "--grid", "5x4")
    options = {"processes": False, "dashboard_address": None, "threads_per_worker": 1}
    with distributed.LocalCluster(n_workers=2, **options) as cluster:
        two = convert(*words, "--scheduler", cluster.scheduler_address)
    assert_equal_stores(two, convert(words[0], tmp_path / "one", "--grid", "5x4"))


def fail_after(number: int, argv: list[str]) -> None:
    """Convert, with an error after so many parts."""
    write_part, count = conversion.Conversion.write_part, [0]

    def fail_late(self, part):
        count[0] += 1
        if count[0] > number:
            raise DataError("the source is gone")
        return write_part(self, part)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError, match="the source is gone"):
        patch.setattr(conversion.Conversion, "write_part", fail_late)
        main(argv)


@pytest.mark.parametrize(
    ("stop", "warmer", "error"),
    [
        (19, 0, ""),
        (13, 0, "it no longer has 2020-01-03T04:00:00"),
        (14, 1, "is not what it was when it was converted; remove .*target"),
    ],
    ids=["later dates", "a date less", "other values"],
)
def test_a_source_that_changes_while_a_conversion_is_killed(
    full: xr.Dataset, tmp_path: Path, stop: int, warmer: int, error: str
) -> None:
    """Later dates are appended; a date that is lost, and other values than those written, are refused."""
    source, target = tmp_path / "source.nc", tmp_path / "target"
    write(full.isel(time=slice(14)), source)
    argv = [str(source), str(target), "--dtype", "float32"]
    fail_after(5, argv)
    with pytest.raises(DataError, match="its conversion has not ended"):
        open_archive(str(target))
    write(full.isel(time=slice(stop)) + warmer, source)
    if error:
        with pytest.raises((ConfigError, DataError), match=error):
            main(argv)
    else:
        at_once = convert(tmp_path / "full.nc", tmp_path / "at_once", "--dtype", "float32")
        assert_equal_stores(convert(source, target, "--dtype", "float32"), at_once)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("first", [0, 13], ids=["of all dates", "of the newest alone"])
def test_a_complete_store_grows_with_its_source(
    full: xr.Dataset, tmp_path: Path, first: int, dtype: str
) -> None:
    """Values, moments and sums are those of a conversion at once with the packing of the first dates; also
    after an interruption, and where the source has lost its first dates. What was there before is compared.
    """
    source, target = tmp_path / "source.nc", tmp_path / "target"
    options = ("--dtype", dtype)
    write(full.isel(time=slice(14)), source)
    for _ in range(2):
        convert(source, target, *options)
    write(full.isel(time=slice(first, None)), source)
    fail_after(1, [str(source), str(target), *options])
    grown = convert(source, target, *options)
    with pytest.MonkeyPatch.context() as patch:
        packings = {name: attributes_of(target, name) for name in grown.variables}
        patch.setattr(conversion.Conversion, "estimate_packings", lambda _: packings)
        assert_equal_stores(grown, convert(tmp_path / "full.nc", tmp_path / "once", *options))
    full["u10"][18] += 1
    write(full.isel(time=slice(first, None)), source)
    with pytest.raises(DataError, match="10m_u_component_of_wind at 2020-01-04T00:00:00 is not what it was"):
        convert(source, target, *options)


# -- what is refused


def test_two_variables_with_one_array_are_refused(tmp_path: Path, truth: xr.Dataset) -> None:
    """The height on a level, and a variable of that name: one was written over the other."""
    ds = truth[["temperature"]].rename(temperature="hgt")
    ds.assign(hgt_500=ds.hgt.sel(level=500, drop=True) + 1).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with pytest.raises(ConfigError, match="hgt_500.*its array hgt_500 would be that of hgt:500"):
        convert(tmp_path / "a.nc", tmp_path / "out")
    assert len(convert(tmp_path / "a.nc", tmp_path / "out", "--variables", "hgt").variables) == 3


def test_what_is_refused(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a line that names the option; TARGET is not changed."""
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "out"
    convert(source, target)
    for name in ("mine/conversion", "mine/sums", "marked/sums"):  # names that conversions have, or had
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "mine/thesis.tex").write_text("all of it")
    (tmp_path / "marked/zarr.json").write_text('{"attributes": {"rossby_training_store": 1}}')
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*/*")}
    for words, message in (
        (f"{target} --dtype float32", "--dtype = 'float32'"),
        (f"{target} --variables geopotential", "--variables"),
        (f"{tmp_path}/mine", "mine.*no store of datasets.convert"),
        (f"{tmp_path}/marked", "TARGET"),
        ("s3://bucket/a.zarr", "a local folder expected"),
        (f"{source}/inside", "TARGET"),
        (source, "TARGET"),
        ("/proc/store.zarr", "TARGET = '/proc/store.zarr': it cannot be written to"),
        (str(tmp_path), "TARGET"),
        ("", "TARGET"),
        (f"{target} --stepz", "--stepz"),
        ("new --grid 121", "--grid = '121'"),
        ("new --region 2 0 1 1", "0 x 1 points of the grid"),
        ("new --region 2 0 3 1", "--region"),
        ("new --workers 0", "--workers = 0"),
        ("new --variables t2m", "t2m.*nearest: '2m_temperature'"),
        ("new --levels 700", "--levels = 700"),
        ("new --period 1999-01-01 1999-02-01", "--period"),
        ("new --select member=0", "no such dimension"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            main([source, *words.split()])
    with (tmp_path / ".out.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is writing it"):
            convert(source, target)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*/*")}
    assert not Path("new").exists()
