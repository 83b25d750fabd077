"""Eight kinds of layouts; each has to load bit-exactly what every other has saved."""

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from checkpoints.checkpointer import Checkpointer
from config import Checkpoint
from tests.parity import Layout, SmallRun, cp, full, pp, replicate, tp
from training.run_folder import resume
from training.state import TrainState

STEPS, MORE = 2, 2  # before the save, and after it
KINDS: dict[str, Layout] = {
    "1 process, compile": Layout(1, compile="inductor"),
    "zero-1 2": Layout(2, replicate(data_parallel="zero1")),
    "fsdp 4, ac full": Layout(4, activation_checkpoint="full"),
    "hsdp 2 x 2": Layout(4, replicate(), accumulation=2),
    "fsdp 2 x tp 2": Layout(4, tp()),
    "fsdp 2 x ring 2, ac selective": Layout(4, cp("ring"), activation_checkpoint="selective"),
    "pp 2 x fsdp 2": Layout(4, pp()),
    "fsdp 2, float8 gathered": Layout(2, float8=True, float8_all_gather=True),
}


def whole(state: TrainState) -> dict[str, np.ndarray]:
    """Every tensor of a run, gathered over shards, stages and owners; the same on every rank."""
    mine = {name: full(tensor) for name, tensor in state.state_dict().items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: value for part in parts for name, value in part.items()}


def save(
    layout: Layout, folder: Path, mode: str, optimizer: str = "AdamW"
) -> tuple[dict[str, np.ndarray], list[float]]:
    """A run that saves after STEPS steps: all that was saved, and the losses of the steps after it."""
    small = SmallRun(layout, ema_decay=0.9, name=optimizer)
    state = small.state
    for step in range(STEPS):
        small.step(step)
    checkpointer = Checkpointer(folder, Checkpoint(async_mode=mode, keep_latest_k=1), "", layout.parallelism)  # type: ignore[arg-type]
    checkpointer.save(STEPS, state.state_dict())
    saved = whole(state)
    checkpointer.wait()
    checkpointer.close()
    return saved, [small.step(STEPS + more)[0] for more in range(MORE)]


def load(layout: Layout, folder: Path, optimizer: str = "AdamW") -> tuple[dict[str, np.ndarray], list[float]]:
    """What a run with other initial weights has after resuming, and its next losses."""
    small = SmallRun(layout, seed=1, ema_decay=0.9, name=optimizer)
    state = small.state
    checkpointer = Checkpointer(folder, Checkpoint(async_mode="disabled"), "", layout.parallelism)
    assert resume(checkpointer, state) and state.progress.step == STEPS
    checkpointer.close()
    return whole(state), [small.step(STEPS + more)[0] for more in range(MORE)]


def differences(saved: dict[str, np.ndarray], loaded: dict[str, np.ndarray]) -> list[str]:
    """Names of tensors that are not the same bits, or are on one side only."""
    common = saved.keys() & loaded.keys()
    unequal = [name for name in common if not np.array_equal(saved[name], loaded[name], equal_nan=True)]
    return sorted(unequal + list(saved.keys() ^ loaded.keys()))


def tolerance(saved: Layout, loaded: Layout) -> float:
    """Of the next losses, relative: float8's own rounding where only one of the two has it."""
    return 5e-3 if saved.float8 != loaded.float8 else max(saved.tolerance("loss"), loaded.tolerance("loss"))
