"""The planner against reality on this machine: time, saved activations, and bytes between ranks.

    .venv/bin/python benchmarks/planner_accuracy.py [--rounds 7] [--seconds 40]

1. calibrates on the shapes of two models (widths 256 and 512);
2. predicts and measures, interleaved, medians, 14 configurations that were not calibrated: a step is forward,
   loss, backward, clipping and AdamW, without reading data; on a GPU the allocator's peak too;
3. counts the bytes that autograd keeps, storage by storage, against planning/memory.py;
4. counts collectives and their bytes on 2 and 4 gloo ranks against tests/collective_formulas.py.

Ends with 1 when fewer than 5 of 6 steps are within 10 %, or a count is off.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor

from benchmarks.layout_parity import layout_workload
from benchmarks.random_run import RandomRun
from benchmarks.results_file import record
from config import ActivationCheckpoint, Config, Model, Training
from parallelisms.degrees import Degrees
from parallelisms.mesh import start_ranks
from planning.architecture import Architecture, vit_architecture
from planning.calibrate import BlockShape, calibrate
from planning.clusters import load_cluster
from planning.hardware import Cluster
from planning.memory import memory, stored_bytes
from planning.step_time import step_time
from planning.workload import Workload
from tests.collective_formulas import step_collectives
from tests.distributed import Ranks
from tests.parity import TABLE, three_steps
from tests.storages import bytes_alive
from training.process_settings import retain_memory

GRID = (64, 128)
CHANNELS = 20
LAYOUTS = ("ddp 2", "fsdp 2", "fsdp 2 x tp 2", "fsdp 2 x ulysses 2", "pp 2, 1f1b")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """What is varied; the rest is the NERSC tutorial's task: 20 channels on 64 x 128."""

    dim: int
    layers: int
    heads: int
    patch: tuple[int, int]
    batch: int
    dtype: str = "float32"
    backend: str = "math"
    mode: str = "none"

    @property
    def architecture(self) -> Architecture:
        return vit_architecture(GRID, self.patch, CHANNELS, CHANNELS, self.dim, self.layers, self.heads)

    @property
    def label(self) -> str:
        shape = f"d {self.dim} x {self.layers}, {self.heads} heads, {self.architecture.tokens} tokens"
        return f"{shape}, batch {self.batch}, {self.dtype}, {self.backend}, {self.mode}"

    @property
    def workload(self) -> Workload:
        values = CHANNELS * GRID[0] * GRID[1]
        return Workload(
            self.architecture,
            Degrees(),
            self.batch,
            self.batch,
            dtype=self.dtype,
            field_values=values,
            input_values=values,
            ac_mode=self.mode,
            every_n=2,
            attention=self.backend,
        )


CALIBRATED = [Case(256, 6, 4, (8, 8), 8), Case(512, 6, 8, (8, 8), 8), Case(512, 4, 8, (4, 4), 4)]
UNSEEN = [
    Case(384, 6, 8, (8, 8), 8),
    Case(384, 12, 8, (8, 8), 16),
    Case(384, 6, 6, (8, 8), 8, backend="sdpa"),
    Case(384, 6, 8, (8, 8), 16, mode="full"),
    Case(384, 6, 8, (8, 8), 16, mode="selective"),
    Case(384, 6, 8, (8, 8), 8, mode="every_n_blocks"),
    Case(640, 4, 10, (8, 8), 4),
    Case(320, 8, 5, (4, 8), 4, backend="sdpa"),
    Case(384, 4, 8, (4, 4), 4, backend="sdpa"),
    Case(384, 6, 8, (8, 8), 8, "bfloat16"),
    Case(640, 4, 10, (8, 8), 8, "bfloat16"),
    Case(384, 12, 8, (8, 8), 16, "bfloat16"),
    Case(384, 4, 8, (4, 4), 4, "bfloat16", "sdpa"),
    Case(448, 6, 7, (8, 8), 12, "bfloat16", mode="full"),
]


class Step(RandomRun):
    """train.py's step on a batch that is there."""

    def __init__(self, case: Case) -> None:
        self.case = case
        config = Config(
            model=Model(
                patch_size=case.patch,
                dim=case.dim,
                num_layers=case.layers,
                num_heads=case.heads,
                attention_backend=case.backend,  # type: ignore[arg-type]
            ),
            training=Training(
                local_batch_size=case.batch,
                mixed_precision_param=case.dtype,  # type: ignore[arg-type]
            ),
            activation_checkpoint=ActivationCheckpoint(case.mode, every_n_blocks=2),  # type: ignore[arg-type]
        )
        super().__init__(config, GRID, CHANNELS, DEVICE)

    def forward_loss(self) -> Tensor:
        """The loss of the batch, whose backward has not run."""
        inputs, targets = self.objective.cut(*self.batches[0])
        with self.model.recipe.autocast(self.model.device):
            output = self.model.parts[0](inputs)
        return self.objective.loss_part(output, targets)

    def seconds(self) -> float:
        synchronize()
        started = time.perf_counter()
        self.step()
        synchronize()
        return time.perf_counter() - started


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    retain_memory(DEVICE)  # as train.py does
    start_ranks(600)
    blocks = [BlockShape(c.batch, c.architecture.tokens, c.dim, c.heads, 4 * c.dim) for c in CALIBRATED]
    rates = calibrate(blocks, ("math", "sdpa"), DEVICE, torch.get_num_threads(), seconds=options.seconds)
    cluster = load_cluster("cpu1" if DEVICE.type == "cpu" else "h200x1")
    cluster = dataclasses.replace(cluster, measured=rates)
    steps = [Step(case) for case in UNSEEN]
    measured = measure(steps, options.rounds)
    rows = [judge(case, predict(case, cluster), found) for case, found in measured.items()]
    counts = [*map(count_saved, UNSEEN), *count_collectives()]
    counts += [count_peak(step) for step in steps] if DEVICE.type == "cuda" else []
    record("planner_accuracy", [row | {"noise": rates.noise} for row in rows + counts])
    print(time_table(rows), count_table(counts), sep="\n\n")
    errors = sorted(abs(row["error"]) for row in rows)
    within, good = sum(error <= 0.10 for error in errors), sum(row["good"] for row in counts)
    print(
        f"\nstep time: {within} of {len(rows)} within 10 %, mean error {statistics.mean(errors):.1%}, "
        f"worst {errors[-1]:.1%}; counts: {good} of {len(counts)} as stated"
    )
    return 0 if within >= 5 * len(rows) / 6 and good == len(counts) else 1


def predict(case: Case, cluster: Cluster) -> float:
    """Seconds of a step whose data are there."""
    return step_time(case.workload, cluster).total


def measure(steps: list[Step], rounds: int) -> dict[Case, float]:
    """Medians; in every round each case steps once, after one more that warms caches up."""
    times: dict[Case, list[float]] = {step.case: [] for step in steps}
    for _ in range(rounds):
        for step in steps:
            step.step()
            times[step.case].append(step.seconds())
    return {case: statistics.median(found) for case, found in times.items()}


def judge(case: Case, predicted: float, measured: float) -> dict[str, Any]:
    row = {"kind": "time", "what": case.label, "predicted": predicted, "measured": measured}
    return row | {"error": predicted / measured - 1}


# -- what autograd keeps


def count_saved(case: Case) -> dict[str, Any]:
    """Bytes of all storages that autograd keeps of two blocks: what two more blocks add."""
    short, long = (saved_bytes(dataclasses.replace(case, layers=layers)) for layers in (2, 4))
    predicted = stored_bytes(dataclasses.replace(case, layers=2).workload)
    return counted(f"saved by two blocks: {case.label}", predicted, long - short, 0.01)


def saved_bytes(case: Case) -> int:
    """Of a forward pass, without parameters and the copies that autocast makes of them."""
    step, kept = Step(case), {}
    if case.mode == "selective":  # what its policy keeps, no hook of autograd sees
        inputs, *_ = step.objective.cut(*step.batches[0])
        return bytes_alive(step.model.parts[0], inputs, autocast=False)
    parameters = step.model.parameters.values()
    weights = {tuple(p.shape) for p in parameters} | {tuple(p.t().shape) for p in parameters if p.ndim == 2}

    def keep(tensor: Tensor) -> Tensor:
        if tuple(tensor.shape) not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = step.forward_loss()
    del loss
    return sum(kept.values())


def count_peak(step: Step) -> dict[str, Any]:
    """The allocator's peak of a step on a GPU."""
    work = step.case.workload
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step.step()
    own = torch.cuda.max_memory_allocated() - before + 4 * 3 * work.model.parameters + step.fields.nbytes
    return counted(f"peak: {step.case.label}", memory(work).peak, own, 0.02)


def counted(what: str, predicted: float, found: float, tolerance: float) -> dict[str, Any]:
    error = predicted / found - 1 if found else float(predicted != found)
    row = {"kind": "count", "what": what, "predicted": predicted, "counted": found, "error": error}
    return row | {"good": abs(error) <= tolerance}


# -- what ranks send


def count_collectives() -> list[dict[str, Any]]:
    """Calls and bytes of a step's collectives on gloo ranks; to be equal, kind by kind and size by size."""
    groups = {world: Ranks(world) for world in sorted({TABLE[name].ranks for name in LAYOUTS})}
    rows = []
    for name in LAYOUTS:
        layout = TABLE[name]
        (outcome, *_) = groups[layout.ranks].run(three_steps, layout, timeout=300)
        found = Counter(outcome.collectives)
        expected = step_collectives(layout_workload(layout), loss=layout.loss)
        sums = [sum(call.size * number for call, number in calls.items()) for calls in (expected, found)]
        rows.append(counted(f"bytes sent: {name}", *sums, tolerance=0.0))
        rows[-1]["good"] = found == expected
    for group in groups.values():
        group.stop()
    return rows


# -- tables


def time_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'a step of':<58}{'predicted s':>12}{'measured s':>12}{'error':>9}"]
    for row in rows:
        numbers = f"{row['predicted']:>12.4f}{row['measured']:>12.4f}{row['error']:>+9.1%}"
        lines.append(f"{row['what']:<58}{numbers}")
    return "\n".join(lines)


def count_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'bytes':<80}{'stated':>14}{'counted':>14}{'error':>9}"]
    for row in rows:
        numbers = f"{row['predicted']:>14,.0f}{row['counted']:>14,.0f}{row['error']:>+9.2%}"
        lines.append(f"{row['what']:<80}{numbers}{'' if row['good'] else '  OFF'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
