"""A start: what its checks refuse in one line; the first converts data.path to a training store, once."""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import xarray as xr

import evaluate
import forecast
from command_line import load_config
from config import Config
from datasets import convert, simulated
from datasets.archive import Archive, TrainingStore, open_archive
from datasets.simulated import RandomFields
from errors import ConfigError, DataError, RunFailed
from planning.start_checks import check_room, main, open_checked, plan_here
from tests.planned import run_train
from tests.started_jobs import losses, run_options, small_dataset, small_wave, write_config
from training.config_checks import load_checked

U10, LSM = "10m_u_component_of_wind", "land_sea_mask"


def write_source(path: Path, num_dates: int = 40, raised: int = -1, mask: float = 1.0) -> None:
    """NetCDF of a wave, one date of which may be raised by 3 m/s, and of a land-sea mask."""
    ds = small_dataset({U10: small_wave(num_dates)})
    if raised >= 0:
        ds[U10][raised] += 3
    ds[LSM] = ("latitude", "longitude"), np.eye(6, 8, dtype="f4") * mask
    ds.to_netcdf(path.with_suffix(".new"), engine="h5netcdf")
    os.replace(path.with_suffix(".new"), path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_source(tmp_path / "source.nc")
    return tmp_path / "source.nc"


@pytest.fixture
def words(tmp_path: Path, source: Path) -> list[str]:
    """A configuration that reads the source, and the place of its store."""
    data = {"variables": [U10], "static_variables": [LSM], "store_path": str(tmp_path / "stores/a.zarr")}
    config_file = write_config(tmp_path, path=str(source), data=data, training={"steps": 3})
    return run_options(config_file, tmp_path / "run")


def open_store(words: list[str]) -> TrainingStore:
    selection = open_checked(load_config(words))
    assert isinstance(selection.archive, TrainingStore)
    return selection.archive


def test_a_run_trains_from_the_store_that_it_converts_once(words, source, tmp_path, capfd):
    """With the losses of a store that the command has converted, and without the source afterwards."""
    run_train(*words, "--checkpoint.enable=false")
    assert "converting 40 dates of 1 variables" in capfd.readouterr().err
    store = tmp_path / "stores/a.zarr"
    exact = open_archive(str(source)).read_block(0, 40, [U10])
    np.testing.assert_array_equal(open_archive(str(store)).read_block(0, 40, [U10]), exact)
    first = losses(tmp_path / "run")
    assert convert.main([str(source), str(tmp_path / "own.zarr"), "--dtype", "float32"]) == 0
    more = ["--data.path", str(tmp_path / "own.zarr"), "--job.dump_folder", str(tmp_path / "again")]
    run_train(*words, *more, "--checkpoint.enable=false")
    assert losses(tmp_path / "again") == first
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    run_train(*words, "--checkpoint.enable=false")
    assert "converting" not in capfd.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in store.rglob("*")}


def test_the_command_converts_what_the_configuration_reads(words):
    assert convert.main(words) == 0
    store = open_archive(str(load_config(words).data.store_path))
    assert store.variables == [U10] and store.static_variables == [LSM]
    assert open_store(words).path == store.path


@pytest.mark.parametrize(
    "change", [{"raised": 39}, {"raised": 0}, {"mask": 2.0}, {"raised": 3, "num_dates": 39}]
)
def test_a_source_with_other_values_is_refused_by_name(words, source, change):
    """Of a variable, or a static one; also where the source has lost a date as well."""
    open_store(words)
    write_source(source, **change)
    name = LSM if "mask" in change else U10
    with pytest.raises(DataError, match=f"{name}.* is not what it was when it was converted; remove"):
        open_store(words)


def test_a_full_disk_is_one_line_and_the_next_start_continues(words, monkeypatch):
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with monkeypatch.context() as patch:
        patch.setattr(convert, "write_shard", full)
        with pytest.raises(RunFailed, match="No space left on device.*continues"):
            open_store(words)
    assert len(open_store(words).times) == 40


def test_a_source_that_cannot_be_read_is_not_the_disk_of_the_store(source, tmp_path, monkeypatch):
    stale = Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE)))
    monkeypatch.setattr(Archive, "read_block", stale)
    with pytest.raises(DataError, match="cannot read .*source.nc.*Stale file handle.*continues"):
        convert.main([str(source), str(tmp_path / "own.zarr")])


def test_what_a_first_start_refuses(words, tmp_path, monkeypatch):
    """Each in one line that names the key, before anything is written."""
    for options, message in (
        (["--data.store_path", "/proc/a.zarr"], "data.store_path = '/proc/a.zarr': it cannot be written to"),
        (["--data.path", "no/such.nc"], "data.path = 'no/such.nc': there is no such file"),
        (["--training.local_batch_size", "1000"], "training.local_batch_size = 1000: data.train_period has"),
        (["--data.validation_period", '["1999-01-01", "1999-02-01"]'], "data.validation_period"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_store([*words, *options])
    monkeypatch.setattr(convert, "LARGEST_FIRST_START", 1000)
    with pytest.raises(ConfigError, match="data.path.*0 GiB; convert it first.*datasets.convert"):
        open_store(words)
    for name in ("WORLD_SIZE", "NNODES"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            with pytest.raises(ConfigError, match="data.path.*several processes.*datasets.convert"):
                open_store(words)
    assert not (tmp_path / "stores/a.zarr").exists()


@pytest.mark.parametrize("world_size", ["1", "2"])
def test_a_store_of_other_settings_is_refused_by_name(words, tmp_path, monkeypatch, world_size):
    """Of the same files and dates, or of another source; of ranks that were started without the checks."""
    open_store(words)
    shutil.copy(tmp_path / "source.nc", tmp_path / "other.nc")
    monkeypatch.setenv("WORLD_SIZE", world_size)
    for options, key in (
        (["--data.region", "[80, 0, -80, 200]"], "data.region"),
        (["--data.static_path", str(tmp_path / "source.nc")], "data.static_path"),
        (["--data.path", str(tmp_path / "other.nc")], "data.path"),
        (["--data.train_period", '["2020-01-01", "2020-01-10"]'], "data.train_period"),
        (["--data.step_hours", "12"], "data.step_hours"),  # its moments are of changes over 6 hours
    ):
        with pytest.raises(ConfigError, match=f"^{key} = .*stores/a.zarr' was begun with"):
            open_store([*words, *options])
    assert len(open_store(words).times) == 40


def test_another_member_of_the_same_file_is_refused(words, source):
    member = small_dataset({U10: small_wave(40)})
    both = xr.concat([member, member + 1], xr.DataArray([0, 1], dims="member", name="member"))
    both[LSM] = ("latitude", "longitude"), np.ones((6, 8), "f4")
    both.transpose("time", "member", ...).to_netcdf(source, engine="h5netcdf")
    open_store([*words, "--data.select", '["member=0"]'])
    with pytest.raises(ConfigError, match="^data.select = .*was begun with"):
        open_store([*words, "--data.select", '["member=1"]'])


def test_ranks_train_from_a_store_with_other_static_fields(words, source, tmp_path, monkeypatch):
    assert convert.main([str(source), str(tmp_path / "own.zarr")]) == 0
    write_source(tmp_path / "static.nc", mask=2.0)
    more = ["--data.path", str(tmp_path / "own.zarr"), "--data.static_path", str(tmp_path / "static.nc")]
    for world_size in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        selection = open_checked(load_config([*words, *more]))
        assert selection.archive.path == str(tmp_path / "own.zarr")
        assert selection.static[LSM].max() == 2


def test_static_fields_with_a_time_axis_are_compared(words, source, tmp_path):
    def write(mask: float) -> None:
        ds = small_dataset({LSM: np.full((40, 6, 8), mask, "f4")})
        ds[LSM].attrs["units"] = "1"
        ds.to_netcdf(tmp_path / "mask.new", engine="h5netcdf")
        os.replace(tmp_path / "mask.new", tmp_path / "in/mask.nc")

    (tmp_path / "in").mkdir()
    small_dataset({U10: small_wave(40)}).to_netcdf(tmp_path / "in/wind.nc", engine="h5netcdf")
    words = [*words, "--data.path", str(tmp_path / "in")]
    write(1.0)
    open_store(words)
    write(0.5)
    with pytest.raises(DataError, match=f"{LSM} is not what it was when it was converted"):
        open_store(words)


def test_paths_with_spaces_brackets_and_other_letters(words, source, tmp_path):
    """Brackets are a pattern only where no file has that name; a store may be named as a URL."""
    (tmp_path / "é [5] ü").mkdir()
    path = str(shutil.copy(source, tmp_path / "é [5] ü/a b.nc"))
    store = open_store([*words, "--data.path", path, "--data.store_path", str(tmp_path / "é [6]/a b.zarr")])
    assert open_store([*words, "--data.path", f"file://{store.path}"]).path == store.path


def test_dates_without_all_variables_are_not_converted(words, tmp_path, source):
    """Hourly and six-hourly sources: the hours between count nowhere."""
    other = "10m_v_component_of_wind"
    hourly = small_dataset({other: small_wave(235)})
    times = np.datetime64("2020-01-01", "ns") + np.arange(235) * np.timedelta64(1, "h")
    hourly.assign_coords(time=times).to_netcdf(tmp_path / "hourly.nc", engine="h5netcdf")
    more = ["--data.variables", f'["{U10}", "{other}"]', "--data.more_paths"]
    store = open_store([*words, *more, f'["{tmp_path}/hourly.nc"]'])
    np.testing.assert_array_equal(store.times, open_archive(str(source)).times)


def test_random_fields_are_a_function_of_date_and_variable(words, tmp_path):
    more = ["--data.path", "random", "--data.grid_shape", "[6, 8]", "--data.variables", f'["{U10}", "msl"]']
    config = load_config([*words, *more])
    one, other = RandomFields(config.data), RandomFields(config.data)
    block = one.read_block(0, 20, [U10])
    np.testing.assert_array_equal(other.read_block(3, 5, [U10]), block[3:5])
    assert not np.array_equal(block[3], block[4])
    run_train(*words, *more, "--checkpoint.enable=false")
    assert len(losses(tmp_path / "run")) == 3
    with pytest.raises(ConfigError, match="data.path = 'random'"):
        evaluate.run(config, evaluate.parse_options([])[0])


def test_random_fields_of_a_region_and_of_a_validation_period_alone(words):
    """The region was the globe, and all dates were of the validation."""
    more = ["--data.path", "random", "--data.grid_shape", "[6, 8]", "--data.region", "[60, 350, 10, 20]"]
    more += ["--data.train_period", "[]", "--data.validation_period", '["2020-01-01", "2020-01-31"]']
    selection = open_checked(load_config([*words, *more]))
    assert not selection.archive.grid.periodic and selection.archive.grid.shape == (6, 8)
    assert selection.archive.grid.latitude[[0, -1]].tolist() == [60, 10]
    assert len(selection.train) == 4 * 365 and len(selection.validation) == 4 * 31


def test_a_region_of_simulated_weather_is_a_store_of_its_own(words, tmp_path, monkeypatch):
    """It was read from the store of the globe, and as slowly as foreign files."""
    monkeypatch.setattr(convert, "SIMULATED_PATH", str(tmp_path / "simulated.zarr"))
    monkeypatch.setattr(simulated, "NUM_YEARS", 1)
    monkeypatch.setattr(simulated, "NUM_DAYS", 3)
    monkeypatch.setattr(simulated, "DEFAULTS", replace(simulated.DEFAULTS, spin_up_days=0))
    more = ["--data.path", "simulated", "--data.train_period", "[]", "--data.validation_period", "[]"]
    more += ["--data.variables", '["geopotential:300"]', "--data.region", "[60, 0, 0, 90]"]
    store = open_store([*words, *more])
    assert store.path == str(tmp_path / "stores/a.zarr") and store.grid.shape == (11, 17)
    exact = open_archive(str(tmp_path / "simulated.zarr"), region=(60, 0, 0, 90))
    np.testing.assert_array_equal(store.read(5, store.variables), exact.read(5, store.variables))


def test_the_largest_configuration_is_refused_without_a_request(tmp_path, monkeypatch):
    """Its path is one that a user has to name."""
    monkeypatch.setattr(convert, "open_archive", lambda *_: pytest.fail("opened"))
    with pytest.raises(ConfigError, match="data.path = 'era5_1024x2048.zarr'.*random"):
        open_checked(load_config(["--job.config_file", "train_configs/vit1b.toml"]))


def test_a_forecast_without_a_checkpoint_is_refused_before_weather_is_simulated(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.convert.write_simulated", lambda *_: pytest.fail("simulated"))
    with pytest.raises(ConfigError, match="job.dump_folder.*no checkpoint there"):
        forecast.open_data(load_config(["--job.dump_folder", str(tmp_path)]))


@pytest.mark.slow
def test_two_runs_that_ask_for_the_same_store_at_once(words, start_job, tmp_path):
    """One converts, the other one waits, or finds it done."""
    jobs = [start_job(Path(words[1]), tmp_path / f"run{number}") for number in range(2)]
    assert [job.end(180) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    assert losses(tmp_path / "run0") == losses(tmp_path / "run1")


# -- machine


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NGPU", "NNODES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def options_in(folder: Path, *options: str) -> list[str]:
    """The tiny job, in a run's folder that does not exist yet."""
    file = folder / "tiny.toml"
    argv = ["--job.config_file", str(file if file.exists() else write_config(folder))]
    return [*argv, "--job.dump_folder", str(folder / "run"), *options]


def config_in(folder: Path, *options: str) -> Config:
    return load_config(options_in(folder, *options))


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB. Skips where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk is a mounted tmpfs: not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_sound_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(options_in(tmp_path))
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()  # it leaves nothing


def test_a_full_disk_is_named(small: Path, tmp_path: Path) -> None:
    """Three checkpoints of 85 kB fit into a MiB, 21 do not, and into a full one none at all. One process
    without run_train.sh's checks filled the disk.
    """
    options = ["--job.dump_folder", str(small / "run"), "--training.steps=1000", "--checkpoint.interval=10"]

    def check(keep: str) -> None:
        open_checked(config_in(tmp_path, *options, "--checkpoint.keep_latest_k", keep))

    check("2")
    with pytest.raises(ConfigError, match="GiB of checkpoints are to come"):
        check("20")
    (small / "others").write_bytes(bytes(2**20 - 2**14))
    with pytest.raises(ConfigError, match="0.000 free; make room"):
        check("2")


def test_what_trains_here_and_is_not_planned_is_not_refused(tmp_path: Path) -> None:
    """Float8 is emulated on a CPU; of adapters the planner would count all weights."""
    main(options_in(tmp_path, "--float8.enable"))
    selection = open_checked(config_in(tmp_path))
    assert plan_here(config_in(tmp_path, "--lora.rank=4"), selection, 1) is None


def test_a_model_that_does_not_fit_names_what_would(tmp_path: Path) -> None:
    """On 4 GiB, 96 blocks of width 1,024 with their moments: 1.2 billion parameters x 16 bytes."""
    size = ("--model.dim=1024", "--model.num_layers=96", "--model.num_heads=16")
    config = config_in(tmp_path, *size, "--training.global_batch_size=16")
    made = plan_here(config, open_checked(config), 1)
    assert made
    device = made.cluster.device
    little, enough = (
        replace(made, cluster=replace(made.cluster, device=replace(device, memory=memory)))
        for memory in (2**32, 2**36)
    )
    warning = check_room(config, little)
    assert (
        re.match(r"1\d\.\d+ GiB a rank are planned, and there are \d\.", warning) and "8 devices" in warning
    )
    assert check_room(config, enough) == ""


@pytest.mark.parametrize(
    "more", ["--model.dim=4096 --model.num_layers=16", "--training.local_batch_size=65536"]
)
def test_sizes_that_the_machine_does_not_hold_are_refused(tmp_path, monkeypatch, more):
    options = ["--job.config_file", str(write_config(tmp_path)), "--job.dump_folder", str(tmp_path / "run")]
    monkeypatch.setattr("planning.start_checks.machine", SimpleNamespace(memory=lambda: 2**24))
    open_checked(load_checked(options))
    with pytest.raises(ConfigError, match="GiB, and this machine has"):
        open_checked(load_checked([*options, *more.split()]))
