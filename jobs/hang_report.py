"""Report of a run that hangs: the stalled ranks, a table of all ranks, and files with their stacks."""

import faulthandler
import importlib
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

MISMATCH = "every rank waits for others: they call different collectives, so a branch depends on the rank"
NO_HEARTBEAT = 3.0  # seconds, while one is sent every second


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, which it sends once a second."""

    rank: int
    host: str = "unknown host"
    pid: int = 0
    step: int = -1
    phase: str = "nothing yet"
    seconds: float = 0.0  # since its last progress
    limit: float = float("inf")  # seconds that it may take
    where: str = ""  # innermost line of the project
    waits: bool = False  # inside a collective: another rank delays it
    lost: bool = False  # a connection to another rank has broken
    call: str = ""  # the collective that it waits in, after half the limit
    silent: float = 0.0  # seconds since its last heartbeat

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})" if self.pid else f"rank {self.rank}"

    @property
    def note(self) -> str:
        """Remark for the table on a rank that is silent or waits for others."""
        if self.silent > NO_HEARTBEAT:
            return " (no heartbeat since)"
        return f" (waits for other ranks{self.call and f' in {self.call}'})" if self.waits else ""


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
        return None  # the others wait for a silent rank, which the check above will find soon
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


def format_table(ranks: Sequence[Heartbeat]) -> str:
    """Return a line for each group of ranks in the same place, those that are furthest behind first."""
    groups, lines = defaultdict(list), []
    for each in sorted(ranks, key=lambda each: (each.step, each.waits)):
        groups[each.step, each.phase, each.where, each.note].append(each)
    for (step, phase, where, note), members in groups.items():
        seconds = max(each.seconds + each.silent for each in members)
        numbers, at = format_ranges([each.rank for each in members]), f" at {where}" if where else ""
        lines.append(f"  rank {numbers}: step {step}, {phase} for {seconds:.0f} s{at}{note}")
    calls = {each.waits and each.call for each in ranks}
    return "\n".join([*lines, f"  {MISMATCH}"] if all(calls) and len(calls) > 1 else lines)


def format_ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"."""
    parts = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        first, *rest = [number for _, number in run]
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    return ", ".join(parts)


def write_stacks(folder: Path, rank: int) -> None:
    """Write Python stacks of all threads to rank-N.txt and torch's flight record to rank-N.json. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"rank-{rank}.txt").open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(flight_record()))


def flight_record() -> dict[str, Any]:
    """Return what torch's flight recorders have, the oldest first: builds for CUDA have one for gloo and one
    for NCCL.
    """
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    found = [json.loads(dump(True, False)) for dump in dumps if dump]
    entries = [entry for each in found for entry in each.get("entries", [])]
    header = {key: value for each in found for key, value in each.items()}
    return {**header, "entries": sorted(entries, key=lambda entry: entry["time_created_ns"])}


def last_collective() -> str:
    """Return the newest collective of this process: "call 75 of tp, all_reduce of Float [5]"; "" if none."""
    entries = [entry for entry in flight_record()["entries"] if not entry["is_p2p"]]
    if not entries:
        return ""
    entry = entries[-1]
    name, axis = entry["profiling_name"].rpartition(":")[2], entry["process_group"][1].removeprefix("mesh_")
    group = "all ranks" if axis == "default_pg" else axis
    inputs = zip(entry["input_dtypes"][:1], entry["input_sizes"], strict=False)
    call = " of ".join([name.strip("_"), *(f"{dtype} {size}" for dtype, size in inputs)])
    return f"call {entry['collective_seq_id']} of {group}, {call}"
