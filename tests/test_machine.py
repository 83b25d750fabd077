"""What a machine lacks, or leaves to a run: one line with the fix, or a way without it."""

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch._inductor import config as inductor
from torch._inductor.exc import CppCompileError, InductorError

import errors
from datasets.convert import WORKER_BYTES, most_workers
from datasets.convert import main as convert
from errors import ConfigError
from jobs import machine
from jobs.durable_files import write_durably
from planning.start_checks import open_checked
from tests.sample_archives import weatherbench
from tests.started_jobs import ROOT, write_config
from training.config_checks import load_checked


def set_up(folder: Path, venv: int, install: int = 0) -> subprocess.CompletedProcess[str]:
    """Source setup.sh in a project whose `python -m venv` and `pip install` end with these codes."""
    python = folder / ".venv" / "bin" / "python"
    made = f'#!/bin/sh\n[ "$4" = --quiet ] && exit {install}\nexit {venv}\n'  # pip install, pip --version
    make = f"mkdir -p {python.parent}; ln -sf {folder}/made {python}; exit {venv}"
    base = f'#!/bin/sh\n[ "$1" = -c ] && exit 0\n{make}\n'
    for name, text in {"made": made, "python3": base}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for name in ("setup.sh", "requirements.txt"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    environment.pop("ROSSBY_PYTHON", None)
    command = ["bash", "-c", "set -euo pipefail; source ./setup.sh"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_python_without_pip_is_one_line_until_it_has_one(tmp_path):
    """Debian's makes the folder and fails; the next start found it without pip."""
    ended = set_up(tmp_path, venv=1)
    assert ended.returncode == 2 and "apt install python3-venv" in ended.stderr.splitlines()[-1]
    assert set_up(tmp_path, venv=0).returncode == 0 and (tmp_path / ".venv" / "installed.txt").exists()


def test_packages_that_are_not_installed_are_tried_again(tmp_path):
    ended = set_up(tmp_path, venv=0, install=1)
    assert ended.returncode == 1 and "is not installed" in ended.stderr.splitlines()[-1]
    assert set_up(tmp_path, venv=0).returncode == 0


def test_an_environment_whose_python_was_removed_is_made_again(tmp_path):
    assert set_up(tmp_path, venv=0).returncode == 0
    python = tmp_path / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    assert set_up(tmp_path, venv=0).returncode == 0 and python.is_file()


def test_a_machine_without_linuxs_tools_starts_as_others_do(tmp_path):
    """macOS has no nproc, flock or getent, and its env blocks no signals."""
    for name in ("bash", "dirname", "readlink", "date", "grep", "tr", "getconf", "cat"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    (tmp_path / "env").write_text('#!/bin/bash\n[[ "$1" != --* ]] && exec "$@"\n')
    (tmp_path / "env").chmod(0o755)
    environment = {"PATH": str(tmp_path), "ROSSBY_PYTHON": shutil.which("echo"), "NGPU": "2"}
    ended = subprocess.run([ROOT / "run_train.sh", "--x=1"], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    started = ended.stdout.splitlines()[-1]
    assert "jobs.torchrun --nproc-per-node 2" in started and started.endswith("train.py --x=1")


PROGRAMS = ["train.py", "forecast.py", "evaluate.py", "plan.py"]
MODULES = ["datasets.convert", "datasets.describe", "planning.start_checks", "traces.inspect_trace"]


@pytest.mark.parametrize(
    "words", [*PROGRAMS, *(f"-m {name}" for name in (*MODULES, "verification.report_page"))]
)
def test_a_python_without_the_packages_is_one_line(words: str) -> None:
    """`python train.py`, of the system; -S: without site-packages."""
    command = [sys.executable, "-S", *words.split()]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1 and "has no package" in ended.stderr


def test_a_machine_whose_compiler_does_not_work_is_told_so(tmp_path, monkeypatch) -> None:
    """Without one, and where it fails: without Python's headers, or with a space in the path of torch."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # which has what was built before
    with inductor.patch({"cpp.cxx": (str(tmp_path / "g++"),)}), pytest.raises(InductorError) as caught:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(64))
    found = {"No working": caught.value}
    for said in ("fatal error: Python.h: No such file or directory", "cannot find -ltorch"):
        found[said] = InductorError(CppCompileError(["g++", "x.cpp"], f"x.cpp:1:10: {said}\n^~~~"), None)
    for said, error in found.items():
        line = errors.one_line(error)
        assert line and "compile.enable" in line and "install g++" in line and said in line
        assert errors.exit_code(error) == errors.BAD_INPUT
    assert errors.one_line(InductorError(KeyError("a bug"), None)) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees the GPUs of this machine")
def test_gpus_that_torch_does_not_see_are_not_left_to_the_cpu(tmp_path: Path, monkeypatch, capsys) -> None:
    """An old driver, or torch for CPUs: the run trained on the CPU."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nseq -f 'GPU %g: H100' 2\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = load_checked(
        ["--job.config_file", str(write_config(tmp_path)), f"--job.dump_folder={tmp_path}/run"]
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="lists 2 GPUs, .* CUDA_VISIBLE_DEVICES=''"):
        open_checked(config)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho no driver\nexit 9\n")
    open_checked(config)
    assert "on the CPU: nvidia-smi fails (no driver)" in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    open_checked(config)


GROUPS = {  # what /proc/self/cgroup says, files below /sys/fs/cgroup, MiB and cores
    "none": ("0::/\n", {}, None, None),
    "a container": ("0::/\n", {"memory.max": 2**29, "cpu.max": "150000 100000"}, 512, 2),
    "no limit": ("0::/a/b\n", {"a/b/memory.max": "max", "a/cpu.max": "max 100000"}, None, None),
    "a job's step": ("0::/job/step\n", {"job/memory.max": 2**30, "job/step/memory.max": 2**31}, 1024, None),
    "version 1": (
        "5:cpu,cpuacct:/job\n4:memory:/slurm/job\n",
        {
            "memory/slurm/job/memory.limit_in_bytes": 2**30,
            "memory/memory.limit_in_bytes": 2**63 - 4096,
            "cpu/job/cpu.cfs_quota_us": 100000,
            "cpu/job/cpu.cfs_period_us": 100000,
            "cpu/cpu.cfs_quota_us": -1,
            "cpu/cpu.cfs_period_us": 100000,
        },
        1024,
        1,
    ),
}


@pytest.mark.parametrize(("own", "files", "mebibytes", "cores"), GROUPS.values(), ids=GROUPS)
def test_a_limit_of_a_container_or_a_job_counts(tmp_path, monkeypatch, own, files, mebibytes, cores):
    """A first start made a worker for each core of the node, which the job's memory ended."""
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(machine, "OWN", tmp_path / "own")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(64))
    monkeypatch.setattr(machine.os, "sysconf", lambda _: 2**18)  # a page of 256 KiB, 64 GiB of them
    assert machine.memory() == (mebibytes * 2**20 if mebibytes else 2**36)
    assert machine.num_cores() == (cores or 64)
    assert most_workers() == (1 if mebibytes else min(cores or 64, 2**36 // WORKER_BYTES))


def test_a_file_system_without_locks_takes_a_conversion(tmp_path, truth, monkeypatch, caplog):
    """As Lustre without its option flock."""
    source, target = weatherbench(tmp_path, truth), tmp_path / "out"
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    assert convert([source, str(target)]) == 0 and "cannot be locked" in caplog.text


@pytest.mark.parametrize("number", (errno.EINVAL, errno.EIO))
def test_a_folder_that_cannot_be_flushed_is_no_error_of_the_disk(tmp_path, monkeypatch, number):
    """EINVAL: as on SMB; no file could be written there."""
    plain = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if number == errno.EIO else nullcontext():
        write_durably(tmp_path / "a.json", "{}")
    assert (tmp_path / "a.json").read_text() == "{}"
