"""Steps that must not be taken: judged on the device, skipped by all ranks alike, and counted.

A step is bad when its loss or gradient is not finite, or (`training.spike_threshold`) when its loss lies far
above those before it. The host learns of it on logging and saving steps only, when it waits for the device
anyhow.
"""

import logging
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from config import Training
from errors import RunFailed
from training.due import Rollouts

logger = logging.getLogger(__name__)
WINDOW = 100  # steps that bad ones are counted in, and losses that a spike is measured against
MOST_SKIPPED = 10  # of them; with one more the run goes back to its last good checkpoint
ENOUGH = 20  # losses that a median of them means something
TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation


class TrainingDiverged(RunFailed):
    """Skipping and going back did not help; the message says where, on which ranks, what is left."""


class BadSteps:
    """Judges steps. Every rank judges the same global numbers, so that all of them skip alike."""

    def __init__(self, training: Training, device: torch.device, dp: int = 1) -> None:
        """dp: ranks that have samples of their own, of all those that have a part of the loss."""
        self.spike_threshold, self.rollouts, self.dp = training.spike_threshold, Rollouts.of(training), dp
        # Part of the window's name in a checkpoint: a window of losses with other settings is not loaded.
        settings = [training.loss, training.variable_weights, training.weight_by_change, training.members]
        settings += [training.rollout_steps]
        settings += [training.steps] * (len(training.rollout_steps) > 1)  # which gives the stages' borders
        self.settings = f"{crc32(repr(settings).encode()):08x}"
        self.losses = torch.full((WINDOW,), torch.nan, device=device)  # of good steps, the oldest overwritten
        self.bad = torch.zeros(WINDOW, dtype=torch.bool, device=device)
        self.seen_here = torch.zeros((), dtype=torch.int64, device=device)  # losses of this rank not finite
        self.total = torch.zeros((), dtype=torch.int64, device=device)
        # Up to the last look: how many, what is known of them, the first of the last 100, the newest of all.
        self.skipped, self.diagnosis, self.first, self.now = 0, "", 0, False

    @property
    def window(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that later steps are judged by."""
        return {f"losses.{self.settings}": self.losses, "bad": self.bad}

    def judge(self, step: int, loss: Tensor, grad_norm: Tensor, overflow_is_normal: bool) -> Tensor:
        """Return whether a step is bad, a bool on the device; loss: this rank's, grad_norm: of all ranks.

        A loss that is not finite on one rank makes the gradient norm so on all. In fp16 a gradient may
        overflow: that is what its scaler is there for.
        """
        self.seen_here += ~torch.isfinite(loss)
        if self.spike_threshold or overflow_is_normal:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.dp  # the mean on any layout: another one may go on from here
        bad = ~torch.isfinite(loss) if overflow_is_normal else ~torch.isfinite(grad_norm)
        if self.spike_threshold:
            if self.rollouts.begins_stage(step):
                self.losses.fill_(torch.nan)  # of shorter rollouts, which are lower
            bad |= loss > self._ceiling()
            self.losses[step % WINDOW] = torch.where(bad, torch.nan, loss)
        self.bad[step % WINDOW] = bad
        self.total += bad
        return bad

    def _ceiling(self) -> Tensor:
        """The loss from which on a step counts as a spike; infinite while there are few losses."""
        median = self.losses.nanmedian()
        deviation = TO_SIGMA * (self.losses - median).abs().nanmedian()
        enough = self.losses.isfinite().sum() >= ENOUGH
        return torch.where(enough, median + self.spike_threshold * deviation, torch.inf)

    def too_many(self, step: int, last: bool = False) -> bool:
        """Return whether more of the last 100 steps were skipped than allowed, or the very last step was.

        Waits for the device, and asks all ranks, so that they continue alike.
        """
        mine = torch.cat([torch.stack([self.total, self.seen_here]), self.bad.long()])
        counts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, mine)
        together = torch.stack(counts).cpu()  # (ranks, 2 + WINDOW)
        total, bad = int(together[:, 0].max()), together[:, 2:].any(0).tolist()
        recent = [s for s in range(max(step - WINDOW, 0) + 1, step + 1) if bad[s % WINDOW]]
        self.first, self.now = min(recent, default=step + 1), bad[step % WINDOW]
        if total > self.skipped:
            ranks = together[:, 1].nonzero().flatten().tolist()
            where = f"; losses that are not finite on ranks {ranks}" if ranks else ""
            window = f"{len(recent)} of the last {min(step, WINDOW)} steps up to step {step}"
            self.diagnosis = f"{window} were bad, the first at {self.first}{where}"
            logger.warning(f"{total - self.skipped} steps skipped: {self.diagnosis}")
        self.skipped = total
        if len(recent) > MOST_SKIPPED:
            return True
        self.first = step + 1  # earlier ones that were skipped are no reason to go back before them
        while self.first - 1 in recent:
            self.first -= 1
        return last and self.now

    def reset(self) -> None:
        """Start counting from zero, after a rollback."""
        self.bad.zero_()
        self.seen_here.zero_()
        self.losses.fill_(torch.nan)
        self.now = False


def step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's step, unless it is bad: its fused kernel looks for itself, on the device.

    Where parameters are offloaded the host waits for the answer: torch's own copy would not be waited for.
    """
    owned = (p.device for group in optimizer.param_groups for p in group["params"])
    flag = bad.float().to(next(owned, bad.device))
    optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's name, for its GradScaler
    optimizer.step()
