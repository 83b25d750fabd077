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

from benchmarks.results_file import parser_of, record, require
from command_line import text_table
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
    tokens = GRID[0] * GRID[1]

    @property
    def workload(self) -> Workload:
        model = vit_architecture(GRID, (1, 1), 2, 2, self.dim, 2, self.dim // 64)
        kind = {"dtype": self.dtype, "ac_mode": self.mode, "every_n": EVERY_N, "attention": self.backend}
        return Workload(model, Degrees(), self.batch, self.batch, **kind)

    @property
    def stated(self) -> float:
        """Units of the docs."""
        scores = self.tokens / 64 if self.backend == "math" else 0.0
        return stated_units(self.mode, every_n_blocks=EVERY_N, scores=scores)

    @property
    def planned(self) -> float:
        return block_activations(self.workload, self.mode) / unit_bytes(self.workload)


class Blocks:
    """A model of `layers` blocks on a device, and one batch for it."""

    def __init__(self, case: Case, layers: int, device: torch.device) -> None:
        shape = Model("vit", (1, 1), case.dim, layers, case.dim // 64, attention_backend=case.backend)  # type: ignore[arg-type]
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
    """Return what a block keeps, in T d numbers of the compute dtype: half of what four keep beyond two.

    On a GPU of the difference between two batches: autocast's copies of weights, which the allocator cannot
    tell apart, do not depend on it.
    """
    torch._dynamo.reset()
    cases = [case]
    if device.type == "cuda":
        cases.insert(0, dataclasses.replace(case, batch=2 * case.batch))
    found = [(Blocks(c, 4, device).alive() - Blocks(c, 2, device).alive()) / 2 for c in cases]
    return (found[0] - sum(found[1:])) / unit_bytes(case.workload)


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


def rows_of(cases: list[Case], rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Measure cases, of which the first has mode "none"."""
    rows = []
    for case, slower in zip(cases, overheads(cases, rounds, device), strict=True):
        row = dataclasses.asdict(case) | {"device": device.type, "tokens": case.tokens, "slower": slower}
        rows.append(row | {"units": units(case, device), "stated": case.stated, "planned": case.planned})
    return rows


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    require(options.dim, 64, "features, of which a head has 64")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = (("bfloat16", "sdpa"), ("float32", "sdpa"), ("bfloat16", "math"))
    groups = [[Case(options.dim, options.batch, mode, *kind) for mode in MODES] for kind in kinds]
    if device.type == "cuda":  # where all of a block can be counted, what the compiler makes of it
        groups.append([Case(options.dim, options.batch, mode, compiled=True) for mode in MODES[:3]])
    rows = [row for group in groups for row in rows_of(group, options.rounds, device)]
    record("saved_activations", rows)
    lines: list[tuple] = [("mode", "dtype", "attention", "units of T d", "stated", "planned", "slower")]
    for row in rows:
        kind = row["backend"] + (", c." if row["compiled"] else "")
        numbers = (row["units"], row["stated"], row["planned"], row["slower"])
        lines.append((row["mode"], row["dtype"], kind, *numbers))
    print(text_table("<16 <10 <11 >13.2f >9.2f >9.2f >+9.1%", lines))
    limit, wrong = TOLERANCE[device.type], 0
    for row in rows:
        wrong += max(abs(row[name] / row["units"] - 1) for name in ("stated", "planned")) > limit
    print(f"\n{wrong} of {len(rows)} counts off by more than {limit:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
