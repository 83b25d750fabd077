"""How a run ends: by signals at any moment, by errors, without a launcher; lines, exit codes, status.json."""

import hashlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from config import Comm
from errors import DataError
from jobs.heartbeat import activity
from jobs.preemption import Agreement
from jobs.watchdog import Watchdog
from parallelisms.mesh import cpu_group
from tests.started_jobs import ROOT, run_options, write_config
from tests.test_launch import TORCHRUN

EARLY = "rossby: SIGINT: before the first step, with nothing to save (code 130)"


@pytest.mark.parametrize("after", [0.05, pytest.param(2.0, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_first_seconds_of_the_ranks_is_one_line(start_job, tmp_path, after):
    """Two tracebacks and code 75, with which a loop starts the run again; later "interrupted" once a rank."""
    job = start_job(write_config(tmp_path), tmp_path / "run", NGPU="2")
    until = time.monotonic() + 60
    while len(job.ranks()) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end(40) == 130, job.output
    assert [line for line in job.output.splitlines() if "ranks" not in line[:18]][-1:] == [EARLY], job.output
    assert job.output.count("rossby:") == 1 and "Traceback" not in job.output


def run_program(text: str, **environment: str) -> subprocess.CompletedProcess:
    before = f"import os, sys, threading, time; sys.path.insert(0, {str(ROOT)!r})\n"
    command = [sys.executable, "-c", before + text]
    how = {"env": os.environ | environment, "capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(command, **how)  # type: ignore[call-overload]


def test_a_program_ends_with_its_line() -> None:
    """Not in Python's shutdown: Ctrl-C there was a traceback, and threads of obstore crashed."""
    began = time.monotonic()
    done = run_program("""
from errors import DataError, one_line_errors
with one_line_errors():
    threading.Thread(target=time.sleep, args=(30,)).start()
    raise DataError("s3://bucket/x: no answer")
""")
    assert (done.returncode, done.stderr) == (2, "rossby: s3://bucket/x: no answer\n")
    assert time.monotonic() - began < 20


def test_a_program_that_is_interrupted_without_a_handler_is_one_line() -> None:
    done = run_program("""
import signal
from errors import one_line_errors
with one_line_errors():
    signal.raise_signal(signal.SIGINT)
""")
    assert (done.returncode, done.stderr) == (130, "rossby: interrupted\n")


def test_a_signal_is_said_at_once(one_rank, tmp_path, caplog):
    """While the main thread is in C code, a collective or a save; nothing was said for half a minute."""
    caplog.set_level(logging.INFO)
    with Watchdog(tmp_path, Comm()) as watchdog:
        with Agreement("", cpu_group(), watchdog) as agreement:
            activity.start_phase("train", 7)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            hashlib.pbkdf2_hmac("sha256", b"a", b"b", 6_000_000)  # seconds, without the interpreter's lock
            ended = time.time()
            assert agreement.decide() == "SIGTERM on rank 0"
    (said,) = [record for record in caplog.records if "SIGTERM on rank 0 in step 7" in record.getMessage()]
    assert said.created < ended - 0.5


RANK = """
from pathlib import Path
from typing import Any
from config import Comm
from jobs.watchdog import Watchdog
from parallelisms.mesh import start_ranks
rank = int(os.environ["RANK"])
with Watchdog(Path(sys.argv[1]), Comm()) as watchdog:
    start_ranks(60, "gloo")
    time.sleep(3)
    if rank < 2:
        time.sleep(0.05 * (1 - rank))
        watchdog.end("ended on purpose", 75)
    time.sleep(60)
"""


def run_tasks(number: int, *words: str) -> list[tuple[int, list[str]]]:
    """Return exit codes and lines of ranks that are started as srun starts them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task: dict[str, Any] = {"MASTER_PORT": listener.getsockname()[1], "MASTER_ADDR": "127.0.0.1"}
    task |= {"WORLD_SIZE": number, "LOCAL_WORLD_SIZE": number, "PYTHONPATH": ROOT}
    task |= {"OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = []
    for rank in range(number):
        more = {key: str(value) for key, value in (task | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        how: dict[str, Any] = {
            "cwd": ROOT,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.PIPE,
            "text": True,
        }
        ranks.append(subprocess.Popen([sys.executable, *words], env=os.environ | more, **how))
    said = [rank.communicate(timeout=120)[1].splitlines() for rank in ranks]
    return [(rank.returncode, lines) for rank, lines in zip(ranks, said, strict=True)]


def test_all_ranks_get_the_reason_without_a_launcher(tmp_path):
    """Rank 0, which ended a moment after rank 1, took the store away: the third ended with 1."""
    ended = run_tasks(3, "-c", f"import os, sys, time\n{RANK}", str(tmp_path))
    assert [code for code, _ in ended] == [75, 75, 75], ended
    assert sum((lines for _, lines in ended), []) == ["rossby: ended on purpose"]


@pytest.mark.slow
def test_rank_0_is_killed_in_the_last_plots_without_a_launcher(tmp_path):
    """A traceback of rank 1, which waited in a barrier, and rank 1 was named."""
    options = run_options(write_config(tmp_path), tmp_path / "run", "--training.steps", "2")
    ended = run_tasks(2, "tests/drilled_rank.py", "SIGKILL", *options)
    assert [code for code, _ in ended] == [-9, 1], ended
    lines = [line for _, lines in ended for line in lines if not re.match(r"[\d:]{8}  |rank +\d+: ", line)]
    assert len(lines) == 1 and "no answer from rank 0's host" in lines[0], lines


def test_a_rank_that_is_killed_during_the_start_is_named(tmp_path):
    """By the launcher; it is no signal to save."""
    script = tmp_path / "rank.py"
    script.write_text(f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from jobs.signals import end_at_signals
end_at_signals(trains=True)
time.sleep(1)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
""")
    command = [*TORCHRUN, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("rossby: rank 1 (pid "), done.stderr
    assert len(done.stderr.splitlines()) == 1 and "was killed by SIGKILL" in done.stderr


@pytest.mark.parametrize(
    "error", [PermissionError(13, "Permission denied", "x.zarr"), DataError("x.zarr: no")]
)
def test_status_has_the_exit_code_of_an_error(tmp_path, error):
    """Of a PermissionError on one rank it was 1, and the process ended with 2."""
    watchdog = Watchdog(tmp_path, Comm())
    watchdog.begin(3)
    watchdog.end_with(error)
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["exit_code"] == 2 and status["message"].startswith("x.zarr: ")


def test_a_status_that_cannot_be_written_is_said_once(tmp_path, capsys):
    (tmp_path / "run").touch()
    watchdog = Watchdog(tmp_path / "run", Comm())
    watchdog.begin(0)
    watchdog.write_status(1, "failed")
    assert capsys.readouterr().err.count("status.json is not written") == 1


def test_a_start_in_a_folder_that_was_removed_is_one_line(tmp_path):
    """A traceback, of Path.cwd()."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"cd {gone}; rmdir {gone}; exec {sys.executable} {ROOT}/train.py --training.steps=1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "the current folder was removed" in done.stderr
