"""The time that a save costs the steps after it: excess wall time of ten steps, against plain dcp.async_save.

    .venv/bin/python benchmarks/checkpoint_stall.py [--rounds 7] [--dim 768] [--folder DIR]

One process trains a ViT on one thread; the second core is free for the writer, as host cores are on a GPU
node. Rounds alternate: ten steps without a save, then for each mode a save and ten steps. A mode's excess
is the time of its save and ten steps beyond that of the ten steps without one in the same round; medians of
all rounds. The floor is one copy of the state into host memory that is in place already. Ends with 1 when the
excess of "async_with_pinned_mem" is above 0.35 x that of plain dcp.async_save.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from benchmarks.random_run import RandomRun
from benchmarks.results_file import parser_of, record
from checkpoints.checkpointer import Checkpointer
from command_line import text_table
from config import Checkpoint, Config, Model, Optimizer
from config import Training as TrainingSection
from parallelisms.mesh import start_ranks

STEPS = 10
PLAIN = "plain dcp.async_save"
OURS = ("disabled", "async", "async_with_pinned_mem")
MODES = (PLAIN, *OURS)


class Training(RandomRun):
    """A ViT of `dim` on 32 x 64 fields in 8 x 8 patches, two samples a step."""

    def __init__(self, dim: int, device: torch.device) -> None:
        model = Model(patch_size=(8, 8), dim=dim, num_layers=12, num_heads=dim // 64)
        config = Config(
            model=model, optimizer=Optimizer(lr=1e-4), training=TrainingSection(local_batch_size=2)
        )
        super().__init__(config, (32, 64), 5, device)

    def step_before(self, wait_for_staging: Callable[[], None]) -> None:
        """A step that gives a save time for its copies."""
        self.run.checkpointer = SimpleNamespace(wait_for_staging=wait_for_staging)  # type: ignore[assignment]
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def ten_steps(self, save: Callable[[], None], wait_for_staging: Callable[[], None]) -> float:
        """Seconds of a save and the ten steps after it."""
        started = time.perf_counter()
        save()
        for _ in range(STEPS):
            self.step_before(wait_for_staging)
        return time.perf_counter() - started


def measure(training: Training, folder: Path, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Seconds of ten steps without a save (""), and with one in each mode, round by round."""
    checkpointers = {
        m: Checkpointer(folder / m, Checkpoint(async_mode=m, keep_latest_k=1), "", {}) for m in OURS
    }
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))
    seconds: dict[str, list[float]] = {mode: [] for mode in ("", *MODES)}
    for number in range(-1, rounds):  # the first round only warms up
        for mode in ("", *MODES):
            step, state, pending = training.state.progress.step, training.state.state_dict(), []
            plain = folder / f"plain-{step}"
            if mode == PLAIN:
                writer = FileSystemWriter(str(plain), sync_files=True)
                start: Any = partial(state_dict_saver.async_save, storage_writer=writer, process_group=group)
                taken = training.ten_steps(lambda: pending.append(start(state)), lambda: None)  # noqa: B023
                pending[0].result()
                shutil.rmtree(plain)
            elif mode:
                own = checkpointers[mode]
                taken = training.ten_steps(partial(own.save, step, state), own.wait_for_staging)
                own.wait()
            else:
                taken = training.ten_steps(lambda: None, lambda: None)
            if number >= 0:
                seconds[mode].append(taken)
    for checkpointer in checkpointers.values():
        assert not checkpointer.last_error
        checkpointer.close()
    return seconds


def floor(training: Training) -> tuple[float, int]:
    """Seconds of one copy of the state into pages that are there, and its bytes."""
    state = training.state.state_dict()
    tensors = list(state.values())
    pinned = tensors[0].is_cuda
    copies = [torch.zeros_like(tensor, device="cpu", pin_memory=pinned) for tensor in tensors]
    times = []
    for _ in range(5):
        started = time.perf_counter()
        torch._foreach_copy_(copies, tensors)  # type: ignore[reportPrivateImportUsage]
        times.append(time.perf_counter() - started)
    return statistics.median(times), sum(tensor.nbytes for tensor in tensors)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--folder", default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    device = start_ranks(600)
    torch.manual_seed(0)
    training = Training(options.dim, device)
    for _ in range(3):
        training.step()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = measure(training, Path(folder), options.rounds, device)
    copy_seconds, size = floor(training)
    base = seconds.pop("")
    pairs = {mode: zip(times, base, strict=True) for mode, times in seconds.items()}
    excess = {mode: statistics.median(t - b for t, b in found) for mode, found in pairs.items()}
    dist.destroy_process_group()
    return report(excess, statistics.median(base) / STEPS, copy_seconds, size, options.rounds)


def report(excess: dict[str, float], step: float, copy: float, size: int, rounds: int) -> int:
    row = {"bytes": size, "step_seconds": step, "floor_seconds": copy, "excess_seconds": excess}
    record("checkpoint_stall", [row | {"rounds": rounds}])
    print(f"state {size / 2**20:.0f} MiB, step {step:.3f} s, medians of {rounds} rounds\n")
    lines: list[tuple] = [("", "excess over 10 steps (s)", "x plain", "x floor")]
    for mode, value in (excess | {"floor: one copy": copy}).items():
        lines.append((mode, value, value / excess[PLAIN], value / copy))
    print(text_table("<24 >26.3f >10.2f >10.2f", lines))
    return int(excess["async_with_pinned_mem"] > 0.35 * excess[PLAIN])


if __name__ == "__main__":
    sys.exit(main())
