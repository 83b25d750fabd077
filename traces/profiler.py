"""Torch profiler traces on a schedule, with named ranges: data, forward, backward, optimizer, checkpoint.

Under Nsight Systems, which like torch's profiler listens to CUPTI, the ranges are NVTX's and the same
schedule starts and stops its recording.
"""

import os
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from config import Profiling
from jobs.heartbeat import activity
from traces.exposed import exposed

# Each recording is written and forgotten: that is what torch warns of.
warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
WARMUP_STEPS = 1  # the profiler's own start is slow: its first step is thrown away
NSIGHT = "NSYS_PROFILING_SESSION_ID"  # in the environment of what nsys has started
MOST_MARKS = 1000  # parts that are timed before those that are over are added up


class PartTimes:
    """How long the parts of a step take. On a GPU they are timed by events on its stream, which nobody waits
    for: they are read on logging steps, when the host has waited anyhow. Parts inside others count in both.
    """

    def __init__(self) -> None:
        self.on_gpu = False
        self.marks: list[tuple[str, Any, Any]] = []  # part, its begin and its end
        self.seconds: dict[str, float] = defaultdict(float)  # of the parts that are over

    def start(self, device: torch.device) -> None:
        """A run begins."""
        self.on_gpu, self.marks = device.type == "cuda", []
        self.seconds.clear()

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self.now()
        yield
        self.marks.append((name, begin, self.now()))
        if len(self.marks) >= MOST_MARKS:
            self._add_up()

    def _add_up(self) -> None:
        """What is over by now: nobody waits for the rest."""
        waiting = []
        for name, begin, end in self.marks:
            if not self.on_gpu:
                self.seconds[name] += end - begin
            elif end.query():
                self.seconds[name] += begin.elapsed_time(end) / 1000
            else:
                waiting.append((name, begin, end))
        self.marks = waiting

    def read(self, num_steps: int) -> dict[str, float]:
        """Part -> seconds a step since the last look. On a GPU only what it has done by now counts."""
        self._add_up()
        seconds = {name: seconds / num_steps for name, seconds in self.seconds.items()}
        self.marks = []
        self.seconds.clear()
        return seconds


part_times = PartTimes()


@contextmanager
def span(name: str) -> Iterator[None]:
    """A part of a step: by this name in traces, in metrics.jsonl (seconds/<name>), and in what the watchdog
    says of a rank that hangs.
    """
    with record_function(name), nvtx_range(name), activity.phase(name), part_times.part(name):
        yield


def nvtx_range(name: str) -> AbstractContextManager:
    """What Nsight Systems shows a part as."""
    return torch.cuda.nvtx.range(name) if under_nsight() else nullcontext()


def under_nsight() -> bool:
    return NSIGHT in os.environ and torch.cuda.is_available()


class NsightRecording:
    """Of the last `profile_steps` of every `profile_freq` steps, where nsys was told
    --capture-range=cudaProfilerApi; each step is a range.
    """

    def __init__(self, settings: Profiling, step: int) -> None:
        self.freq = settings.profile_freq if settings.enable_profiling else 0
        self.first = self.freq - min(settings.profile_steps, self.freq)  # steps of a period before it
        self.number, self.on = step, False
        self._begin_step()

    def step(self) -> None:
        """A step has ended."""
        torch.cuda.nvtx.range_pop()
        self.number += 1
        self._begin_step()

    def _begin_step(self) -> None:
        on = self.freq > 0 and self.number % self.freq >= self.first
        if on != self.on:
            torch.cuda.synchronize()  # what was launched before belongs to the steps before
            (torch.cuda.profiler.start if on else torch.cuda.profiler.stop)()
        self.on = on
        torch.cuda.nvtx.range_push(f"step {self.number + 1}")


class Profiler:
    """Records `profile_steps` steps out of every `profile_freq`; does nothing while disabled."""

    def __init__(self, folder: Path, settings: Profiling, rank: int, step: int) -> None:
        self.folder, self.rank, self.step_number = folder, rank, step
        self.memory = settings.enable_memory_snapshot and torch.cuda.is_available()
        self.profile: AbstractContextManager = nullcontext()
        self.recording = NsightRecording(settings, step) if under_nsight() else None
        if settings.enable_profiling and not self.recording:
            folder.mkdir(parents=True, exist_ok=True)
            self.profile = self._build(settings)
            if self.memory:
                torch.cuda.memory._record_memory_history(max_entries=100_000)

    def _build(self, settings: Profiling) -> profile:
        freq = settings.profile_freq
        num_steps = min(settings.profile_steps, max(freq - WARMUP_STEPS, 1))
        # Read at the first recording: without it kineto says on stderr when one begins and when it ends.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        return profile(
            activities=activities,
            schedule=schedule(
                wait=max(freq - num_steps - WARMUP_STEPS, 0), warmup=WARMUP_STEPS, active=num_steps
            ),
            on_trace_ready=self.write,
            record_shapes=True,
        )

    def __enter__(self) -> "Profiler":
        self.profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self.memory:
            torch.cuda.memory._record_memory_history(enabled=None)
        self.profile.__exit__(*error)  # type: ignore[arg-type]
        exposed.close()

    def step(self) -> None:
        """Tell the profiler that a step has ended."""
        self.step_number += 1
        if self.recording:
            self.recording.step()
        if isinstance(self.profile, profile):
            self.profile.step()

    def write(self, finished: profile) -> None:
        """Called by torch at the end of each recording."""
        name = f"step-{self.step_number:08d}-rank{self.rank}"
        trace = self.folder / f"{name}.json.gz"
        finished.export_chrome_trace(str(trace))
        if self.rank == 0 and dist.is_initialized() and dist.get_world_size() > 1:
            exposed.look_at(trace)
        if self.memory:
            torch.cuda.memory._dump_snapshot(str(self.folder / f"{name}-memory.pickle"))
