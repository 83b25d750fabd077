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
        # At the last check, equal on all ranks:
        self.skipped, self.diagnosis = 0, ""  # steps since this start; description of the last ones
        self.first = 0  # of the bad steps that lead to a rollback
        self.now = False  # whether the last step is bad

    @property
    def window(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that are needed to judge later steps."""
        return {f"losses.{self.settings}": self.losses, "bad": self.bad}

    def judge(self, step: int, loss: Tensor, grad_norm: Tensor, may_overflow: Tensor | None = None) -> Tensor:
        """Return True for a bad step, as a bool on the device; loss: this rank's, grad_norm: of all ranks.

        If the loss of one rank is not finite, the gradient norm is not finite on all. may_overflow: whether
        gradients may overflow, which the loss scaler handles; None: not in fp16.
        """
        self.seen_here += ~torch.isfinite(loss)
        if self.spike_threshold or may_overflow is not None:
            loss = loss.clone()
            dist.all_reduce(loss)
            loss /= self.dp  # the mean, which is the same on any layout that may resume
        judged = grad_norm if may_overflow is None else torch.where(may_overflow, loss, grad_norm)
        bad = ~torch.isfinite(judged)
        if self.spike_threshold:
            if self.rollouts.begins_stage(step):
                self.losses.fill_(torch.nan)  # of shorter rollouts, which are lower
            # The loss above which a step counts as a spike is infinite while there are few losses.
            median = self.losses.nanmedian()
            deviation = TO_SIGMA * (self.losses - median).abs().nanmedian()
            is_known = self.losses.isfinite().sum() >= ENOUGH
            bad |= loss > torch.where(is_known, median + self.spike_threshold * deviation, torch.inf)
            self.losses[step % WINDOW] = torch.where(bad, torch.nan, loss)
        self.bad[step % WINDOW] = bad
        self.total += bad
        return bad

    def too_many(self, step: int, last: bool = False) -> bool:
        """Return True if too many of the last 100 steps were skipped, or the last step of the run was.

        Waits for the device and communicates with all ranks, so that they decide together.
        """
        # The counts of all ranks, on the host.
        counts = torch.cat([torch.stack([self.total, self.seen_here]), self.bad.long()])
        gathered = [torch.zeros_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, counts)
        table = torch.stack(gathered).cpu()  # (ranks, 2 + WINDOW)
        bad = table[:, 2:].any(0).tolist()
        recent = [s for s in range(max(step - WINDOW, 0) + 1, step + 1) if bad[s % WINDOW]]

        # What is new is logged, with the ranks that have seen it.
        total = int(table[:, 0].max())
        if total > self.skipped:
            ranks = table[:, 1].nonzero().flatten().tolist()
            where = f"; losses that are not finite on ranks {ranks}" if ranks else ""
            steps = f"{len(recent)} of the last {min(step, WINDOW)} steps up to step {step}"
            first = min(recent, default=step + 1)
            self.diagnosis = f"{steps} were bad, the first at {first}{where}"
            logger.warning(f"{total - self.skipped} steps skipped: {self.diagnosis}")
        self.skipped, self.now = total, bad[step % WINDOW]

        if len(recent) > MOST_SKIPPED:
            self.first = recent[0]
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
