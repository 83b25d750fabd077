"""One attack: a command, and what the right answer to it is. Who judges, judges from outside."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINE, RIGHT, SILENT, TRACEBACK, HUNG, OTHER = VERDICTS = (
    "one line",
    "run right",
    "silent",
    "traceback",
    "hung",
    "other",
)
BAD = (SILENT, TRACEBACK, HUNG, OTHER)
VERBS = ("train", "forecast", "evaluate", "plan", "checks")
# A line of a run's log, or a progress bar: no answer, and nothing against one.
LOGGED = re.compile(r"\d\d:\d\d:\d\d  |.*\d+%\||\d+step \[|rank +\d+: ")
CPP = re.compile(r"frame #\d+|Warning: .*|Exception .*|\[rank\d+\].*")  # what no table of a log holds
Answer = tuple[str, str]  # a verdict, and why


@dataclass
class Ended:
    """How a command ended. code: None where it did not."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float = 0.0
    left: bool = False  # processes behind

    @property
    def said(self) -> list[str]:
        """Lines that are the program's last word."""
        return [line for line in self.stderr.splitlines() if line.startswith("rossby: ")]


Right = Callable[[Ended], Answer]


@dataclass
class Case:
    """command: a verb with its arguments, or a program's; or what plays the case itself."""

    kind: str
    name: str
    command: list[str] | Callable[[], Ended]
    right: Right
    environment: dict[str, str] = field(default_factory=dict)
    limit: float = 60.0
    prepare: Callable[[], object] = lambda: None
    keeps: Path | None = None  # a run's folder of which no byte may change

    @property
    def shown(self) -> str:
        words = self.command if isinstance(self.command, list) else [self.name]
        settings = [f"{key}={value}" for key, value in self.environment.items()]
        return " ".join(repr(word)[1:-1][:120] for word in (*settings, *words))


# -- right answers


def refused(*words: str, code: int = 2, alone: bool = True) -> Right:
    """One line with all the words, nothing else that is no log, this exit code.

    alone: False after training, whose log has tables of several lines.
    """

    def judge(ended: Ended) -> Answer:
        if ended.code == 0:
            return SILENT, "accepted"
        if ended.code != code:
            return OTHER, f"exit code {ended.code}, not {code}"
        written = ended.stderr.splitlines() if alone else [*ended.said, *re.findall(CPP, ended.stderr)]
        lines = [line for line in written if line.strip() and not LOGGED.match(line)]
        if len(lines) != 1 or ended.said != lines:
            return OTHER, f"{len(lines)} lines, {len(ended.said)} of them an answer"
        missing = [word for word in words if word not in lines[0]]
        return (OTHER, f"does not say {missing[0]!r}") if missing else (LINE, "")

    return judge


def warned(pattern: str, check: Callable[[], str] = lambda: "") -> Right:
    """Runs to its end, and says so in a line of its log; check: what is wrong with what it made."""

    def judge(ended: Ended) -> Answer:
        if ended.code != 0:
            return OTHER, f"exit code {ended.code}, not 0"
        if not re.search(pattern, ended.stderr):
            return SILENT, f"nothing says {pattern!r}"
        wrong = check()
        return (SILENT, wrong) if wrong else (LINE, "")

    return judge


def runs(check: Callable[[], str] = lambda: "", code: int = 0) -> Right:
    """Ends well; check: what is wrong with what it made."""

    def judge(ended: Ended) -> Answer:
        if ended.code != code:
            return OTHER, f"exit code {ended.code}, not {code}"
        wrong = check()
        return (SILENT, wrong) if wrong else (RIGHT, "")

    return judge


def either(*rights: Right) -> Right:
    """Any of these; where none fits, the first one's word."""

    def judge(ended: Ended) -> Answer:
        answers = [right(ended) for right in rights]
        good = [answer for answer in answers if answer[0] not in BAD]
        silent = [answer for answer in answers if answer[0] == SILENT]
        return (good or silent or answers)[0]

    return judge


def judge(case: Case, ended: Ended) -> Answer:
    """What holds for every case, then what is the case's own."""
    if ended.code is None:
        return HUNG, f"still there after {case.limit:g} s"
    if "Traceback (most recent" in ended.stderr + ended.stdout:
        return TRACEBACK, "traceback"
    if ended.left:
        return HUNG, "processes were left"
    answer = case.right(ended)
    if answer[0] in BAD and (ended.code < 0 or "terminate called" in ended.stderr):
        return TRACEBACK, f"ended by signal {-ended.code}"
    return answer


# -- running them


class Runner:
    """Runs commands in this thread: verbs through a server of its own, other programs as they are."""

    numbers = count()

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.server = scratch, self._start()

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "benchmarks/attack_server.py")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment(), **pipes)

    def run(self, command: list[str], more: dict[str, str], limit: float) -> Ended:
        name = self.scratch / f"output-{next(self.numbers)}"
        files = {key: str(name.with_suffix(f".{key}")) for key in ("stdout", "stderr")}
        if command[0] in VERBS:
            how = self._order({"verb": command[0], "arguments": command[1:], "limit": limit} | files, more)
        else:
            how = self._start_program(command, more, limit, files)
        stdout, stderr = (Path(path).read_text(errors="replace") for path in files.values())
        for path in files.values():
            Path(path).unlink()
        return Ended(stdout=stdout, stderr=stderr, **how)

    def _order(self, order: dict[str, Any], more: dict[str, str]) -> dict[str, Any]:
        server = self.server
        assert server.stdin and server.stdout
        server.stdin.write(json.dumps(order | {"environment": environment() | more}) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    def _start_program(
        self, command: list[str], more: dict[str, str], limit: float, files: dict[str, str]
    ) -> dict[str, Any]:
        from benchmarks.attack_server import alive

        began = time.monotonic()
        with open(files["stdout"], "w") as out, open(files["stderr"], "w") as err:
            own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment() | more, stdout=out, stderr=err, **own
            )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        seconds = time.monotonic() - began
        left = end_session(process) if alive(process.pid) else False
        return {"code": code, "seconds": seconds, "left": left and code is not None}

    def close(self) -> None:
        assert self.server.stdin
        self.server.stdin.close()
        self.server.wait()


def end_session(process: subprocess.Popen) -> bool:
    """Kills what is left of a session some seconds after its leader; whether there was something."""
    from benchmarks.attack_server import LEAVE_SECONDS, alive

    deadline = time.monotonic() + (LEAVE_SECONDS if process.poll() is not None else 0)
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left, pids = alive(process.pid), descendants(process.pid)
    for pid in [*pids, process.pid] if left else []:  # ranks are sessions of their own
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return left


def descendants(pid: int) -> list[int]:
    """Processes below this one, whichever session they are of."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    with suppress(OSError):
        own = [int(word) for word in listed.read_text().split()]
        return [*own, *(each for child in own for each in descendants(child))]
    return []


def environment() -> dict[str, str]:
    """That every case starts from: what names ranks or layouts comes from the case alone."""
    clean = {key: value for key, value in os.environ.items() if key not in ("NGPU", "NNODES", "WORLD_SIZE")}
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return clean | threads | {"ROSSBY_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}


def contents(folder: Path, but: tuple[str, ...] = ()) -> dict[str, bytes]:
    """Every file of a folder, but for those below the names given."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if not name.startswith(but or ("\0",))}


def attempt(case: Case, runner: Runner) -> tuple[Answer, Ended]:
    """One case from its preparation to its verdict."""
    case.prepare()
    before = contents(case.keeps) if case.keeps else {}
    if callable(case.command):
        ended = case.command()
    else:
        ended = runner.run(case.command, case.environment, case.limit)
    answer = judge(case, ended)
    after = contents(case.keeps) if case.keeps else {}
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return ((SILENT, f"changed {', '.join(changed)}") if changed else answer), ended


class Runners(threading.local):
    """A runner for each thread, made when it is first asked for."""

    made: list[Runner] = []  # of all threads

    def __init__(self, scratch: Path) -> None:
        self.own = Runner(scratch)
        self.made.append(self.own)
