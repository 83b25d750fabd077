"""What ranks have called on each other, by torch's flight recorder: who has not called what others wait in.

The recorder keeps the last calls of a process (TORCH_FR_BUFFER_SIZE, 2,000 by default) with the group, the
number of the call in it, what was called and when. Builds for CUDA have two: NCCL writes into one of its own.
"""

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

EVERY_RANK = "default_pg"
SHOWN = 3  # calls in a message

Calls = Mapping[str, Sequence[Any]]  # name of a group -> (number of the last call in it, what it was)


@dataclass(frozen=True)
class Call:
    """One of a rank's collectives."""

    group: str  # its backend and name, the same on all its ranks; each backend counts its own calls
    described: str  # what the group is there for
    number: int  # in the group, from 1
    what: str  # "all_reduce of Float [5]"
    created: int  # ns since 1970, by the clock of the host


def recorded_calls() -> list[Call]:
    """Of this process, the oldest first; none where this build of torch records nothing."""
    return [call_of(entry) for entry in recording()["entries"] if not entry["is_p2p"]]


def recording() -> dict[str, Any]:
    """What torch has recorded in this process, in its own form, of all backends."""
    c10d = importlib.import_module("torch._C._distributed_c10d")
    dumps = [getattr(c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    found = [json.loads(dump(True, False)) for dump in dumps if dump]
    entries = [entry for each in found for entry in each.get("entries", [])]
    whole = {key: value for each in found for key, value in each.items()}
    return {**whole, "entries": sorted(entries, key=lambda entry: entry["time_created_ns"])}


def call_of(entry: dict[str, Any]) -> Call:
    group, described = entry["process_group"]
    backend, _, name = entry["profiling_name"].rpartition(":")
    sizes = zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
    tensors = ", ".join(f"{dtype} {size}" for dtype, size in list(sizes)[:1])
    what = f"{name.strip('_')} of {tensors}" if tensors else name.strip("_")
    return Call(f"{backend}:{group}", described, entry["collective_seq_id"], what, entry["time_created_ns"])


def last_calls() -> dict[str, list[Any]]:
    """The last of each group, to be told to the others: group -> [number, what, whose group]."""
    return {call.group: [call.number, call.what, call.described] for call in recorded_calls()}


def disagreement(told: Mapping[int, Calls]) -> list[str]:
    """Where ranks that wait for each other are not in the same call, a line each; told: rank -> its calls.

    A group that a rank has not called anything in is unknown there: it may have no part in it.
    """
    lines = []
    for group in dict.fromkeys(group for calls in told.values() for group in calls):
        last = {rank: calls[group] for rank, calls in told.items() if group in calls}
        furthest = max(number for number, *_ in last.values())
        ahead = {rank: call for rank, call in last.items() if call[0] == furthest}
        behind = [rank for rank in last if rank not in ahead]
        _, what, described = next(iter(ahead.values()))
        where = "all ranks" if described == EVERY_RANK else described.removeprefix("mesh_")
        call = f"call {furthest} among {where}"
        if different := [f"rank {r}: {c[1]}" for r, c in ahead.items() if c[1] != what]:
            first = f"rank {next(iter(ahead))}: {what}"
            lines.append(f"{call} is not the same: {'; '.join([first, *different[:SHOWN]])}")
        elif behind:
            lines.append(f"{named(list(ahead))} called {what} ({call}), {named(behind)} did not")
    return lines


def named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"
