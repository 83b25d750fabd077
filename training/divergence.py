"""Notices numbers that are not finite without waiting for the device, and stops all ranks together."""

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint import Checkpointer


class TrainingDiverged(RuntimeError):
    """Loss or gradient is no longer finite; the message says between which steps, where, what is left."""


class FiniteWatch:
    """Counts bad steps on the device; `check`, on logging and saving steps, reads every rank's count."""

    def __init__(self, step: int, device: torch.device) -> None:
        self.checked_step = step
        self.bad_steps = torch.zeros((), dtype=torch.int64, device=device)

    def see(self, *values: Tensor) -> None:
        """Loss and gradient norm of one step, still on the device."""
        for value in values:
            self.bad_steps += ~torch.isfinite(value)

    def check(self, step: int, checkpointer: Checkpointer | None) -> None:
        """Raises TrainingDiverged on every rank when one rank saw something since the last check."""
        counts = [torch.zeros_like(self.bad_steps) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, self.bad_steps)
        ranks = [rank for rank, count in enumerate(counts) if count]
        if ranks:
            good = checkpointer.newest_folder() if checkpointer else None
            raise TrainingDiverged(
                f"loss or gradient became non-finite between steps {self.checked_step + 1} and {step} "
                f"on ranks {ranks}; last good checkpoint: {good or 'none'}; "
                "lower optimizer.lr, raise lr_scheduler.warmup_steps, or look at the data of those steps"
            )
        self.checked_step = step
