"""The script that --launch slurm writes: preempted or stopped, queued again, ended as if undisturbed."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from launch.slurm_rank import rank_environment
from tests.slurm import PROGRAMS, Slurm, StandIn, until, written
from tests.started_jobs import ENDLESS, ROOT, Job, last_step, losses, write_config

RANKS = ["--gpus-per-node", "0", "--ranks-per-node", "2", "--cpus-per-rank", "1", "--time", "30"]


@pytest.fixture
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm | StandIn]:
    if request.param is Slurm and (os.getuid() or not all(map(shutil.which, PROGRAMS))):
        pytest.skip("needs root, and slurm-wlm installed")
    # Not in tmp_path: paths of its sockets have 108 characters at most.
    with TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True) as folder:
        started = request.param(Path(folder) / "slurm")
        yield started
        started.stop()


PREEMPTED = [(Slurm, ["--nodes", "2", "--partition", "spot", "--tasks", tasks]) for tasks in ("node", "gpu")]


@pytest.mark.slow  # a minute or two each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("slurm, options", [*PREEMPTED, (StandIn, [])], indirect=["slurm"])
def test_a_job_that_is_preempted_ends_as_if_undisturbed(
    slurm: Slurm | StandIn, options: list[str], tmp_path: Path, start_job: Callable[..., Job]
) -> None:
    """By a job that comes first; with what stands in for Slurm, at the limit of its time."""
    config_file, run, caller = write_config(tmp_path), tmp_path / "run", tmp_path / "caller"
    caller.mkdir()
    shutil.move(config_file, caller / "my.toml")
    files = ["--job.config_file", "my.toml", "--job.dump_folder", "../run"]
    script = written(caller, *files, *RANKS, *options)
    slurm.submit(tmp_path, script, {"OMP_NUM_THREADS": "1"})
    log = lambda: "".join(path.read_text() for path in caller.glob("rossby-*.log"))  # noqa: E731
    until(lambda: last_step(run) >= 10, 400, lambda: log() + slurm.told_of_the_job())
    slurm.preempt()
    stopped = last_step(run)
    assert f"the checkpoint of step {stopped} is complete" in log()
    # The same command: how many steps there are stands in its file.
    text = (caller / "my.toml").read_text().replace(f"steps = {ENDLESS}", f"steps = {stopped + 10}", 1)
    (caller / "my.toml").write_text(text)
    slurm.let_go()
    assert slurm.end() == 0, log()
    ranks = 4 if options else 2
    assert f"from step {stopped} to {stopped + 10}" in log() and f"{ranks} ranks" in log()

    undisturbed = start_job(caller / "my.toml", tmp_path / "undisturbed", NGPU=str(ranks))
    assert undisturbed.end(300) == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "undisturbed")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose run_train.sh says how it was called, and whose .venv is counted as it is made."""
    folder = tmp_path / "rossby"
    (folder / "launch").mkdir(parents=True)
    for name in ("launch/fabric.sh", "launch/pod.sh", "setup.sh", "requirements.txt"):
        shutil.copy(ROOT / name, folder / name)
    write_program(folder / "run_train.sh", 'echo "$PWD $*"')
    # What is asked of a Python: its version, to make .venv, whose own installs, and the preflight.
    # A code in the file "code" is that of one preflight.
    fails = f"code=$(cat {folder}/code 2>/dev/null || echo 0); rm -f {folder}/code; exit $code"
    checks = f'[[ $1 == -P ]] && echo "$3 $4 $5" && {{ {fails}; }}'
    made = f'echo made >>{folder}/made; mkdir -p "$3/bin"; cp "$0" "$3/bin/python"'
    python = f"{checks}; [[ $1 == -c ]] && exit; {made}"
    write_program(tmp_path / "bin/python3", f"[[ $2 == pip ]] && echo pip >>{folder}/made && exit; {python}")
    return folder


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def script_of(project: Path, folder: Path, *words: str) -> Path:
    """As if it had been written by that project, where no interpreter is named."""
    path = written(folder, *words)
    text = path.read_text().replace(f"ROSSBY_PYTHON={sys.executable}", "ROSSBY_PYTHON=")
    path.write_text(text.replace(str(ROOT), str(project)))
    return path


def test_what_a_job_gives_to_its_nodes(project: Path, tmp_path: Path) -> None:
    """Processors, port, GPUs; .venv is there before the nodes start, also where there are no locks."""
    slurm, caller = StandIn(tmp_path / "slurm"), tmp_path / "caller"
    caller.mkdir()
    words = ["--training.steps", "3", "--gpus-per-node", "4", "--cpus-per-rank", "16"]
    script = script_of(project, caller, *words)
    write_program(tmp_path / "bin/flock", "exit 1")  # as on Lustre without -o flock
    settings = {"PATH": f"{tmp_path}/bin:{slurm.environment['PATH']}", "ROSSBY_PYTHON": ""}
    slurm.submit(tmp_path, script, settings)
    assert slurm.end() == 0
    task = slurm.task()
    assert (task["cpus"], task["NGPU"], task["NNODES"]) == ("64", "4", "1")
    assert task["RDZV_ENDPOINT"] == "localhost:14711" and task["command"] == str(project / "run_train.sh")
    assert task["ROSSBY_PYTHON"] == str(project / ".venv/bin/python")
    assert (project / "made").read_text() == "made\npip\n"
    said = (caller / "rossby-4711.log").read_text()
    assert f"{caller} --training.steps 3" in said and "no locks in" in said
    assert said.index("jobs.preflight --training.steps 3") < said.index(f"{caller} --training")


# srun ends with 128 + its number where a signal has killed what it started.
@pytest.mark.parametrize("code, ends", [("2", "2\n"), ("143", "75\n")])
def test_a_job_whose_preflight_fails_does_not_begin(
    project: Path, tmp_path: Path, code: str, ends: str
) -> None:
    """It ends with 2; one that is told to end meanwhile is queued again."""
    slurm = StandIn(tmp_path / "slurm")
    (project / "code").write_text(code)
    script = script_of(project, tmp_path, "--training.steps", "3", "--checkpoint.enable")
    settings = {"PATH": f"{tmp_path}/bin:{slurm.environment['PATH']}", "ROSSBY_PYTHON": ""}
    slurm.submit(tmp_path, script, settings)
    assert slurm.end() == (2 if code == "2" else 0)
    said = (tmp_path / "rossby-4711.log").read_text()
    assert said.count("jobs.preflight") == (1 if code == "2" else 2)
    if code == "2":
        assert slurm.task()["command"] != str(project / "run_train.sh")
    else:
        assert (slurm.folder / "ends").read_text() == ends


COMPONENTS = ["--nodes", "3", "--partition", "spot", "--on-demand-partition", "safe"]


@pytest.mark.parametrize(
    "words, lines",
    [
        (["--tasks", "gpu", "--gpus-per-node", "8"], ["--gpus-per-node=8", "--cpus-per-task=64"]),
        (["--members", "5", "--at-once", "2"], ["--array=0-4%2", "--output=rossby-%A_%a.log"]),
        (COMPONENTS, ["--partition=safe", "hetjob", "--partition=spot", "--nodes=1", "--nodes=2"]),
        (
            ["--time", "8", "--directive", "qos=a", "--checkpoint.enable=false"],
            ["--signal=USR1@120", "--qos=a", "--no-requeue"],
        ),
        (["--time", "1-0"], ["--signal=USR1@300", "--requeue"]),
    ],
)
def test_scripts_are_ones_that_bash_and_slurm_read(
    words: list[str], lines: list[str], tmp_path: Path
) -> None:
    script = written(tmp_path, *words)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    asked = [line.removeprefix("#SBATCH ") for line in script.read_text().splitlines() if "#SBATCH " in line]
    assert set(lines) <= set(asked), asked
    assert "%%" not in script.read_text() and os.access(ROOT / "run_train.sh", os.X_OK)


def test_a_task_is_the_rank_that_slurm_says() -> None:
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    ours = rank_environment(slurm | {"NGPU": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"})
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
    assert [ours[name] for name in names] == ["5", "8", "1", "1", "4"]
    assert "GLOO_SOCKET_IFNAME" not in ours  # only the loopback leads there
    alone = [sys.executable, "-m", "launch.slurm_rank", "train.py"]
    done = subprocess.run(alone, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "srun" in done.stderr and len(done.stderr.splitlines()) == 1
