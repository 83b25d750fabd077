"""Faults of the machine while real processes run: full disks, signals, killed processes."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.attack_case import (
    ROOT,
    Case,
    Ended,
    Right,
    descendants,
    either,
    end_session,
    environment,
    refused,
    runs,
)
from benchmarks.attack_stage import MORE, Stage
from tests.started_jobs import last_step, losses

KIND = "faults"
LIMIT = 90.0
RUN_TRAIN = str(ROOT / "run_train.sh")
CALM = ["--validation.enable=false", "--checkpoint.keep_best="]
SLOW = [
    "--validation.enable=false",
    "--checkpoint.keep_best=",
    "--training.steps",
    "300",
    "--checkpoint.interval",
    "50",
]
Act = Callable[[subprocess.Popen, Path], None]  # on a job and its folder, while it runs


def cases(stage: Stage, rng: random.Random) -> Iterator[Case]:
    yield from signals(stage, rng)
    yield from killed(stage)
    yield from together(stage)
    if mounted(stage):
        yield from disks(stage)
        yield from shared_memory(stage)
    else:
        print("faults: nothing can be mounted here; full disks and small /dev/shm are left out", flush=True)


def played(
    stage: Stage, name: str, words: list[str], act: Act, right: Right, disk: str = "", **more: str
) -> Case:
    """A job of real processes, and what befalls it. disk: a folder where its own is to be."""
    output = stage.fresh(f"fault {name}")
    folder = Path(disk) / "run" if disk else output
    command = [RUN_TRAIN, *stage.options(folder, *words)]

    def play() -> Ended:
        output.mkdir(parents=True, exist_ok=True)
        out, err = output.with_suffix(".out"), output.with_suffix(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            own = {"env": environment() | more, "stdout": stdout, "stderr": stderr, "start_new_session": True}
            job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, **own)
        began = time.monotonic()
        act(job, folder)
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = job.wait(max(LIMIT - (time.monotonic() - began), 1))
        left = end_session(job)
        return Ended(
            code, out.read_text(), err.read_text(), time.monotonic() - began, left and code is not None
        )

    return Case(KIND, name, play, right, limit=LIMIT)


def one_of(*codes: int) -> Right:
    """Any of these exit codes, and no more than one line that is an answer."""
    return either(
        *(refused(code=code, alone=False) for code in codes if code), *(runs() for code in codes if not code)
    )


def until_step(step: int) -> Act:
    def wait(job: subprocess.Popen, folder: Path) -> None:
        while job.poll() is None and last_step(folder) < step:
            time.sleep(0.05)

    return wait


def send(number: signal.Signals, seconds: float) -> Act:
    def act(job: subprocess.Popen, _: Path) -> None:
        time.sleep(seconds)
        with suppress(ProcessLookupError):
            os.kill(job.pid, number)

    return act


def then(*acts: Act) -> Act:
    def act(job: subprocess.Popen, folder: Path) -> None:
        for each in acts:
            each(job, folder)

    return act


def signals(stage: Stage, rng: random.Random) -> Iterator[Case]:
    """At random moments, from the check of the command line to the last save."""
    for number in (signal.SIGTERM, signal.SIGINT):
        for ranks in ("1", "2"):
            early = rng.uniform(0.3, 3.0)
            # Before the program listens, the signal's own death is an answer too.
            by_signal = {signal.SIGTERM: (143, -15), signal.SIGINT: (130, -2)}[number]
            right = either(one_of(75, 1, *by_signal), *(runs(code=code) for code in by_signal))
            name = f"{number.name} after {early:.1f} s, {ranks} ranks"
            yield played(stage, name, SLOW, send(number, early), right, NGPU=ranks)
            late = then(until_step(rng.randrange(3, 60)), send(number, rng.uniform(0, 0.3)))
            yield played(stage, f"{number.name} in a step, {ranks} ranks", SLOW, late, one_of(75), NGPU=ranks)


def killed(stage: Stage) -> Iterator[Case]:
    """A process that the kernel took."""

    def kill(word: bytes) -> Act:
        def act(job: subprocess.Popen, _: Path) -> None:
            for pid in descendants(job.pid):
                with suppress(OSError):
                    if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                        return os.kill(pid, signal.SIGKILL)

        return act

    workers = [*SLOW, *stage.by_processes(1), "--checkpoint.enable=false"]
    yield played(
        stage, "a loader process killed", workers, then(until_step(5), kill(b"spawn_main")), one_of(1)
    )
    rank = then(until_step(5), kill(b"train.py"))
    yield played(stage, "a rank killed", SLOW, rank, one_of(1), NGPU="2")
    writer = then(until_step(55), kill(b"spawn_main"))
    yield played(
        stage,
        "a writer of checkpoints killed",
        [*SLOW, "--checkpoint.async_mode=async"],
        writer,
        one_of(0, 1),
    )


def together(stage: Stage) -> Iterator[Case]:
    """Two starts in one folder at once: one trains, the other is refused."""
    words = ["--validation.enable=false", "--checkpoint.keep_best=", "--training.steps", "2000"]

    def start_another(job: subprocess.Popen, folder: Path) -> None:
        command = [RUN_TRAIN, *stage.options(folder, *words)]
        other = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
        (folder / "other").write_text(f"{other.returncode} {other.stderr}")

    folder = stage.fresh("fault two starts at once")

    def check() -> str:
        other = (folder / "other").read_text()
        steps = set(losses(folder)) == set(range(1, 2001))
        return (
            ""
            if steps and other.startswith("2 ") and "another run" in other
            else f"the other: {other[-300:]}"
        )

    yield played(stage, "two starts at once", words, then(until_step(1), start_another), runs(check))


def mount(size: str, where: Path) -> bool:
    where.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    return os.geteuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def unmount(where: Path) -> None:
    subprocess.run(["umount", "-l", str(where)], capture_output=True)


def mounted(stage: Stage) -> bool:
    probe = stage.scratch / "probe"
    there = mount("1m", probe)
    if there:
        unmount(probe)
    return there


def disks(stage: Stage) -> Iterator[Case]:
    """A disk that is full from the start, one that fills, and one that was full for 12 s."""

    def right_after(where: Path, right: Right) -> Right:
        def judge(ended: Ended) -> tuple[str, str]:
            answer = right(ended)
            unmount(where)
            return answer

        return judge

    def case(name: str, size: str, words: list[str], act: Act, right: Right) -> Case:
        where = stage.fresh(f"disk {name}")
        made = played(stage, name, words, act, right_after(where, right), str(where))
        made.prepare = lambda: mount(size, where)
        return made

    more = ["--training.steps", str(MORE)]
    yield case("a disk that is full", "200k", more, lambda *_: None, one_of(1, 2))
    yield case("a disk that fills", "900k", more, lambda *_: None, one_of(1))
    where = stage.fresh("disk full for 12 s")

    def fill(job: subprocess.Popen, _: Path) -> None:
        until_step(5)(job, where / "run")
        with suppress(OSError), (where / "ballast").open("wb") as file:
            while True:
                file.write(bytes(2**16))
        time.sleep(12)
        (where / "ballast").unlink()

    def check() -> str:
        return "" if set(losses(where / "run")) == set(range(1, 401)) else "lines of metrics.jsonl are lost"

    words = ["--validation.enable=false", "--checkpoint.keep_best=", "--training.steps", "400"]
    yield case("full for 12 s", "20m", words, fill, runs(check))


def shared_memory(stage: Stage) -> Iterator[Case]:
    """/dev/shm of 64 MB, as Docker gives it, with loader processes and two ranks."""
    for ranks in ("1", "2"):
        folder = stage.fresh(f"shm {ranks}")
        words = [RUN_TRAIN, *stage.options(folder, *stage.by_processes(2), *CALM)]
        shell = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-m", "bash", "-c", shell, "bash", *words]
        yield Case(KIND, f"/dev/shm of 64 MB, {ranks} ranks", command, runs(), {"NGPU": ranks}, limit=LIMIT)
