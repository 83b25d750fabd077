"""docs/slurm.sbatch: submitted from anywhere, stopped at its limit, queued again, ended as if undisturbed."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import Slurm, StandIn, until
from tests.started_jobs import ENDLESS, ROOT, Job, last_step, losses, write_config

SCRIPT = ROOT / "docs/slurm.sbatch"


@pytest.fixture(params=[StandIn, Slurm])
def slurm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slurm | StandIn]:
    try:
        started = request.param(tmp_path / "slurm")
    except (AssertionError, OSError) as error:
        pytest.skip(f"no real Slurm here: {str(error).splitlines()[0]}")
    yield started
    started.stop()


@pytest.mark.slow  # a minute with the stand-in, three with the real one
@pytest.mark.timeout(900)
def test_a_job_that_is_stopped_at_its_limit_ends_as_if_undisturbed(
    slurm: Slurm | StandIn, tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    config_file, run, caller = write_config(tmp_path), tmp_path / "run", tmp_path / "caller"
    caller.mkdir()
    shutil.move(config_file, caller / "my.toml")
    files = ["--job.config_file", "my.toml", "--job.dump_folder", "../run"]
    slurm.submit(caller, SCRIPT, files, {"ROSSBY_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"})
    log = lambda: "".join(path.read_text() for path in caller.glob("rossby-*.log"))  # noqa: E731
    until(lambda: last_step(run) >= 10, 200, log)
    slurm.reach_limit()
    stopped = last_step(run)
    assert f"the checkpoint of step {stopped} is complete" in log()
    # The same command: how many steps there are stands in its file.
    text = (caller / "my.toml").read_text().replace(f"steps = {ENDLESS}", f"steps = {stopped + 10}", 1)
    (caller / "my.toml").write_text(text)
    assert slurm.end() == 0, log()
    assert f"from step {stopped} to {stopped + 10}" in log() and "2 ranks" in log()

    undisturbed = start_job(caller / "my.toml", tmp_path / "undisturbed", NGPU="2")
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "undisturbed")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose run_train.sh says how it was called, and whose .venv is counted as it is made."""
    folder = tmp_path / "rossby"
    (folder / "docs").mkdir(parents=True)
    for name in ("docs/slurm.sbatch", "setup.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    write_program(folder / "run_train.sh", 'echo "$PWD $*"')
    # What is asked of a Python: its version, to make .venv, whose own installs, and the preflight.
    checks = f'[[ $1 == -P ]] && echo "$3 $4 $5" && exit $(cat {folder}/code 2>/dev/null || echo 0)'
    made = f'echo made >>{folder}/made; mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
    python = f"{checks}; [[ $1 == -c ]] && exit; {made}"
    write_program(tmp_path / "bin/python3", f"[[ $2 == pip ]] && echo pip >>{folder}/made && exit; {python}")
    return folder


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("from_copy", [False, True])
def test_what_a_job_gives_to_its_nodes(project: Path, tmp_path: Path, from_copy: bool) -> None:
    """Processors, port, GPUs; .venv is there before the nodes start, also where there are no locks."""
    slurm, script, settings = StandIn(tmp_path / "slurm"), project / "docs/slurm.sbatch", {}
    if from_copy:
        script = Path(shutil.copy(script, tmp_path / "mine.sbatch"))
        settings = {"ROSSBY_FOLDER": str(project)}
    caller = tmp_path / "caller"
    caller.mkdir()
    write_program(tmp_path / "bin/flock", "exit 1")  # as on Lustre without -o flock
    settings |= {"PATH": f"{tmp_path}/bin:{slurm.environment['PATH']}", "ROSSBY_PYTHON": ""}
    slurm.submit(caller, script, ["--training.steps", "3"], settings)
    assert slurm.end() == 0
    task = slurm.task()
    assert (task["cpus"], task["NGPU"], task["NNODES"]) == ("64", "2", "1")
    assert task["RDZV_ENDPOINT"] == "localhost:14711" and task["command"] == str(project / "run_train.sh")
    assert task["ROSSBY_PYTHON"] == str(project / ".venv/bin/python")
    assert (project / "made").read_text() == "made\npip\n"
    said = (caller / "rossby-4711.log").read_text()
    assert f"{caller} --training.steps 3" in said and "no locks in" in said
    assert said.index("jobs.preflight --training.steps 3") < said.index(f"{caller} --training")


def test_a_job_whose_preflight_fails_does_not_begin(project: Path, tmp_path: Path) -> None:
    slurm = StandIn(tmp_path / "slurm")
    (project / "code").write_text("2")
    settings = {"PATH": f"{tmp_path}/bin:{slurm.environment['PATH']}", "ROSSBY_PYTHON": ""}
    slurm.submit(tmp_path, project / "docs/slurm.sbatch", ["--training.steps", "3"], settings)
    assert slurm.end() == 2
    assert "jobs.preflight" in (tmp_path / "rossby-4711.log").read_text()
    assert slurm.task()["command"] != str(project / "run_train.sh")


def test_a_job_that_cannot_find_the_project_says_so(tmp_path: Path) -> None:
    slurm = StandIn(tmp_path / "slurm")
    script = Path(shutil.copy(SCRIPT, tmp_path / "mine.sbatch"))
    slurm.submit(tmp_path, script, [], {})
    assert slurm.end() == 2
    assert "set ROSSBY_FOLDER" in (tmp_path / "rossby-4711.log").read_text()


def test_the_script_is_one_that_bash_reads() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)], check=False).returncode == 0
    assert os.access(ROOT / "run_train.sh", os.X_OK)
