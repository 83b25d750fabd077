"""Who is to blame when a run stands still, in words; and what is left behind to look at."""

import faulthandler
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from traces.collective_record import disagreement, recording

OWN_WAY = "ranks that call different collectives wait for ever: some code decided on one rank alone"


@dataclass(frozen=True)
class Beat:
    """What a rank says of itself, and how long nothing has been heard of it."""

    rank: int
    node: int = -1  # which host; containers may share a name
    host: str = "an unknown host"
    pid: int = 0
    step: int = -1
    phase: str = "nothing yet"
    seconds: float = 0.0  # in this phase, or since its last sign of progress
    limit: float = float("inf")  # seconds that it may take
    where: str = ""  # innermost line of the project
    waits: bool = False  # inside a collective: another rank holds it up
    lost: bool = False  # a connection to another rank has broken
    silent: float = 0.0  # seconds since it was last heard of
    calls: dict[str, list[Any]] = field(default_factory=dict)  # its last collectives, when it stands still

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def to_blame(beats: Sequence[Beat], silence: float) -> tuple[list[Beat], str] | None:
    """The ranks that hold up the run, and what is wrong with them; None while nothing is.

    silence: seconds after which a rank that is not heard of counts as gone. A rank that is heard of is to
    blame when it is over its limit and is not merely waiting for one that is behind it.
    """
    if silent := [beat for beat in beats if beat.silent > silence]:
        longest = max(beat.silent for beat in silent)
        return silent, f"not heard of for {longest:.0f} s: stopped, dead, or the host cannot be reached"
    busy = [beat for beat in beats if not beat.waits] or list(beats)
    behind = [beat for beat in busy if beat.step == min(other.step for other in busy)]
    late = [beat for beat in behind if beat.seconds > beat.limit]
    if not late:
        return None
    return late, f"no progress for {max(beat.seconds for beat in late):.0f} s (limit {late[0].limit:.0f} s)"


def accusation(culprits: Sequence[Beat], reason: str) -> str:
    """One line: who, where, what is wrong."""
    names = ", ".join(beat.name for beat in culprits[:8]) + (", ..." if len(culprits) > 8 else "")
    first = culprits[0]
    doing = f"in step {first.step}, {first.phase}" if first.step > 0 else "before its first step"
    return f"{names} {doing}: {reason}"


def table(beats: Sequence[Beat]) -> str:
    """What every rank is doing, a line for each group of ranks that do the same in the same place."""

    def doing(beat: Beat) -> tuple[int, str, str, bool, bool]:
        return beat.step, beat.phase, beat.where, beat.waits, beat.silent > 3

    lines = []  # those that are furthest behind first
    for (step, phase, where, waits, silent), group in groupby(sorted(beats, key=doing), doing):
        members = list(group)
        seconds = max(beat.silent if silent else beat.seconds for beat in members)
        note = " (not heard of since)" if silent else " (waits for other ranks)" if waits else ""
        at = f" at {where}" if where else ""
        who = ranges([beat.rank for beat in members])
        lines.append(f"  rank {who}: step {step}, {phase} for {seconds:.0f} s{at}{note}")
    return "\n".join(lines)


def mismatch(beats: Sequence[Beat]) -> list[str]:
    """Lines on ranks that all wait, but in different collectives; none where one of them is merely late."""
    if not all(beat.waits and beat.calls for beat in beats):
        return []
    found = disagreement({beat.rank: beat.calls for beat in beats})
    return [*(f"  {line}" for line in found), f"  {OWN_WAY}"] if found else []


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    numbers, parts = sorted(numbers), []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(f"{members[0]}-{members[-1]}" if len(members) > 1 else f"{members[0]}")
    return ", ".join(parts)


def process_state(pid: int) -> str:
    """What the kernel says of a process of this host: "stopped", "gone", or nothing to be remarked."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    state = stat.rpartition(")")[2].split()[0]
    return {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": "gone"}.get(state, "")


def leave_traces(folder: Path, rank: int) -> None:
    """Python stacks of all threads into rank-N.txt, torch's last collectives into rank-N.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(recording()))
