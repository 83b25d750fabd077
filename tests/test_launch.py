"""What a job ends with when one of its ranks fails, and that a crash is restarted where it was saved."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from errors import ConfigError
from jobs.interfaces import interface_of
from jobs.launch import Meeting, job_code, listen
from parallelisms.degrees import check_processes
from tests.started_jobs import ROOT, last_step, losses, write_config


def launch(folder: Path, what: str, restarts: int = 0) -> subprocess.CompletedProcess:
    """Two ranks of tests/failing_rank.py; the second fails."""
    command = [sys.executable, "-m", "jobs.launch", "--nproc_per_node", "2"]
    command += ["--max_restarts", str(restarts), "tests/failing_rank.py", str(folder), what]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_ranks_are_started_without_what_only_they_need():
    """Each start of a job waits for the launcher's imports, and then for those of the ranks."""
    command = "import sys, jobs.launch; sys.exit('xarray' in sys.modules or 'torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 75], 75), ([75, -9], 1), ([1, 75], 1), ([2, 1], 2), ([2, -9], 2), ([0, 1], 1)],
)
def test_exit_code_of_a_job(codes, code):
    assert job_code(codes) == code


def test_network_of_this_host():
    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
    here = listen("127.0.0.1", 0)
    assert here and listen("203.0.113.9", 29500) is None
    here.close()


def test_one_host_listens_on_the_loopback_alone():
    meeting = Meeting(1, "")
    listening = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    port = f":{meeting.port:04X} "
    addresses = [line.split()[1] for line in listening.splitlines() if port in line and " 0A " in line]
    assert addresses == [f"0100007F{port.strip()}"]


@pytest.mark.parametrize("endpoint", ["", "node0", "node0:", ":29500", "node0:99999"])
def test_an_endpoint_that_is_none_is_refused(endpoint):
    with pytest.raises(ConfigError, match="write host:port"):
        Meeting(2, endpoint)


def meet(endpoint: str) -> subprocess.CompletedProcess:
    """What a host says that is sent to an endpoint."""
    command = [sys.executable, "-m", "jobs.launch", "--nnodes", "2", "--rdzv_endpoint", endpoint, "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_a_host_that_nobody_knows_is_one_line():
    ended = meet("nobody.invalid:29500")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "RDZV_ENDPOINT = 'nobody.invalid:29500': the host is not known" in ended.stderr


@pytest.mark.slow  # 40 s: a host may start later than another
def test_an_address_where_nobody_is_is_one_line():
    ended = meet("192.0.2.1:29500")  # RFC 5737: an address of documents
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "192.0.2.1:29500" in ended.stderr and "nobody answers for 40 s" in ended.stderr


@pytest.mark.parametrize("says", [b"", pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", marks=pytest.mark.slow)])
def test_a_port_of_somebody_else_is_one_line(says):
    """One that never says a word, and one that says another word and hangs up."""
    server = socket.create_server(("127.0.0.1", 0))
    open_ones = []

    def serve() -> None:
        while True:
            open_ones.append(server.accept()[0])
            if says:
                open_ones[-1].sendall(says)
                open_ones[-1].close()

    threading.Thread(target=serve, daemon=True).start()
    endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    ended = meet(endpoint)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"RDZV_ENDPOINT = '{endpoint}': who listens there is no launcher" in ended.stderr


def test_a_killed_rank_is_named_in_one_line_and_restarted(tmp_path):
    ended = launch(tmp_path, "kill", restarts=1)
    assert ended.returncode == 0 and "attempt 1 is done" in ended.stdout, ended.stderr
    first, second = ended.stderr.strip().splitlines()
    assert first.startswith("rossby: rank 1 ") and "was killed by SIGKILL" in first
    assert second == "rossby: restart 1 of 1, from the last checkpoint"


@pytest.mark.parametrize("code", [2, 75])
def test_bad_input_and_a_saved_job_are_not_restarted(tmp_path, code):
    ended = launch(tmp_path, str(code), restarts=3)
    assert ended.returncode == code and "restart" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("who", ["0", "1", "01"])
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
    command = [sys.executable, "-m", "jobs.launch", "--nproc_per_node", "2", str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (2, "rossby: x.zarr: is damaged\n")


def test_an_exception_is_told_once_with_its_traceback(tmp_path):
    ended = launch(tmp_path, "raise")
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1 and "rank 1" in ended.stderr.splitlines()[-1]
    assert "KeyError: 'no such variable'; all ranks end" in ended.stderr.splitlines()[-1], ended.stderr


@pytest.mark.slow
def test_a_mistake_of_ours_keeps_its_traceback_and_is_restarted(tmp_path):
    """A ValueError in the model is no bad input."""
    script, config_file = tmp_path / "broken.py", write_config(tmp_path)
    script.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import models.vit
def broken(*_):
    raise ValueError("planted")
models.vit.VisionTransformer.from_fields = broken
import train
train.main()
""")
    options = ["--job.config_file", str(config_file), "--job.dump_folder", str(tmp_path / "run")]
    settings: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    alone = [sys.executable, str(script), *options]
    two = [sys.executable, "-m", "jobs.launch", "--nproc_per_node", "2", "--max_restarts", "1"]
    for command, restarts in ((alone, 0), ([*two, str(script), *options], 1)):
        ended = subprocess.run(command, **settings, capture_output=True, text=True, timeout=200)
        assert ended.returncode == 1 and "ValueError: planted" in ended.stderr, ended.stderr
        assert "Traceback" in ended.stderr and ended.stderr.count("restart 1 of 1") == restarts


@pytest.mark.slow
def test_a_run_whose_rank_is_killed_resumes_by_itself(start_job, tmp_path):
    options = ["--training.steps", "60", "--checkpoint.interval", "20"]
    config_file, run = write_config(tmp_path), tmp_path / "run"
    job = start_job(config_file, run, *options, NGPU="2", MAX_RESTARTS="1")
    while "saved" not in job.output and last_step(run) < 55:
        job.wait_for_step(last_step(run) + 1)
    job.kill_rank(1, signal.SIGKILL)
    assert job.end() == 0, job.output
    assert "restart 1 of 1" in job.output and "resumed from" in job.output
    assert sorted(losses(run)) == list(range(1, 61))


def test_more_processes_than_fit_the_machine_are_refused():
    for number in (10**9, 10**5):
        with pytest.raises(ConfigError, match=rf"NGPU = {number}: processes on a machine of .* GiB; at most"):
            check_processes("NGPU", number)
