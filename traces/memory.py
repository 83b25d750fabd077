"""The allocator's snapshot that lies beside a trace (`profiling.enable_memory_snapshot`): memory over time.

torch writes it as a pickle. It is read by one that knows no class and no function, so that a file from
anywhere runs nothing: a snapshot is made of dictionaries, lists, strings and numbers.
"""

import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from errors import DataError

TRACE_NAME = re.compile(r"(step-\d+-rank\d+)\.json\.gz")
OURS = ("train.py", "models/", "parallelisms/", "training/", "datasets/", "verification/")


class Holder(NamedTuple):
    """Code that memory was allocated by, and what it held at the peak."""

    where: str
    gib: float


class MemoryTimeline(NamedTuple):
    """Allocated memory of one GPU after each event of the allocator."""

    seconds: np.ndarray  # since the first event
    gib: np.ndarray
    holders: list[Holder]  # at the peak, of what was allocated since recording began; the largest first


class PlainUnpickler(pickle.Unpickler):
    """Numbers, strings and containers only."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no snapshot needs")


def snapshot_beside(trace: Path) -> Path | None:
    """The allocator's snapshot of the same steps and rank, where there is one."""
    match = TRACE_NAME.fullmatch(trace.name)
    path = trace.parent / f"{match[1]}-memory.pickle" if match else None
    return path if path and path.is_file() else None


def read_memory(path: Path) -> list[MemoryTimeline]:
    """One a GPU that did anything. Raises DataError for what is no snapshot, or carries code."""
    try:
        with path.open("rb") as file:
            snapshot = PlainUnpickler(file).load()
        return [
            timeline(events, active_bytes(snapshot["segments"], device))
            for device, events in enumerate(snapshot["device_traces"])
            if any(event["action"] == "alloc" for event in events)
        ]
    except (pickle.UnpicklingError, OSError, EOFError, KeyError, TypeError, IndexError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a memory snapshot ({error})") from error


def active_bytes(segments: list[dict[str, Any]], device: int) -> int:
    """What is allocated when the snapshot is taken."""
    return sum(
        block["size"]
        for segment in segments
        if segment.get("device", 0) == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


def timeline(events: list[dict[str, Any]], final: int) -> MemoryTimeline:
    """From what is allocated at the end, backwards: the recording does not know what was before it."""
    signs = {"alloc": 1, "free_completed": -1}
    counted = [event for event in events if event["action"] in signs]
    changes = np.array([signs[e["action"]] * e["size"] for e in counted], dtype=np.int64)
    after = final - (changes.sum() - changes.cumsum())
    times = np.array([event.get("time_us", i) for i, event in enumerate(counted)], dtype=np.int64)
    peak = int(after.argmax())
    return MemoryTimeline((times - times[0]) / 1e6, after / 2**30, holders(counted[: peak + 1]))


def holders(events: list[dict[str, Any]]) -> list[Holder]:
    """Who holds what was allocated in `events` and not freed in them."""
    alive: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        else:
            alive.pop(event["addr"], None)
    sizes: Counter[str] = Counter()
    for event in alive.values():
        sizes[line_of(event.get("frames", []))] += event["size"]
    return [Holder(where, size / 2**30) for where, size in sizes.most_common()]


def line_of(frames: list[dict[str, Any]]) -> str:
    """The innermost line of this project in a stack, or else of anyone."""
    named = [f for f in frames if f.get("filename")]
    ours = [f for f in named if any(part in f["filename"] for part in OURS) and "torch" not in f["filename"]]
    if not named:
        return "unknown"
    frame = (ours or named)[0]
    return f"{'/'.join(Path(frame['filename']).parts[-2:])}:{frame['line']} {frame['name']}"
