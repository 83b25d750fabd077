"""Jobs of run_train.sh, jobs/torchrun.py, torchrun and srun: starts, ends, lines, exit codes, terminals."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.started_jobs import ROOT, VALIDATION, losses, run_options, run_program, wait_until, write_config

TORCHRUN = [sys.executable, "-m", "jobs.torchrun", "--nproc-per-node", "2"]
PLAIN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
EARLY = "rossby: {}: before the first step, with nothing to save (code {})"


def launch(
    folder: Path, what: str, restarts: int = 0, launcher: Sequence[str] = TORCHRUN
) -> subprocess.CompletedProcess[str]:
    """Run two ranks of tests/failing_rank.py, of which the second fails."""
    command = [*launcher, "--max-restarts", str(restarts), "tests/failing_rank.py", str(folder), what]
    return run_program(*command, PYTHONPATH=str(ROOT), TORCH_CPP_LOG_LEVEL="ERROR")


def run_text(folder: Path, text: str, *launcher: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the project's modules."""
    script = folder / "program.py"
    script.write_text(f"import os, signal, sys, threading, time\n{text}")
    return run_program(*(launcher or [sys.executable]), str(script), PYTHONPATH=str(ROOT))


def task_environment(number: int) -> dict[str, str]:
    """Variables of srun's tasks on one host, without those of a rank."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = {"MASTER_PORT": str(listener.getsockname()[1]), "MASTER_ADDR": "127.0.0.1"}
    return address | {"WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number), "NGPU": "1"}


def run_tasks(number: int, *words: str) -> list[tuple[int, list[str]]]:
    """Return exit codes and lines of ranks that are started as srun starts them."""
    task = os.environ | task_environment(number) | {"PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "FATAL"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=task | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(number)
    ]
    lines = [rank.communicate(timeout=120)[1].splitlines() for rank in ranks]
    return [(rank.returncode, each) for rank, each in zip(ranks, lines, strict=True)]


# -- starts


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
        task = task_environment(2)
        jobs = [start_job(*options, RANK=n, LOCAL_RANK=n, **task) for n in "01"]
        jobs[0].wait_for_step(3)
        pids = [job.process.pid for job in jobs]
    # In the kernel's form.
    sockets = {os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*") if fd.is_symlink()}
    listed = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    lines = [line.split() for line in listed.splitlines() if " 0A " in line]
    addresses = {words[1].partition(":")[0] for words in lines if f"socket:[{words[9]}]" in sockets}
    assert addresses == {"0100007F"}  # 127.0.0.1


def test_a_first_node_that_is_not_known_is_one_line():
    settings = {"NNODES": "2", "NODE_RANK": "2", "RDZV_ENDPOINT": "127.0.0.1:29500", "NGPU": "1"}
    for change, message in (({}, "NODE_RANK = '2'"), ({"RDZV_ENDPOINT": "node0"}, "RDZV_ENDPOINT = 'node0'")):
        ended = run_program("./run_train.sh", **settings | change)
        assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
        assert message in ended.stderr


def test_an_environment_of_uv_is_left_to_uv(tmp_path):
    """It has no pip."""
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/bin/echo")
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\n")
    for name in ("setup.sh", "requirements.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = 'unset ROSSBY_PYTHON; source ./setup.sh; "$PYTHON" used'
    ended = run_program("bash", "-c", command, cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "used\n", "")


def test_a_port_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        nodes = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", endpoint]
        ended = run_program(*TORCHRUN, *nodes, "train.py")
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert f"RDZV_ENDPOINT = '{endpoint}': the nodes did not meet there" in ended.stderr


def test_a_start_in_a_folder_that_was_removed_is_one_line(tmp_path):
    """A traceback, of Path.cwd()."""
    command = f'rmdir "$PWD"; exec {sys.executable} {ROOT}/train.py --training.steps=1'
    (tmp_path / "gone").mkdir()
    ended = run_program("sh", "-c", command, cwd=tmp_path / "gone")
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1, ended.stderr
    assert "the current folder was removed" in ended.stderr


# -- ranks that fail


@pytest.mark.parametrize(
    ("what", "code", "lines"),
    [
        ("75", 75, ""),  # saved: not started again
        ("raise", 1, r".*Traceback.*rank 1[^\n]*KeyError: 'no such variable'; all ranks end[^\n]*\n"),
        ("permission", 2, r"rossby: [^\n]*x.zarr: permission denied[^\n]*\n"),
        # By another rank; the launcher adds a detail to it.
        ("kill", 1, r"rossby: rank 1 .*\n  rank 1 \(pid \d+\) was killed by SIGKILL\n"),
    ],
    ids=lambda value: value if str(value).isalnum() else "",
)
def test_how_a_job_ends(tmp_path, what, code, lines):
    ended = launch(tmp_path, what, restarts=3 if what == "75" else 0)
    assert ended.returncode == code and re.fullmatch(lines, ended.stderr, re.DOTALL), ended.stderr
    assert ended.stderr.count("Traceback") == (what == "raise")
    assert ended.stderr.count("rossby: ") == (what != "75"), ended.stderr


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


@pytest.mark.parametrize("who", ["1", "01"])
def test_bad_input_is_said_once_whichever_rank_finds_it(tmp_path, who):
    program = f"""
from errors import DataError, one_line_errors
with one_line_errors():
    if os.environ["RANK"] in {who!r}:
        raise DataError("x.zarr: is damaged")
"""
    ended = run_text(tmp_path, program, *TORCHRUN)
    assert (ended.returncode, ended.stderr) == (2, "rossby: x.zarr: is damaged\n")


def test_a_rank_that_is_killed_during_the_start_is_named(tmp_path):
    """By the launcher; it is no signal to save."""
    program = """
from jobs.signals import end_at_signals
end_at_signals(trains=True)
time.sleep(1)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""
    ended = run_text(tmp_path, program, *TORCHRUN)
    line = r"rossby: rank 1 \(pid [^\n]*was killed by SIGKILL[^\n]*\n"
    assert ended.returncode == 1 and re.fullmatch(line, ended.stderr), ended.stderr


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


RANK = """
import os, sys, time
from pathlib import Path
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


def test_all_ranks_get_the_reason_without_a_launcher(tmp_path):
    """Rank 0, which ended a moment after rank 1, took the store away: the third ended with 1."""
    ended = run_tasks(3, "-c", RANK, str(tmp_path))
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


# -- programs that end


@pytest.mark.parametrize(
    ("statement", "code", "line"),
    [
        ('raise DataError("s3://bucket/x: no answer")', 2, "s3://bucket/x: no answer"),
        ("signal.raise_signal(signal.SIGINT)", 130, "interrupted"),  # without a handler
    ],
)
def test_a_program_ends_with_its_line(tmp_path, statement, code, line):
    """Not in Python's shutdown: Ctrl-C there was a traceback, and threads of obstore crashed."""
    began = time.monotonic()
    program = f"""
from errors import DataError, one_line_errors
with one_line_errors():
    threading.Thread(target=time.sleep, args=(30,)).start()
    {statement}
"""
    ended = run_text(tmp_path, program)
    assert (ended.returncode, ended.stderr) == (code, f"rossby: {line}\n")
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("command", "number", "code"),
    [(None, signal.SIGTERM, 75), ([*TORCHRUN, "--help"], signal.SIGINT, 130)],
    ids=["train", "launcher"],
)
def test_a_signal_while_torch_is_imported_is_one_line(start_job, tmp_path, command, number, code):
    """It ended the process by the signal, and so the loop that starts a run again on 75."""
    job = start_job(write_config(tmp_path), tmp_path / "run", command=command)
    wait_until(lambda: "libtorch_cpu" in Path(f"/proc/{job.process.pid}/maps").read_text())
    job.process.send_signal(number)
    assert job.end(20) == code, job.output
    assert job.output.splitlines() == [EARLY.format(number.name, code)]


@pytest.mark.parametrize("after", [0.05, pytest.param(2.0, marks=pytest.mark.slow)])
def test_ctrl_c_in_the_first_seconds_of_the_ranks_is_one_line(start_job, tmp_path, after):
    """Two tracebacks and code 75, with which a loop starts the run again; later "interrupted" once a rank."""
    job = start_job(write_config(tmp_path), tmp_path / "run", NGPU="2")
    wait_until(lambda: len(job.ranks()) == 2)
    time.sleep(after)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.end(40) == 130, job.output
    lines = [line for line in job.output.splitlines() if "ranks" not in line[:18]]
    assert lines[-1:] == [EARLY.format("SIGINT", 130)], job.output
    assert job.output.count("rossby:") == 1 and "Traceback" not in job.output


# -- a terminal


STAMP = r"\d\d:\d\d:\d\d  "  # before every line of the log


def shown(*command: str) -> str:
    """All that a program writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 110))
    process = subprocess.Popen(command, cwd=ROOT, stdout=theirs, stderr=theirs)
    os.close(theirs)
    parts = []
    with suppress(OSError):  # of Linux, where all processes have closed the other end; others read nothing
        while part := os.read(ours, 65536):
            parts.append(part)
    os.close(ours)
    text = b"".join(parts).decode()
    assert process.wait() == 0, text
    return text


def test_a_line_of_the_log_is_alone_in_its_line(tmp_path: Path) -> None:
    """Validation says what it took; a recording of the profiler says nothing."""
    files = run_options(write_config(tmp_path), tmp_path / "run")
    options = ["--profiling.enable_profiling", "--profiling.profile_freq=4", "--checkpoint.enable=false"]
    text = shown(sys.executable, "train.py", *files, *VALIDATION, *options, "--training.steps=8")
    lines = re.split(r"[\r\n]|\x1b\[A", text)  # \r: written over; ESC [A: one line up
    stamped = [line for line in lines if re.search(STAMP, line)]
    assert len(stamped) >= 5 and all(re.match(STAMP, line) for line in stamped), text
    assert re.search(r"validated \d+ dates in \d+\.\d s", text)
    assert "USDT" not in text and ".cpp:" not in text, text


def test_an_error_takes_the_place_of_a_bar() -> None:
    program = """
import sys
from tqdm import tqdm
import errors
from errors import RunFailed, one_line_errors
errors.exit_now = sys.exit
bar = tqdm(total=9)
try:
    with one_line_errors():
        raise RunFailed("the run cannot go on")
except SystemExit as ended:
    assert ended.code == 1
bar.disable = True
"""
    text = shown(sys.executable, "-c", program)
    assert text.partition("\x1b[K")[2].strip() == "rossby: the run cannot go on"
