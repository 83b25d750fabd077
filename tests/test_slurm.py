"""scripts/slurm.sbatch and srun alone: preempted, queued again, ended as if undisturbed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.slurm import PROGRAMS, Slurm, StandIn, edited, until
from tests.started_jobs import ENDLESS, ROOT, Job, last_step, losses, write_config


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm | StandIn]:
    if request.param is Slurm and (os.getuid() or not all(map(shutil.which, PROGRAMS))):
        pytest.skip("needs root, and slurm-wlm installed")
    # Not in tmp_path: paths of its sockets have 108 characters at most.
    with TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = request.param(Path(folder) / "slurm")
        yield started
        started.stop()


SETTINGS = {"OMP_NUM_THREADS": "1", "NGPU": "2", "ROSSBY_PYTHON": sys.executable}


@pytest.mark.slow  # a minute or two each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slurm, nodes", [(Slurm, 2), (StandIn, 1)], indirect=["slurm"])
def test_a_job_that_is_preempted_ends_as_if_undisturbed(
    slurm: Slurm | StandIn, nodes: int, tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    """By a job that comes first; with the stand-in, at the limit of its time."""
    config_file, run = write_config(tmp_path), tmp_path / "run"
    partition = ["--partition=spot"] if nodes == 2 else []
    files = ["--job.config_file", str(config_file), "--job.dump_folder", str(run)]
    slurm.submit(edited(tmp_path, nodes, *partition), *files, **SETTINGS)
    log = lambda: "".join(path.read_text() for path in tmp_path.glob("rossby-*.log"))  # noqa: E731
    until(lambda: last_step(run) >= 10, 400, lambda: log() + slurm.told_of_the_job())
    slurm.preempt()
    stopped = last_step(run)
    assert f"the checkpoint of step {stopped} is complete" in log()
    # The job starts again with the same command: the number of steps is in its file.
    text = config_file.read_text().replace(f"steps = {ENDLESS}", f"steps = {stopped + 10}", 1)
    config_file.write_text(text)
    slurm.let_go()
    assert slurm.end() == 0, log()
    assert f"from step {stopped} to {stopped + 10}" in log() and f"{2 * nodes} ranks" in log()

    undisturbed = start_job(config_file, tmp_path / "undisturbed", NGPU=str(2 * nodes))
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "undisturbed")


@pytest.mark.slow
@pytest.mark.parametrize("slurm", [Slurm], indirect=True)
def test_srun_starts_ranks_without_a_launcher(
    slurm: Slurm, tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    config_file, run = write_config(tmp_path), tmp_path / "run"
    options = ["--job.config_file", str(config_file), "--training.steps", "12"]
    srun = ["srun", "--partition=spot", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    page = (ROOT / "docs/launch.md").read_text()
    task = page.partition("```sh\n")[2].partition("```")[0].replace(".venv/bin/python", sys.executable)
    (tmp_path / "task.sh").write_text(task)
    command = [*srun, "bash", str(tmp_path / "task.sh"), *options, "--job.dump_folder", str(run)]
    environment = slurm.environment | SETTINGS
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 ranks" in done.stderr, done.stderr
    undisturbed = start_job(config_file, tmp_path / "four", "--training.steps", "12", NGPU="4")
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "four") and len(losses(run)) == 12


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "slurm")


def test_environment_of_a_node(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.submit(edited(tmp_path, 1), "--help", **SETTINGS)
    assert stand_in.end() == 0
    task = stand_in.task()
    assert (task["cpus"], task["NGPU"], task["NNODES"], task["MAX_RESTARTS"]) == ("2", "2", "1", "2")
    assert task["RDZV_ENDPOINT"] == "localhost:14711" and task["command"] == "./run_train.sh"
    assert task["ROSSBY_PYTHON"] == sys.executable


def test_bad_input_is_not_queued_again(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.submit(edited(tmp_path, 1), "--training.stepz", "3", **SETTINGS)
    assert stand_in.end() == 2 and not (stand_in.folder / "ends").exists()
