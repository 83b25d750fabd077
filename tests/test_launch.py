"""Exit codes, messages and restarts of ranks that run_train.sh, jobs/torchrun.py and torchrun start."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.started_jobs import ROOT, losses, write_config

TORCHRUN = [sys.executable, "-m", "jobs.torchrun", "--nproc-per-node", "2"]
PLAIN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def launch(
    folder: Path, what: str, restarts: int = 0, launcher: Sequence[str] = TORCHRUN
) -> subprocess.CompletedProcess:
    """Run two ranks of tests/failing_rank.py, of which the second fails."""
    command = [*launcher, "--max-restarts", str(restarts), "tests/failing_rank.py", str(folder), what]
    settings = {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("launcher", [pytest.param("run_train.sh", marks=pytest.mark.slow), "srun"])
def test_one_host_listens_on_the_loopback_alone(launcher, start_job, tmp_path):
    """The launcher's store, gloo, and the store that rank 0 has without a launcher."""
    options = [write_config(tmp_path), tmp_path / "run", "--comm.timeout_seconds", "60"]
    if launcher == "run_train.sh":
        job = start_job(*options, NGPU="2")
        job.wait_for_step(3)
        pids = [job.process.pid, *job.ranks().values()]
        assert len(pids) == 3
    else:
        task = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "NGPU": "1"}
        with socket.create_server(("127.0.0.1", 0)) as listener:
            task |= {"MASTER_PORT": str(listener.getsockname()[1])}
        jobs = [start_job(*options, RANK=n, LOCAL_RANK=n, **task) for n in "01"]
        jobs[0].wait_for_step(3)
        pids = [job.process.pid for job in jobs]
    # In the kernel's form.
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*") if fd.is_symlink()}
    listed = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [line.split() for line in listed.splitlines() if " 0A " in line]
    addresses = {words[1].partition(":")[0] for words in lines if f"socket:[{words[9]}]" in sockets}
    assert addresses == {"0100007F"}  # 127.0.0.1


def test_a_first_node_that_is_not_known_is_one_line(tmp_path):
    settings = {"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "127.0.0.1:29500", "NGPU": "1"}
    for change, said in (({}, "NODE_RANK = '2'"), ({"RDZV_ENDPOINT": "node0"}, "RDZV_ENDPOINT = 'node0'")):
        environment = os.environ | settings | change | {"ROSSBY_PYTHON": sys.executable}
        ended = subprocess.run([ROOT / "run_train.sh"], env=environment, capture_output=True, text=True)
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
        assert said in ended.stderr


def test_an_environment_of_uv_is_left_to_uv(tmp_path):
    """It has no pip."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    for name in ("setup.sh", "requirements.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    environment = {key: value for key, value in os.environ.items() if key != "ROSSBY_PYTHON"}
    command = ["bash", "-c", 'source ./setup.sh; "$PYTHON" used']
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "used\n", "")


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        command = [*TORCHRUN, "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint, "train.py"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"RDZV_ENDPOINT = '{endpoint}': the nodes did not meet there" in ended.stderr


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(TORCHRUN, id="jobs.torchrun"), pytest.param(PLAIN, id="torchrun", marks=pytest.mark.slow)],
)
def test_a_killed_rank_is_named_and_restarted(tmp_path, launcher):
    ended = launch(tmp_path, "kill", restarts=1, launcher=launcher)
    assert ended.returncode == 0 and "attempt 1 is done" in ended.stdout, ended.stderr
    first = next(line for line in ended.stderr.splitlines() if line.startswith("rossby: "))
    assert first.startswith("rossby: rank 1 (") and "no heartbeat" in first
    assert launcher is PLAIN or "rossby: restart 1: a rank has failed" in ended.stderr.splitlines()[-1]


def test_a_killed_rank_is_exit_code_1(tmp_path):
    """One line by another rank; the launcher adds a detail to it."""
    ended = launch(tmp_path, "kill")
    assert ended.returncode == 1
    lines = ended.stderr.splitlines()
    assert [line[:15] for line in lines if line.startswith("rossby: ")] == ["rossby: rank 1 "], ended.stderr
    assert re.fullmatch(r"  rank 1 \(pid \d+\) was killed by SIGKILL", lines[-1])


def test_ctrl_c_while_torch_is_imported_is_one_line():
    process = subprocess.Popen(
        [*TORCHRUN, "--help"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    until = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == (
        b"rossby: SIGINT: before the first step, with nothing to save (code 130)\n"
    )
    assert process.returncode == 130


def test_a_saved_job_ends_with_its_code(tmp_path):
    ended = launch(tmp_path, "75", restarts=3)
    assert (ended.returncode, ended.stderr) == (75, "")


@pytest.mark.parametrize("who", ["1", "01"])
def test_bad_input_is_said_once_whichever_rank_finds_it(tmp_path, who):
    script = tmp_path / "verb.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from errors import DataError, one_line_errors
with one_line_errors():
    if os.environ["RANK"] in {who!r}:
        raise DataError("x.zarr: is damaged")
""")
    command = [*TORCHRUN, str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "rossby: x.zarr: is damaged\n")


def test_an_exception_is_told_once_with_its_traceback(tmp_path):
    ended = launch(tmp_path, "raise")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1 and "rank 1" in ended.stderr.splitlines()[-1], ended.stderr
    assert "KeyError: 'no such variable'; all ranks end" in ended.stderr.splitlines()[-1], ended.stderr


def test_two_ranks_end_with_2_if_one_may_not_read(tmp_path):
    ended = launch(tmp_path, "permission")
    assert ended.returncode == 2 and ended.stderr.count("rossby:") == 1, ended.stderr
    assert "x.zarr: permission denied" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["run_train.sh", "torchrun"])
def test_a_run_whose_rank_is_killed_twice_ends_as_if_undisturbed(start_job, tmp_path, launcher):
    options = ["--training.steps", "60", "--checkpoint.interval", "10"]
    config_file, run = write_config(tmp_path), tmp_path / "run"
    plain = [*PLAIN, "--max-restarts", "2", str(ROOT / "train.py")] if launcher == "torchrun" else None
    job = start_job(config_file, run, *options, command=plain, NGPU="2", MAX_RESTARTS="2")
    for rank, step in ((1, 12), (0, 32)):
        job.wait_for_step(step)
        before = job.ranks()
        os.kill(before[rank], signal.SIGKILL)
        while set(job.ranks().values()) & set(before.values()) or len(job.ranks()) < 2:
            assert job.process.poll() is None, job.output
            time.sleep(0.1)
    assert job.end() == 0, job.output
    assert len((run / "starts.jsonl").read_text().splitlines()) == 3 and "resumed from" in job.output
    status = json.loads((run / "status.json").read_text())
    assert (status["exit_code"], status["step"], status["restart"], status["ranks"]) == (0, 60, 2, 2)
    undisturbed = start_job(config_file, tmp_path / "undisturbed", *options, NGPU="2")
    assert undisturbed.end() == 0, undisturbed.output
    assert losses(run) == losses(tmp_path / "undisturbed")
