"""What the parts of a step take and give back of memory, from a trace that has allocations.

Those of profiling.with_memory: bytes of torch's allocator, of the GPU where there is one. On a CPU what was
there before the recording began is not counted.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass

from command_line import text_table
from traces.events import Allocation, Loop, Trace

MIB = 2**20


@dataclass(frozen=True)
class StepMemory:
    """Bytes of a traced step."""

    start: float  # held when it begins
    peak: float
    peak_part: str  # the part of the loop that the peak lies in
    parts: dict[str, float]  # part -> what it leaves behind, or has given back (less than 0)


def device_of(allocations: list[Allocation]) -> tuple[int, int]:
    """Whose memory is meant: the GPU's, or the CPU's, where there is no other."""
    devices = Counter(each.device for each in allocations)
    gpus = [device for device in devices if device[1] >= 0]
    return max(gpus or devices, key=lambda device: devices[device])


def step_memory(trace: Trace) -> list[StepMemory]:
    """Of each traced step; none where the trace has no allocations."""
    if not trace.allocations:
        return []
    device, loop = device_of(trace.allocations), Loop(trace)
    mine = [each for each in trace.allocations if each.device == device]
    found = []
    for step in trace.steps:
        inside = [each for each in mine if step.start <= each.time < step.end]
        if not inside:
            continue
        parts: dict[str, float] = defaultdict(float)
        for each in inside:
            parts[loop.at(each.time).name] += each.size
        peak = max(inside, key=lambda each: each.held)
        start = inside[0].held - inside[0].size
        found.append(StepMemory(start, peak.held, loop.at(peak.time).name, dict(parts)))
    return found


def memory_report(trace: Trace) -> str:
    """The table of the step with the highest peak; empty where the trace has no allocations."""
    steps = step_memory(trace)
    if not steps:
        return ""
    step = max(steps, key=lambda each: each.peak)
    changes = sorted(step.parts.items(), key=lambda part: -abs(part[1]))
    rows = [
        ("memory of torch's allocator", "MiB"),
        ("held when the step begins", step.start / MIB),
        *((f"  {name}", f"{size / MIB:+.2f}") for name, size in changes if abs(size) >= 0.005 * MIB),
        (f"peak, in {step.peak_part}", step.peak / MIB),
    ]
    return text_table("<45 >14.2f", rows)
