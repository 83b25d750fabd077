"""datasets.convert: every layout and every real archive as a training store, killed, continued, appended."""

import hashlib
import json
import multiprocessing
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr

import archives.training_store
from archives.archive import Archive, open_archive
from archives.float16 import Packed, choose_packing, largest_error
from archives.grid import area_weights
from archives.training_store import TrainingStore
from conversion.run import only_writer
from conversion.source import crop, parse_grid
from datasets.convert import main
from errors import ConfigError, DataError
from tests.sample_archives import EXACT, NAMES, analyses, anemoi, cds_old, packed_zarr, tutorial, values
from tests.test_archive import needs
from tests.test_grid import globe

SHORT_SHARDS = 4  # dates: of the real size a small archive is one object, and slow to write


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives.training_store, "SHARD_DATES", SHORT_SHARDS)


@pytest.fixture(scope="module")
def truth() -> xr.Dataset:
    return analyses()


def convert(source: str, target: Path, *options: str) -> Archive:
    assert main([source, str(target), *options]) == 0
    return open_archive(str(target))


def bound(exact: np.ndarray, path: Path, name: str) -> np.ndarray:
    """What the store's attributes state of the largest error."""
    array = json.loads((path / name.replace(":", "_") / "zarr.json").read_text())["attributes"]
    small = 2.0**-25 * array["scale_factor"] + 2.0**-23 * np.abs(exact)
    return 2.0**-11 * np.abs(exact - array["add_offset"]) + small


def digest(path: Path) -> str:
    """Of the names and bytes of all files."""
    found = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        found.update(f"{file.relative_to(path)}\n".encode() + file.read_bytes())
    return found.hexdigest()


@pytest.mark.parametrize("layout", [*EXACT, cds_old, packed_zarr], ids=lambda layout: layout.__name__)
def test_every_layout_comes_back(layout: Callable, tmp_path: Path, truth: xr.Dataset) -> None:
    """Names, dates, grid, static fields and holes as in the source; float32 to the bit, float16 as stated."""
    (tmp_path / "in").mkdir()
    source = layout(tmp_path / "in", truth)
    archive = open_archive(source)
    wanted = archive.read_block(0, 5, NAMES)
    for dtype in ("float32", "float16") if layout in (EXACT[0], cds_old) else ("float32",):
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


def test_the_tutorial_comes_back(tmp_path: Path, truth: xr.Dataset) -> None:
    """Plain HDF5 without coordinates, two years that do not follow each other closely."""
    (tmp_path / "in").mkdir()
    source = open_archive(tutorial(tmp_path / "in", truth))
    found = convert(source.path, tmp_path / "out", "--dtype", "float32")
    assert (found.times == source.times).all() and found.grid.same_as(source.grid)
    assert sorted(found.variables) == sorted(source.variables)
    wanted, block = (each.read_block(0, 6, source.variables) for each in (source, found))
    np.testing.assert_array_equal(block, wanted)


def test_anemoi_comes_back_and_its_mask_without_dates(tmp_path: Path, truth: xr.Dataset) -> None:
    found = convert(
        anemoi(tmp_path, truth), tmp_path / "out", "--static", "land_sea_mask", "--dtype", "float32"
    )
    assert sorted(found.variables) == ["2m_temperature", "temperature:500"]
    assert found.static_variables == ["land_sea_mask"]
    t2m = found.read_block(0, 5, ["2m_temperature"])[:, 0]
    np.testing.assert_array_equal(t2m, truth["2m_temperature"].values)
    np.testing.assert_array_equal(found.read_static("land_sea_mask"), truth.land_sea_mask.values)


@pytest.mark.parametrize(
    "path",
    ["gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc", "storm_1996", "era5_europe_2020"],
)
def test_real_archives_come_back(path: str, tmp_path: Path) -> None:
    archive = open_archive(needs(path))
    found = convert(needs(path), tmp_path / "out")
    assert set(found.variables) == set(archive.variables) and (found.times == archive.times).all()
    for name in archive.variables:
        exact, ours = (each.read_block(0, len(each.times), [name]).astype("f8") for each in (archive, found))
        assert (np.isnan(exact) == np.isnan(ours)).all()
        assert np.nanmax(np.abs(ours - exact) - bound(exact, tmp_path / "out", name)) <= 0
        assert found.shown_units(name) == archive.shown_units(name)


def test_xarray_reads_the_same(tmp_path: Path, truth: xr.Dataset) -> None:
    """Offset, scale, dates and missing values by CF's names."""
    source = EXACT[0](tmp_path, truth)
    found = convert(source, tmp_path / "out")
    with xr.open_zarr(tmp_path / "out", consolidated=True) as ds:
        assert (ds.time.values == truth.time.values).all()
        theirs = ds["2m_temperature"].values.astype("f4")
        np.testing.assert_allclose(theirs, found.read_block(0, 5, ["2m_temperature"])[:, 0], rtol=1e-6)


def test_a_bit_that_turned_over_in_a_value_is_seen(tmp_path: Path, truth: xr.Dataset) -> None:
    """lz4 unpacks another number without a word; zarr-python and the loader's threads both look."""
    store = convert(EXACT[0](tmp_path, truth), tmp_path / "out", "--dtype", "float32")
    assert store.by_threads(["2m_temperature"])
    path = tmp_path / "out/2m_temperature/c/0/0/0"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="2m_temperature.* checksum"):
        open_archive(str(tmp_path / "out")).read(0, ["2m_temperature"])
    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(path.parents[3], mode="r")[0]


def test_valid_dates_are_known(tmp_path: Path, truth: xr.Dataset) -> None:
    ds = truth.copy(deep=True)
    ds["2m_temperature"][3] = np.nan
    convert(EXACT[0](tmp_path, ds), tmp_path / "out")
    with xr.open_zarr(tmp_path / "out") as store:
        names = store.valid.attrs["variables"]
        expected = np.ones((5, len(names)), int)
        expected[3, names.index("2m_temperature")] = 0
        assert store.valid.values.tolist() == expected.tolist()


# -- what is chosen


def test_variables_levels_period_and_static(tmp_path: Path, truth: xr.Dataset) -> None:
    source = EXACT[0](tmp_path, truth)
    chosen = ["--variables", "geopotential", "temperature:850", "--levels", "500", "1000", "--static"]
    found = convert(source, tmp_path / "a", *chosen, "--period", "2019-12-31T12", "2020-01-01")
    assert set(found.variables) == {"geopotential:500", "geopotential:1000", "temperature:850"}
    assert len(found.times) == 4 and not found.static_variables
    assert set(convert(source, tmp_path / "b", "--levels", "850").variables) == {
        "geopotential:850",
        "temperature:850",
        "2m_temperature",
    }


def test_a_region_is_cut_across_the_seam(tmp_path: Path, truth: xr.Dataset) -> None:
    source = EXACT[0](tmp_path, truth)
    found = convert(source, tmp_path / "out", "--region", "-20", "80", "-90", "50", "--dtype", "float32")
    assert found.grid.latitude.tolist() == [75, 45, 15, -15]
    assert found.grid.longitude.tolist() == [-90, -45, 0, 45]
    wanted = open_archive(source).read(0, NAMES)[:, :4][..., [6, 7, 0, 1]]
    np.testing.assert_array_equal(found.read(0, NAMES), wanted)


@pytest.mark.parametrize("method", ["conservative", "bilinear"])
def test_another_grid(method: str, tmp_path: Path) -> None:
    """Conservative keeps the area mean; bilinear a function that is linear in latitude."""
    fine, coarse = globe(12, 16), parse_grid("7x8")
    rng = np.random.default_rng(0)
    field = (
        rng.normal(size=(2, *fine.shape))
        if method == "conservative"
        else np.tile(fine.latitude[:, None], (2, 1, 16))
    )
    time = np.array(["2020-01-01", "2020-01-02"], "datetime64[ns]")
    coords = {"time": time, "latitude": fine.latitude, "longitude": fine.longitude}
    ds = xr.Dataset({"t2m": (tuple(coords), field.astype("f4"))}, coords)
    ds.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    options = ["--grid", "7x8", "--method", method, "--dtype", "float32"]
    found = convert(str(tmp_path / "a.nc"), tmp_path / "out", *options)
    block = found.read_block(0, 2, ["2m_temperature"])[:, 0]
    assert found.grid.same_as(coarse)
    if method == "conservative":
        means = [
            (f * area_weights(g.latitude)[:, None]).mean((1, 2)) for f, g in ((field, fine), (block, coarse))
        ]
        np.testing.assert_allclose(*means, atol=1e-6)
    else:
        rows = np.clip(coarse.latitude, -82.5, 82.5)
        np.testing.assert_allclose(block, np.tile(rows[:, None], (2, 1, 8)), atol=1e-5)
    like = convert(str(tmp_path / "a.nc"), tmp_path / "b", "--grid_like", str(tmp_path / "out"), *options[2:])
    np.testing.assert_array_equal(like.read(1, ["2m_temperature"])[0], block[1])


def test_slabs_of_latitudes(tmp_path: Path, truth: xr.Dataset) -> None:
    """Chunks of four of the six rows: the last is not full."""
    source = EXACT[0](tmp_path, truth)
    found = convert(source, tmp_path / "out", "--rows", "4", "--dtype", "float32")
    np.testing.assert_array_equal(found.read_block(0, 5, NAMES), values(truth))
    metadata = json.loads((tmp_path / "out/2m_temperature/zarr.json").read_text())
    assert metadata["chunk_grid"]["configuration"]["chunk_shape"] == [SHORT_SHARDS, 8, 8]
    assert metadata["codecs"][0]["configuration"]["chunk_shape"] == [1, 4, 8]


# -- float16


def test_packing_is_exact_in_binary_and_keeps_zeros() -> None:
    packed = choose_packing(3.1e-3, 4.7e-3)
    assert packed == Packed(2.0**-8, 2.0**-8)
    assert packed.decode(packed.encode(np.zeros(3, "f4"))).tolist() == [0, 0, 0]
    assert choose_packing(float("nan"), float("nan")) == Packed(1, 0)
    assert choose_packing(101325, 0).scale == 128  # a constant: as near as float16 has it


def test_float16_refuses_what_it_cannot_hold(tmp_path: Path, truth: xr.Dataset) -> None:
    """One date that no sample foretold."""
    for value in (1e9, 3e6):
        with pytest.raises(DataError, match="write it with --dtype float32"):
            field = np.full((6, 8), value, "f4") + np.arange(8, dtype="f4") * 1e3
            largest_error(field, Packed(8, 280).encode(field), Packed(8, 280))
    ds = truth.copy(deep=True)
    ds["2m_temperature"] = ds["2m_temperature"].where(ds.time != ds.time[1], 1e9)
    many = xr.concat([ds.isel(time=[0]), *[ds.isel(time=[4])] * 30], "time", data_vars="minimal")
    times = np.datetime64("2020-01-01", "ns") + np.arange(31) * np.timedelta64(6, "h")
    many = many.assign_coords(time=times)
    many["2m_temperature"][7] = 1e9
    source = EXACT[0](tmp_path, many)
    with pytest.raises(
        DataError, match="2m_temperature at 2020-01-02T18:00:00: .* too large .*--dtype float32"
    ):
        convert(source, tmp_path / "out")
    with pytest.raises(DataError, match="its conversion has not ended; run the same command again"):
        open_archive(str(tmp_path / "out"))


# -- killed, continued, in parallel, appended


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
    archives.training_store.SHARD_DATES = SHORT_SHARDS
    main(argv)


def test_killed_and_continued_gives_the_same_bytes(tmp_path: Path) -> None:
    """At three random moments after the start; benchmarks/convert_killed.py does it at twenty."""
    source = long_source(tmp_path)
    convert(source, tmp_path / "whole")
    wanted = digest(tmp_path / "whole")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.test_convert"])
    target, seed = tmp_path / "killed", random.Random(0)
    for number in range(3):
        shutil.rmtree(target, ignore_errors=True)
        process = context.Process(target=in_a_process, args=([source, str(target)],))
        process.start()
        while not (target / "conversion.jsonl").exists() and process.is_alive():
            pass
        process.join(seed.uniform(0, 0.15))
        process.kill()
        process.join()
        convert(source, target)
        assert digest(target) == wanted, number


def test_two_workers_give_the_same_bytes(tmp_path: Path) -> None:
    source = long_source(tmp_path)
    for name, options in (("one", ()), ("two", ("--workers", "2"))):
        convert(source, tmp_path / name, "--grid", "5x4", *options)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_a_cluster_gives_the_same_bytes(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    source = long_source(tmp_path)
    convert(source, tmp_path / "one")
    options = {"processes": False, "dashboard_address": None, "threads_per_worker": 1}
    with distributed.LocalCluster(n_workers=2, **options) as cluster:
        convert(source, tmp_path / "two", "--scheduler", cluster.scheduler_address)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


def test_later_dates_are_appended(tmp_path: Path) -> None:
    """Of a source that has grown, and of another: the last shard that was not full is written again."""
    before, after = long_source(tmp_path, 14), long_source(tmp_path, 19)
    target, grown = tmp_path / "target", tmp_path / "grown.nc"
    shutil.copy(before, grown)
    convert(str(grown), target, "--dtype", "float32")
    untouched = [target / f"2m_temperature/c/{n}/0/0" for n in (0, 2)]
    old = [path.stat().st_mtime_ns for path in untouched]
    grown.unlink()
    shutil.copy(after, grown)
    found = convert(str(grown), target, "--dtype", "float32")
    assert len(found.times) == 19 and [path.stat().st_mtime_ns for path in untouched] == old
    shutil.rmtree(tmp_path / "whole", ignore_errors=True)
    convert(str(grown), tmp_path / "whole", "--dtype", "float32")
    assert digest(target) == digest(tmp_path / "whole")
    exact = open_archive(after)
    other = convert(before, tmp_path / "other")
    other = convert(after, tmp_path / "other", "--period", "2020-01-03T08", "2020-01-31")
    np.testing.assert_array_equal(other.times, exact.times)
    block = other.read_block(0, 19, ["2m_temperature"])
    np.testing.assert_allclose(block, exact.read_block(0, 19, ["2m_temperature"]), atol=0.02)


@pytest.mark.parametrize("later", [False, True])
def test_an_append_that_is_killed_goes_on(later: bool, tmp_path: Path) -> None:
    before, after = long_source(tmp_path, 14), long_source(tmp_path, 19)
    convert(before, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    convert(after, tmp_path / "a")
    store = TrainingStore(tmp_path / "b")
    times = open_archive(after).times[14:]
    store.begin(times, {"source": after, "period": []})
    assert store.is_begun() and store.complete  # killed before anything else, then before the first date
    if later:
        store.resume()
        assert not TrainingStore(tmp_path / "b").complete
        with pytest.raises(ConfigError, match="SOURCE .* was begun with"):
            main([before, str(tmp_path / "b")])
    convert(after, tmp_path / "b")
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


# -- what is refused


def test_what_is_refused(tmp_path: Path, truth: xr.Dataset) -> None:
    """Each in a line that names the option; what lies at TARGET stays as it is."""
    source, target = EXACT[0](tmp_path, truth), tmp_path / "out"
    convert(source, target)
    before = digest(target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("")
    for argv, message in (
        ([source, str(target), "--dtype", "float32"], "--dtype 'float32': .* was begun with 'float16'"),
        ([source, str(target), "--levels", "500"], r"--levels \[500\]: .* was begun with 'nothing'"),
        ([source, str(tmp_path / "mine")], "exists and is no training store"),
        ([source, "s3://bucket/a.zarr"], "a local folder expected"),
        ([source], "TARGET is missing"),
        ([source, str(target), "--check"], "--check reads a source and writes nothing"),
        ([source, str(target), "--stepz"], "unrecognized arguments: --stepz"),
        ([source, "new", "--grid", "121"], "--grid '121': latitudes x longitudes expected"),
        ([source, "new", "--grid", "4x8", "--grid_like", source], "keep one of them"),
        ([source, "new", "--region", "1", "2", "0", "1"], "0 x 1 points of the grid lie in it"),
        ([source, "new", "--rows", "7"], "--rows 7: the grid has 6 latitudes"),
        ([source, "new", "--workers", "0"], "--workers 0: at least 1"),
        ([source, "new", "--variables", "t2m"], "--variables t2m: .*; nearest: '2m_temperature'"),
        ([source, "new", "--levels", "700"], "--levels 700: .* no variable on it"),
        ([source, "new", "--period", "1999-01-01", "1999-02-01"], "no date of it is in"),
        ([source, "new", "--select", "member=0"], "no such dimension"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            main(argv)
    assert digest(target) == before and not Path("new").exists()


def test_dates_in_between_are_no_append(tmp_path: Path, truth: xr.Dataset) -> None:
    (tmp_path / "a").mkdir()
    some = EXACT[0](tmp_path / "a", truth.isel(time=[0, 1, 3, 4]))
    convert(some, tmp_path / "out")
    with pytest.raises(ConfigError, match="which .* lacks among its own dates"):
        convert(EXACT[0](tmp_path, truth), tmp_path / "out")


def test_two_at_once_are_one_too_many(tmp_path: Path, truth: xr.Dataset) -> None:
    source = EXACT[0](tmp_path, truth)
    convert(source, tmp_path / "out")
    with only_writer(tmp_path / "out"), pytest.raises(ConfigError, match="another process is writing it"):
        convert(source, tmp_path / "out")


def test_crop_takes_points_on_its_edges() -> None:
    window = crop(globe(19, 36, poles=True), (-90, 90, 0, 360))
    assert window.grid.shape == (19, 36)
    window = crop(globe(19, 36, poles=True), (30, 60, 350, 20))
    assert window.grid.latitude.tolist() == [60, 50, 40, 30]
    assert window.grid.longitude.tolist() == [350, 360, 370, 380] or window.grid.longitude[0] == -10
