"""Collectives of this process in torch's flight recorder, and where ranks disagree about them.

Builds of torch for CUDA have a recorder for gloo and one for NCCL; each keeps TORCH_FR_BUFFER_SIZE calls.
"""

import importlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Collective(NamedTuple):
    group: str  # backend and name, equal on all its ranks
    axis: str  # the group's description, for example "tp"
    number: int  # in the group, from 1; each backend counts its own
    call: str  # "all_reduce of Float [5]"
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
    return Collective(f"{backend}:{group}", axis.removeprefix("mesh_"), number, call, created)


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
