"""planning/preflight.py names what is wrong and its fix: real disks and stores, made small."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from command_line import load_config
from config import Config
from planning import preflight as module
from planning.preflight import FAIL, PASS, WARN, period_row, plan_row, preflight, table
from planning.search import Plan
from planning.start_checks import available_memory, cluster_here, open_checked
from tests.started_jobs import ROOT, write_config


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NGPU", "NNODES", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "READ_SECONDS", 0.05)


def config_in(folder: Path, *options: str) -> Config:
    """The configuration of the tiny job, in a run's folder that does not exist yet."""
    file = folder / "tiny.toml"
    argv = ["--job.config_file", str(file if file.exists() else write_config(folder))]
    return load_config([*argv, "--job.dump_folder", str(folder / "run"), *options])


def rows_of(config: Config) -> dict[str, module.Row]:
    return {row.name: row for row in preflight(config, cluster_here("", [], 1, 2**33))}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of one MiB. Skips where none may be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "preflight", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk is a mounted tmpfs: not permitted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_sound_machine_passes(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    rows = rows_of(config)
    assert {name: row.result for name, row in rows.items()} == dict.fromkeys(
        ("data", "data, train", "memory", "checkpoints"), PASS
    )
    assert not config.dump_folder.exists()  # it leaves nothing


def unreadable(folder: Path) -> None:
    for file in next(folder.glob("*.zarr")).rglob(".z*"):
        file.write_text("{")


def damaged(folder: Path) -> None:
    array = next(folder.glob("*.zarr")) / "10m_u_component_of_wind"
    for chunk in (path for path in array.rglob("*") if path.is_file() and not path.name.startswith(".")):
        chunk.write_bytes(chunk.read_bytes()[:20])


def without_dates(folder: Path) -> None:
    """Remove the third and the fourth date."""
    path = next(folder.glob("*.zarr"))
    with xr.open_zarr(path) as opened:
        kept = opened.load().isel(time=[0, 1, *range(4, opened.sizes["time"])])
    for each in kept.variables.values():
        each.encoding.clear()
    kept.to_zarr(path, mode="w", zarr_format=2)


def nothing(folder: Path) -> None:
    return


@pytest.mark.parametrize(
    ("spoil", "options", "name", "verdict", "found"),
    [
        (nothing, ["--job.dump_folder", "/proc/run"], "start", FAIL, "job.dump_folder = '/proc/run'"),
        (nothing, ["--data.path", "/nowhere/era5.zarr"], "start", FAIL, "/nowhere/era5.zarr"),
        (unreadable, [], "start", FAIL, "wb.zarr"),
        (damaged, [], "start", FAIL, "10m_u_component_of_wind at 2020-01-.* cannot be read"),
        (without_dates, [], "data, train", WARN, "2 missing, the first after 2020-01-01T06:00:00"),
    ],
    ids=["folder", "path", "store", "chunk", "date"],
)
def test_a_fault_is_named(
    spoil: Callable[[Path], None], options: list[str], name: str, verdict: str, found: str, tmp_path: Path
) -> None:
    config = config_in(tmp_path, *options)
    spoil(tmp_path)
    row = rows_of(config)[name]
    assert row.result == verdict and re.search(found, row.found), row
    assert row.fix and f"fix: {row.fix}" in table([row])


def test_a_full_disk_is_named(small: Path, tmp_path: Path) -> None:
    """Three checkpoints of 85 kB fit into a MiB, 21 do not, and into a full one none at all."""
    folder = ["--job.dump_folder", str(small / "run"), "--training.steps=1000", "--checkpoint.interval=10"]
    for keep, verdict in (("2", PASS), ("20", FAIL)):
        rows = rows_of(config_in(tmp_path, *folder, "--checkpoint.keep_latest_k", keep))
        assert rows["checkpoints"].result == verdict
    (small / "others").write_bytes(bytes(2**20 - 2**14))
    assert rows_of(config_in(tmp_path, *folder))["checkpoints"].found.startswith("0.000 GiB free")


def planned(config: Config, memory: int) -> tuple[module.Row, Plan | None]:
    selection, here = open_checked(config), cluster_here("", [], 1, memory)
    assert here
    return plan_row(config, selection, replace(here, device=replace(here.device, memory=memory)))


def test_a_model_that_does_not_fit_names_what_would(tmp_path: Path) -> None:
    """On 4 GiB, 96 blocks of width 1,024 with their moments: 1.2 billion parameters x 16 bytes."""
    size = ("--model.dim=1024", "--model.num_layers=96", "--model.num_heads=16")
    row, _ = planned(config_in(tmp_path, *size, "--training.global_batch_size=16"), 2**32)
    assert row.result == FAIL and row.found.startswith("does not fit: 1") and "8 devices" in row.fix


def test_memory_that_is_taken_is_not_promised(tmp_path: Path) -> None:
    """A control group of 8 GiB in one of 6 GiB, of which 5 GiB are used, 1 GiB of that by cached files."""
    inner = tmp_path / "outer/inner"
    inner.mkdir(parents=True)
    for group, limit, used, cached in ((inner.parent, 6, 5, 1), (inner, 8, 1, 0)):
        (group / "memory.max").write_text(f"{limit * 2**30}\n")
        (group / "memory.current").write_text(f"{used * 2**30}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cached * 2**30}\n")
    assert available_memory(inner) == 2 * 2**30
    (inner.parent / "memory.max").write_text("max\n")
    assert 0 < available_memory(inner) <= 7 * 2**30
    cluster = cluster_here("cpu", [], 1, available_memory(inner))
    assert cluster and cluster.host_memory == cluster.device.memory <= 7 * 2**30


def dates(first: str, last: str) -> np.ndarray:
    return np.arange(np.datetime64(first, "s"), np.datetime64(last, "s"), np.timedelta64(6, "h"))


def test_missing_dates_of_a_period() -> None:
    whole = dates("2001-01-01", "2001-01-26")
    ends = whole[0], np.datetime64("2001-01-25T23:59:59")
    assert period_row("train", whole, *ends).result == PASS
    row = period_row("train", np.delete(whole, [10, 11, 40]), *ends)
    assert row.result == WARN and "3 missing, the first after 2001-01-03T06:00:00" in row.found
    assert period_row("train", whole, ends[1], ends[1] + np.timedelta64(30, "D")).result == FAIL


@pytest.mark.slow
def test_the_demo_passes() -> None:
    command = [sys.executable, "-m", "planning.preflight", "train_configs/demo.toml"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("pass  memory") == 1 and not ended.stderr
