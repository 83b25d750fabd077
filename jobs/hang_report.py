"""Report of a run that hangs: the stalled ranks, a table of all ranks, and files with their stacks."""

import faulthandler
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

MISMATCH = "ranks that call different collectives wait for each other for ever: a branch depends on the rank"
ENDED = "the process has ended"
NO_HEARTBEAT = 3.0  # seconds, while one is sent every second
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "Z": ENDED}  # the kernel's letters


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, which it sends once a second."""

    rank: int
    node: int = -1  # number of the host; containers may share a name
    host: str = "unknown host"
    pid: int = 0
    step: int = -1
    phase: str = "nothing yet"
    seconds: float = 0.0  # since its last sign of progress
    limit: float = float("inf")  # seconds that it may take
    where: str = ""  # innermost line of the project
    waits: bool = False  # inside a collective: another rank delays it
    lost: bool = False  # a connection to another rank has broken
    silent: float = 0.0  # seconds since its last heartbeat
    calls: dict[str, list[Any]] = field(default_factory=dict)  # its last collectives, where it stands still

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"


def find_stalled_ranks(ranks: Sequence[Heartbeat], silence: float) -> tuple[list[Heartbeat], str] | None:
    """Return the ranks that stop the run and the reason; None while there is none.

    silence: seconds without a heartbeat after which a rank is taken for dead. A rank with a heartbeat is
    stalled when it is over its limit and does not merely wait for a rank that is behind it.
    """
    if silent := [each for each in ranks if each.silent > silence]:
        longest = max(each.silent for each in silent)
        return silent, f"no heartbeat for {longest:.0f} s: stopped, dead, or its host cannot be reached"
    busy = [each for each in ranks if not each.waits]
    if not busy and any(each.silent > NO_HEARTBEAT for each in ranks):
        return None  # the others wait for that one, which the line above finds in a moment
    busy = busy or list(ranks)
    behind = [each for each in busy if each.step == min(other.step for other in busy)]
    late = [each for each in behind if each.seconds > each.limit]
    if not late:
        return None
    return late, f"no progress for {max(each.seconds for each in late):.0f} s (limit {late[0].limit:.0f} s)"


def format_report(stalled: Sequence[Heartbeat], reason: str) -> str:
    """Return one line: ranks, step, phase, reason."""
    names = ", ".join(each.name for each in stalled[:8]) + (", ..." if len(stalled) > 8 else "")
    first = stalled[0]
    place = f"in step {first.step}, {first.phase}" if first.step > 0 else "before its first step"
    return f"{names} {place}: {reason}"


def full_report(stalled: Sequence[Heartbeat], reason: str, ranks: Sequence[Heartbeat], node: int) -> str:
    """Return stalled ranks, a table of all, and collectives that do not match. node: this host's."""
    if stalled[0].node == node and stalled[0].silent and (state := process_state(stalled[0].pid)):
        reason = f"{state}, {reason.partition(':')[0]}"
    lines = [f"{format_report(stalled, reason)}; all ranks end", format_table(ranks)]
    if all(each.waits and each.calls for each in ranks):  # else one of them is merely late
        mismatches = find_mismatches({each.rank: each.calls for each in ranks})
        lines += [f"  {line}" for line in [*mismatches, MISMATCH]] if mismatches else []
    return "\n".join(lines)


def format_table(ranks: Sequence[Heartbeat]) -> str:
    """Return a line for each group of ranks in the same place, those that are furthest behind first."""

    def place(each: Heartbeat) -> tuple[int, str, str, bool, bool]:
        return each.step, each.phase, each.where, each.waits, each.silent > NO_HEARTBEAT

    lines = []
    for (step, phase, where, waits, silent), group in groupby(sorted(ranks, key=place), place):
        members = list(group)
        seconds = max(each.silent if silent else each.seconds for each in members)
        note = " (no heartbeat since)" if silent else " (waits for other ranks)" if waits else ""
        numbers = format_ranges([each.rank for each in members])
        at = f" at {where}" if where else ""
        lines.append(f"  rank {numbers}: step {step}, {phase} for {seconds:.0f} s{at}{note}")
    return "\n".join(lines)


def format_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    return ", ".join(parts)


def process_state(pid: int) -> str:
    """Return the state of a process of this host where it explains a stall, else an empty text."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ENDED
    return STATES.get(stat.rpartition(")")[2].split()[0], "")


def write_stacks(folder: Path, rank: int) -> None:
    """Write Python stacks of all threads to rank-N.txt and torch's flight record to rank-N.json. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(flight_record()))


# -- torch's flight recorder, of which builds for CUDA have one for gloo and one for NCCL


class Collective(NamedTuple):
    group: str  # backend and name, equal on all its ranks
    number: int  # in the group, from 1; each backend counts its own
    call: str  # "all_reduce of Float [5]"
    axis: str  # the group's description, for example "tp"
    created: int  # ns since 1970, by the clock of the host


def flight_record() -> dict[str, Any]:
    """Return the recorders' own dump, of all backends, entries in the order of time."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    found = [json.loads(dump(True, False)) for dump in dumps if dump]
    entries = [entry for each in found for entry in each.get("entries", [])]
    header = {key: value for each in found for key, value in each.items()}
    return {**header, "entries": sorted(entries, key=lambda entry: entry["time_created_ns"])}


def recorded_collectives() -> list[Collective]:
    """Return the collectives of this process, the oldest first."""
    return [_collective(entry) for entry in flight_record()["entries"] if not entry["is_p2p"]]


def _collective(entry: dict[str, Any]) -> Collective:
    group, axis = entry["process_group"]
    backend, _, name = entry["profiling_name"].rpartition(":")
    sizes = list(zip(entry["input_dtypes"], entry["input_sizes"], strict=False))[:1]
    call = " of ".join([name.strip("_"), *(f"{dtype} {size}" for dtype, size in sizes)])
    number, created = entry["collective_seq_id"], entry["time_created_ns"]
    return Collective(f"{backend}:{group}", number, call, axis.removeprefix("mesh_"), created)


def find_mismatches(last: Mapping[int, Mapping[str, list[Any]]]) -> list[str]:
    """Return a line for each group that does not have all its ranks in the same call.

    last: rank -> group -> [number, call, axis] of its last call. A rank may have no part in a group.
    """
    lines = []
    for group in dict.fromkeys(group for calls in last.values() for group in calls):
        own = {rank: calls[group] for rank, calls in last.items() if group in calls}
        number, call, axis = max(own.values(), key=lambda each: each[0])
        where = f"call {number} among {'all ranks' if axis == 'default_pg' else axis}"
        calls = {rank: each[1] for rank, each in own.items() if each[0] == number}
        behind = [rank for rank in own if rank not in calls]
        if len(set(calls.values())) > 1:
            different = "; ".join(f"rank {rank}: {each}" for rank, each in list(calls.items())[:4])
            lines.append(f"{where} is not the same: {different}")
        elif behind:
            lines.append(f"{_named(list(calls))} called {call} ({where}), {_named(behind)} did not")
    return lines


def _named(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {names}"
