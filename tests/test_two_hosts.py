"""Two hosts: network namespaces joined by a cable that can be pulled out, a launcher in each."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints.files import complete_steps
from tests.started_jobs import Job, losses, wait_until, write_config

PREFIX = "10.213.97"
HOSTS = ("rossby-a", "rossby-b")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def cable() -> Iterator[None]:
    """Two namespaces with one interface each, 10.213.97.1 and .2. Skips where that is not permitted."""
    if not shutil.which("ip"):
        pytest.skip("two hosts are network namespaces: the command ip is not installed")
    try:
        for left in {*HOSTS} & set(os.listdir("/run/netns") if os.path.isdir("/run/netns") else []):
            ip("netns", "del", left)  # of tests that were killed
        ip("netns", "add", HOSTS[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"two hosts are network namespaces: {error.stderr.strip()}")
    ip("netns", "add", HOSTS[1])
    ip("link", "add", "cable-a", "netns", HOSTS[0], "type", "veth", "peer", "cable-b", "netns", HOSTS[1])
    for number, (host, end) in enumerate(zip(HOSTS, "ab", strict=True), start=1):
        ip("-n", host, "addr", "add", f"{PREFIX}.{number}/24", "dev", f"cable-{end}")
        ip("-n", host, "link", "set", f"cable-{end}", "up")
        ip("-n", host, "link", "set", "lo", "up")
    yield
    for host in HOSTS:
        ip("netns", "del", host)


@pytest.fixture
def config_file(tmp_path) -> Path:
    return write_config(tmp_path)


Start = Callable[..., Job]


@pytest.fixture
def start(cable, start_job, config_file) -> Start:
    """(host, folder, *options) -> a launcher with one rank on that host, which may have a disk of its own
    where the folder is.
    """

    def on_host(host: int, folder: Path, *options: str, restarts: str = "0", own_disk: bool = False) -> Job:
        inside = ["ip", "netns", "exec", HOSTS[host]]  # with mounts of its own, too
        if own_disk:
            inside += ["sh", "-c", f'mount -t tmpfs none {shlex.quote(str(folder))} && exec "$@"', "sh"]
        network = {"NGPU": "1", "NNODES": "2", "RDZV_ENDPOINT": f"{PREFIX}.1:29511", "NODE_RANK": str(host)}
        network["GLOO_SOCKET_IFNAME"] = f"cable-{'ab'[host]}"  # this machine's name leads to neither
        return start_job(config_file, folder, *options, host=inside, MAX_RESTARTS=restarts, **network)

    return on_host


def start_both(start: Start, folder: Path, *options: str, **settings: str) -> list[Job]:
    return [start(host, folder, *options, **settings) for host in (0, 1)]


def wait_for(job: Job, pattern: str, timeout: float = 120) -> float:
    """Seconds until a job has said something."""
    started = time.monotonic()
    wait_until(lambda: re.search(pattern, job.output, re.DOTALL), timeout, lambda: job.output)
    return time.monotonic() - started


@pytest.mark.slow
def test_a_crash_starts_the_ranks_of_both_hosts_again(start, start_job, config_file, tmp_path):
    """A run over two hosts is that of one host with two ranks, also after a rank was killed.

    Then the cable is cut: both sides end, and each names the rank that it cannot reach.
    """
    run = tmp_path / "run"
    options = ["--checkpoint.interval", "20", "--comm.train_timeout_seconds", "5"]
    first, second = start_both(start, run, *options, restarts="1")
    wait_for(first, "saved")
    second.kill_rank(1, signal.SIGKILL)
    assert wait_for(first, "restart 1: ") < 20 and wait_for(second, "restart 1: ") < 20
    assert "rossby: rank 1 " in first.output and "Traceback" not in first.output
    # The metrics of the first life reach further than the checkpoint.
    wait_for(first, r"resumed from.*  step +\d+/")
    saved = complete_steps(run / "checkpoints")[-1]
    first.wait_for_step(saved + 5)
    one = start_job(config_file, tmp_path / "one", "--training.steps", str(saved + 5), NGPU="2")

    ip("-n", HOSTS[0], "link", "set", "cable-a", "down")
    cut = time.monotonic()
    try:
        assert [first.end(40), second.end(40)] == [1, 1]
    finally:
        ip("-n", HOSTS[0], "link", "set", "cable-a", "up")
    assert time.monotonic() - cut < 35
    assert "rank 1" in first.output.rpartition("rossby:")[2], first.output
    assert "no answer from rank 0's host" in second.output, second.output
    assert one.end() == 0, one.output
    assert losses(tmp_path / "one").items() <= losses(run).items()


@pytest.mark.slow
def test_a_host_that_dies_ends_the_job_which_resumes(start, tmp_path):
    run = tmp_path / "run"
    options = ["--checkpoint.interval", "20", "--comm.train_timeout_seconds", "5"]
    first, second = start_both(start, run, *options)
    wait_for(first, "saved")
    second.kill_all()
    assert first.end(40) == 1 and "rossby: rank 1 (" in first.output, first.output
    saved = complete_steps(run / "checkpoints")[-1]
    both = start_both(start, run, *options, "--training.steps", str(saved + 10))
    assert [job.end() for job in both] == [0, 0], both[0].output
    assert "resumed from" in both[0].output and sorted(losses(run)) == list(range(1, saved + 11))


@pytest.mark.slow
def test_hosts_that_do_not_share_the_folder_of_the_run_are_refused(start, tmp_path):
    """Each would write half of every checkpoint, found out at the next start."""
    run = tmp_path / "run"
    first, second = start(0, run), start(1, run, own_disk=True)
    codes = [first.end(), second.end()]
    output = first.output + second.output  # the line is on the host that comes first
    assert codes == [2, 2] and "job.dump_folder" in output and "Traceback" not in output, output
    assert not (run / "metrics.jsonl").exists()
