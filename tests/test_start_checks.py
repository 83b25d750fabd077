"""planning/start_checks.py names what is wrong and its fix: real disks and stores, made small."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from command_line import load_config
from config import Config
from errors import ConfigError
from planning.start_checks import check_room, main, open_checked, plan_here
from tests.started_jobs import write_config
from training.config_checks import load_checked


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
