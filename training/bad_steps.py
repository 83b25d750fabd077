"""Bad steps: found on the device, skipped by all ranks together, and counted.

A step is bad if its loss or gradient is not finite, or (`training.spike_threshold`) if its loss is far above
previous losses. The host reads the result only on logging and saving steps, when it waits for the device
anyway.
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
WINDOW = 100  # steps in which bad ones are counted, and losses with which a spike is compared
MOST_SKIPPED = 10  # of these steps; with one more the run goes back to its last good checkpoint
ENOUGH = 20  # losses from which a median is computed
TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation


class TrainingDiverged(RunFailed):
    """Error of a run that still diverges after skipped steps and a rollback: steps, ranks, possible fixes."""


class BadSteps:
    """Detector of bad steps. All ranks check the same global numbers, so that they skip the same steps."""

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
        # At the last check: number, description, the first of the last 100, the newest of all.
        self.skipped, self.diagnosis, self.first, self.now = 0, "", 0, False

    @property
    def window(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that are needed to judge later steps."""
        return {f"losses.{self.settings}": self.losses, "bad": self.bad}

    def judge(self, step: int, loss: Tensor, grad_norm: Tensor, overflow_is_normal: bool) -> Tensor:
        """Return True for a bad step, as a bool on the device; loss: this rank's, grad_norm: of all ranks.

        If the loss of one rank is not finite, the gradient norm is not finite on all. In fp16 gradients may
        overflow, which the loss scaler handles.
        """
        self.seen_here += ~torch.isfinite(loss)
        if self.spike_threshold or overflow_is_normal:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.dp  # the mean, which is the same on any layout that may resume
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
        """Loss above which a step counts as a spike; infinite while there are few losses."""
        median = self.losses.nanmedian()
        deviation = TO_SIGMA * (self.losses - median).abs().nanmedian()
        enough = self.losses.isfinite().sum() >= ENOUGH
        return torch.where(enough, median + self.spike_threshold * deviation, torch.inf)

    def too_many(self, step: int, last: bool = False) -> bool:
        """Return True if too many of the last 100 steps were skipped, or the last step of the run was.

        Waits for the device and communicates with all ranks, so that they decide together.
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
        self.first = step + 1  # steps that were skipped earlier do not cause a rollback to before them
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
    """Take the optimiser's step, unless it is bad, which its fused kernel checks on the device.

    For offloaded parameters the host waits for the flag, because torch's own copy would not wait.
    """
    owned = (p.device for group in optimizer.param_groups for p in group["params"])
    flag = bad.float().to(next(owned, bad.device))
    optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's name, for its GradScaler
    optimizer.step()
