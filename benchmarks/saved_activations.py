"""What a block keeps for its backward pass in each mode of checkpointing: measured, and as planned.

    .venv/bin/python benchmarks/saved_activations.py [--dim 384]

In units of T d: tokens x width numbers of the compute dtype. On a CPU every storage that is alive after a
forward pass counts, on a GPU what the allocator holds; a block is the difference of four and two. Ends with 1
where a count is off by more than 1 % (on a GPU, 5 %).
"""

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from benchmarks.results_file import parse, record, require, table
from config import ActivationCheckpoint, Model
from models.initialization import init_weights
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile
from parallelisms.degrees import Degrees
from planning.architecture import architecture_of
from planning.memory import block_activations, unit_bytes
from planning.workload import Workload
from tests.storages import Storages

GRID, EVERY_N = (32, 32), 2
MODES = ("none", "selective", "full", "every_n_blocks")
TOLERANCE = {"cpu": 0.01, "cuda": 0.05}


@dataclass(frozen=True)
class Case:
    dim: int
    batch: int
    mode: Any
    dtype: str = "bfloat16"  # under autocast; float32 without
    backend: Any = "sdpa"
    compiled: bool = False
    tokens = GRID[0] * GRID[1]

    @property
    def workload(self) -> Workload:
        model = architecture_of(Model("vit", (1, 1), self.dim, 2, self.dim // 64), GRID, 2, 2)
        kind = {"dtype": self.dtype, "ac_mode": self.mode, "every_n": EVERY_N, "attention": self.backend}
        return Workload(model, Degrees(), self.batch, self.batch, **kind)

    @property
    def planned(self) -> float:
        return block_activations(self.workload, self.mode) / unit_bytes(self.workload)


class Blocks:
    """A model of `layers` blocks on a device, and one batch for it."""

    def __init__(self, case: Case, layers: int, device: torch.device) -> None:
        shape = Model("vit", (1, 1), case.dim, layers, case.dim // 64, attention_backend=case.backend)
        self.model = VisionTransformer(2, 2, GRID, shape)
        init_weights(self.model, 0)
        self.model.to(device)
        settings = ActivationCheckpoint(case.mode, EVERY_N)
        apply_activation_checkpoint(self.model, settings, compiled=case.compiled)
        if case.compiled:
            apply_compile(self.model)
        self.x = torch.randn(case.batch, case.tokens, 2, device=device)
        self.device = device
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bfloat16")

    def loss(self) -> Tensor:
        with self.autocast:
            return self.model(self.x).float().square().mean()

    def alive(self) -> int:
        """Bytes kept from a forward pass without parameters; on a GPU with what else depends on them."""
        if self.device.type == "cuda":
            self.loss().backward()  # compiles, and makes the gradients
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            loss = self.loss()  # kept alive until its bytes are counted
            return torch.cuda.memory_allocated() - before
        with Storages() as storages:
            loss = self.loss()  # noqa: F841
        return storages.live_bytes(self.model)


def units(case: Case, device: torch.device) -> float:
    """Return what a block keeps, in T d numbers of the compute dtype: half of what four keep beyond two.

    On a GPU of the difference between two batches: autocast's copies of weights, which the allocator cannot
    tell apart, do not depend on it.
    """
    torch._dynamo.reset()
    cases = [*([replace(case, batch=2 * case.batch)] if device.type == "cuda" else []), case]
    found = [(Blocks(c, 4, device).alive() - Blocks(c, 2, device).alive()) / 2 for c in cases]
    return (found[0] - sum(found[1:])) / unit_bytes(case.workload)


def main() -> int:
    options = parse(__doc__, dim=384)
    require(options.dim, 64, "features, of which a head has 64")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = (("bfloat16", "sdpa"), ("float32", "sdpa"), ("bfloat16", "math"))
    cases = [Case(options.dim, 1, mode, *kind) for kind in kinds for mode in MODES]
    if device.type == "cuda":  # where all of a block can be counted, what the compiler makes of it
        cases += [Case(options.dim, 1, mode, compiled=True) for mode in MODES[:3]]
    rows = []
    for case in cases:
        numbers = {"units": units(case, device), "planned": case.planned}
        rows.append(asdict(case) | {"device": device.type, "tokens": case.tokens} | numbers)
    record("saved_activations", rows)
    columns = {"mode": "<16", "dtype": "<10", "backend": "<9", "compiled": ">9", "units": ">7.2f"}
    print(table(rows, **columns, planned=">9.2f"))
    limit = TOLERANCE[device.type]
    wrong = sum(abs(row["planned"] / row["units"] - 1) > limit for row in rows)
    print(f"\n{wrong} of {len(rows)} counts off by more than {limit:.0%}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
