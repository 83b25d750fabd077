"""What the parts of benchmarks/gpu.sh share: sizes, the clock, and rows that outlive a stopped part."""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results_file import append
from parallelisms.mesh import start_ranks


@dataclass(frozen=True)
class Sizes:
    """What is measured: vit1b, or something tiny that only shows that the script runs to its end."""

    grid: tuple[int, int] = (1024, 2048)
    patches: tuple[tuple[int, int], ...] = ((16, 32), (16, 16))  # 4,096 and 8,192 tokens
    variables: int = 17
    dim: int = 1536
    layers: int = 48
    heads: tuple[int, int] = (24, 12)  # of 64 and of 128
    largest_batch: int = 8  # more tokens than 32,768 make no step faster, only longer
    steps: tuple[int, int] = (3, 5)  # warm-up, measured
    compiled: bool = True
    products: tuple[tuple[int, int], ...] = ((1536, 4608), (1536, 1536), (1536, 6144), (6144, 1536))  # (K, N)
    rows: int = 32768  # of these products
    optimizer_blocks: int = 12  # whose parameters an optimiser updates
    stall_dim: int = 1024
    dates: int = 12  # that the loader reads from
    workers: int = 8
    calibration_seconds: float = 15.0

    def tokens(self, patch: tuple[int, int]) -> int:
        return self.grid[0] * self.grid[1] // (patch[0] * patch[1])


TINY = Sizes(
    grid=(32, 64),
    patches=((4, 8), (4, 4)),
    variables=3,
    dim=64,
    layers=2,
    heads=(4, 2),
    largest_batch=2,
    steps=(1, 2),
    compiled=False,
    products=((64, 192), (256, 64)),
    rows=256,
    optimizer_blocks=1,
    stall_dim=64,
    dates=6,
    workers=0,
    calibration_seconds=2.0,
)


@dataclass(frozen=True)
class Rows:
    """The file that a run's rows go to as soon as they are known, each with versions and hardware."""

    path: Path
    run: str  # when it began: the file holds other runs' rows, too

    def add(self, row: dict[str, Any]) -> None:
        append(self.path, [{"run": self.run, **row}])

    def read(self) -> list[dict[str, Any]]:
        """This run's. Whole lines: a process that was stopped may have left half of one."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in rows if row.get("run") == self.run]


class Session:
    """One part: where it runs, until when, and where its rows go."""

    def __init__(self, part: str, rows: Rows | None, seconds: float, rehearse: bool) -> None:
        self.part, self.rows, self.rehearse = part, rows, rehearse
        self.sizes = TINY if rehearse else Sizes()
        self.device = torch.device("cpu" if rehearse else "cuda")
        self.end = time.perf_counter() + seconds

    def start_ranks(self) -> None:
        """A process group of one, where an earlier part has not made it."""
        if not dist.is_initialized():
            start_ranks(600, "auto" if self.device.type == "cuda" else "gloo")

    @property
    def left(self) -> float:
        """Seconds until this part is stopped."""
        return self.end - time.perf_counter()

    def add(self, what: str, value: float, unit: str, **about: Any) -> None:
        row = {"part": self.part, "what": what, "value": value, "unit": unit, **about}
        print(f"  {what:<58}{value:>12.5g} {unit}", flush=True)
        self._write(row)

    def attempt(self, what: str, run: Callable[[], Any]) -> None:
        """What fails gives one line and one row, and the rest goes on."""
        try:
            run()
        except Exception as error:  # of whatever library: it is the answer to the question
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"  {what:<58}{'failed':>12} {reason}", flush=True)
            self._write({"part": self.part, "what": what, "failed": reason})
            if "CUDA error" in reason:  # nothing that this process asks of the GPU works any more
                raise
        self.free()

    def earlier(self) -> list[dict[str, Any]]:
        """The rows of this run up to now, of all parts."""
        return self.rows.read() if self.rows else []

    def _write(self, row: dict[str, Any]) -> None:
        if self.rows:
            self.rows.add(row)

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def seconds(self, run: Callable[[], Any], warm_up: int, number: int) -> float:
        """Median of `number` calls, each between two events of the device."""
        for _ in range(warm_up):
            run()
        return statistics.median(
            self._events(run, number) if self.device.type == "cuda" else clock(run, number)
        )

    def _events(self, run: Callable[[], Any], number: int) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in zip(marks, marks[1:], strict=False)]


def clock(run: Callable[[], Any], number: int) -> list[float]:
    """Seconds of each call, on a CPU."""
    times = []
    for _ in range(number):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return times


def start_part(doc: str | None, parts: dict[str, Callable[[Session], None]], argv: Sequence[str]) -> None:
    """Runs parts of a script by their names: SCRIPT PART[,PART] [--rehearse] [--rows FILE] [--seconds N]."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", help=f"of {', '.join(parts)}; commas between them")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--rows", type=Path, help="JSON lines are appended here")
    parser.add_argument("--run", default="", help="what they are marked with")
    parser.add_argument("--seconds", type=float, default=600.0, help="that this part may take")
    options = parser.parse_args(argv)
    end = time.perf_counter() + options.seconds
    torch.manual_seed(0)
    rows = Rows(options.rows, options.run) if options.rows else None
    for name in options.parts.split(","):
        parts[name](Session(name, rows, end - time.perf_counter(), options.rehearse))
