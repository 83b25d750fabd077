"""What a block keeps for its backward pass in each mode of checkpointing: measured, stated, planned.

    .venv/bin/python benchmarks/saved_activations.py [--dim 384] [--rounds 7]

In units of T d: tokens x width numbers of the compute dtype. On a CPU every storage that is alive after a
forward pass counts, on a GPU what the allocator holds; a block is the difference of four and two. The time
is of a forward and a backward pass, interleaved medians, relative to mode "none". Ends with 1 where a count
is off by more than 1 % (on a GPU, 5 %).
"""

import dataclasses
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from benchmarks.results_file import parser_of, record
from config import ActivationCheckpoint, Model
from models.initialization import init_weights
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.degrees import Degrees
from planning.architecture import vit_architecture
from planning.memory import block_activations, unit_bytes
from planning.workload import Workload
from tests.formulas import stated_units
from tests.storages import Storages

GRID, EVERY_N = (32, 32), 2
MODES = ("none", "selective", "full", "every_n_blocks")
TOLERANCE = {"cpu": 0.01, "cuda": 0.05}


@dataclass(frozen=True)
class Case:
    """A model of blocks of one width, and how it is run."""

    dim: int
    batch: int
    mode: str
    dtype: str = "bfloat16"  # under autocast; float32 without
    backend: str = "sdpa"
    compiled: bool = False

    @property
    def heads(self) -> int:
        return self.dim // 64

    @property
    def tokens(self) -> int:
        return GRID[0] * GRID[1]

    @property
    def workload(self) -> Workload:
        model = vit_architecture(GRID, (1, 1), 2, 2, self.dim, 2, self.heads)
        kind = {"dtype": self.dtype, "ac_mode": self.mode, "every_n": EVERY_N, "attention": self.backend}
        return Workload(model, Degrees(), self.batch, self.batch, **kind)

    @property
    def stated(self) -> float:
        """Of the docs."""
        scores = self.tokens / 64 if self.backend == "math" else 0.0
        return stated_units(self.mode, every_n_blocks=EVERY_N, scores=scores)

    @property
    def planned(self) -> float:
        return block_activations(self.workload, self.mode) / unit_bytes(self.workload)


class Blocks:
    """A model of `layers` blocks on a device, and one batch for it."""

    def __init__(self, case: Case, layers: int, device: torch.device) -> None:
        shape = Model("vit", (1, 1), case.dim, layers, case.heads, attention_backend=case.backend)  # type: ignore[arg-type]
        self.model = VisionTransformer(2, 2, GRID, shape)
        init_weights(self.model, 0)
        self.model.to(device)
        settings = ActivationCheckpoint(case.mode, EVERY_N)  # type: ignore[arg-type]
        apply_activation_checkpoint(self.model, settings, compiled=case.compiled)
        if case.compiled:
            apply_compile(self.model)
        self.x = torch.randn(case.batch, case.tokens, 2, device=device)
        self.device = device
        half = case.dtype == "bfloat16"
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=half)

    def loss(self) -> Tensor:
        with self.autocast:
            return self.model(self.x).float().square().mean()

    def alive(self) -> int:
        """Bytes kept from a forward pass without parameters; on a GPU with what else depends on them."""
        if self.device.type == "cuda":
            self.loss().backward()  # compiles, and makes the gradients
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = self.loss()
            held = torch.cuda.memory_allocated() - before
            del loss
            return held
        with Storages() as storages:
            loss = self.loss()
        held = storages.live_bytes(self.model)
        del loss
        return held

    def seconds(self) -> float:
        """Of a forward and a backward pass."""
        started = time.perf_counter()
        self.loss().backward()
        self.model.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started


def units(case: Case, device: torch.device) -> float:
    """Kept by one block, in T d numbers of the compute dtype.

    On a GPU of the difference between two batches: autocast's copies of weights, which the allocator cannot
    tell apart, do not depend on it.
    """
    torch._dynamo.reset()
    found = block_bytes(case, device)
    if device.type == "cuda":
        found = block_bytes(dataclasses.replace(case, batch=2 * case.batch), device) - found
    return found / unit_bytes(case.workload)


def block_bytes(case: Case, device: torch.device) -> float:
    four, two = (Blocks(case, layers, device).alive() for layers in (4, 2))
    return (four - two) / 2


def overheads(cases: list[Case], rounds: int, device: torch.device) -> list[float]:
    """Time of each case over that of the first, less 1; medians of interleaved rounds after a warm-up."""
    torch._dynamo.reset()
    blocks = [Blocks(case, 4, device) for case in cases]
    times: list[list[float]] = [[] for _ in blocks]
    for number in range(-1, rounds):
        for found, block in zip(times, blocks, strict=True):
            seconds = block.seconds()
            if number >= 0:
                found.append(seconds)
    ratios = [[t / first for t, first in zip(found, times[0], strict=True)] for found in times]
    return [statistics.median(found) - 1 for found in ratios]


def eager_cases(dim: int, batch: int) -> list[list[Case]]:
    """In groups whose first is mode "none"."""
    kinds = [("bfloat16", "sdpa"), ("float32", "sdpa"), ("bfloat16", "math")]
    return [[Case(dim, batch, mode, *kind) for mode in MODES] for kind in kinds]


def compiled_cases(dim: int, batch: int) -> list[Case]:
    """What the compiler makes of it: for a GPU, where all of a block can be counted."""
    return [Case(dim, batch, mode, compiled=True) for mode in ("none", "selective", "full")]


def rows_of(cases: list[Case], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """One row a case."""
    slower = overheads(cases, rounds, device)
    rows = []
    for case, overhead in zip(cases, slower, strict=True):
        found, stated = units(case, device), case.stated
        row = {"mode": case.mode, "dtype": case.dtype, "backend": case.backend, "compiled": case.compiled}
        row |= {"device": device.type, "dim": case.dim, "tokens": case.tokens, "batch": case.batch}
        row |= {"units": found, "stated": stated, "planned": case.planned, "slower": overhead}
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    head = f"{'units of T d':>13}{'stated':>9}{'planned':>9}{'slower':>9}"
    lines = [f"{'mode':<16}{'dtype':<10}{'attention':<11}{head}"]
    for row in rows:
        stated, mode = f"{row['stated']:>9.2f}", row["mode"]
        kind = row["backend"] + (", c." if row["compiled"] else "")
        numbers = f"{row['units']:>13.2f}{stated}{row['planned']:>9.2f}{row['slower']:>+9.1%}"
        lines.append(f"{mode:<16}{row['dtype']:<10}{kind:<11}{numbers}")
    return "\n".join(lines)


def off(row: dict[str, Any]) -> bool:
    """Whether what was stated or planned is not what was measured."""
    if row["stated"] is None:
        return False
    errors = [abs(row[name] / row["units"] - 1) for name in ("stated", "planned")]
    return max(errors) > TOLERANCE[row["device"]]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    groups = eager_cases(options.dim, options.batch)
    groups += [compiled_cases(options.dim, options.batch)] if device.type == "cuda" else []
    rows = [row for group in groups for row in rows_of(group, options.rounds, device)]
    record("saved_activations", rows)
    print(table(rows))
    wrong = sum(map(off, rows))
    print(f"\n{wrong} of {len(rows)} counts off by more than {TOLERANCE[device.type]:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
