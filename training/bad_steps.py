"""Bad steps: found on the device, skipped by all ranks together, and counted.

A step is bad if its loss or gradient is not finite, or (`training.spike_threshold`) if its loss is far above
previous losses. The host reads the result only on logging and saving steps, when it waits for the device
anyway.

Fingerprints compare the weights of replicas, which start equal and take the same averaged gradients. With a
faulty device, flipped bits in memory, or code that decides on one rank alone, replicas train different models
while the loss continues to decrease. A fingerprint is the exact sum of a parameter's bits.
"""

import logging
import os
import socket
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from config import Training
from errors import RunFailed
from parallelisms.float8 import plain_weight
from parallelisms.mesh import from_all_ranks
from parallelisms.parallelize import ParallelModel
from training.due import Rollouts, every

logger = logging.getLogger(__name__)
WINDOW = 100  # steps in which bad ones are counted, and losses with which a spike is compared
MOST_SKIPPED = 10  # of these steps; with one more the run goes back to its last good checkpoint
ENOUGH = 20  # losses from which a median is computed
TO_SIGMA = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
FINGERPRINT_STEPS = 100  # between two comparisons of replicas
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
MOST_NAMES = 3  # parameters in a message


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
        self.last_is_bad = False  # the last step at the check

    @property
    def window(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint that are needed to judge later steps."""
        return {f"losses.{self.settings}": self.losses, "bad": self.bad}

    def judge(self, step: int, loss: Tensor, grad_norm: Tensor, may_overflow: Tensor | None = None) -> Tensor:
        """Return True for a bad step, as a bool on the device; loss: this rank's, grad_norm: of all ranks;
        may_overflow: whether gradients may, which the loss scaler handles; None: not in fp16.
        """
        # If the loss of one rank is not finite, the gradient norm is not finite on all.
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
        """Return True if too many of the last 100 steps were skipped, or the last step of the run was."""
        # -- the counts of all ranks, on the host, so that they decide together
        counts = torch.cat([torch.stack([self.total, self.seen_here]), self.bad.long()])
        gathered = [torch.zeros_like(counts) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, counts)
        table = torch.stack(gathered).cpu()  # (ranks, 2 + WINDOW)
        bad = table[:, 2:].any(0).tolist()
        recent = [s for s in range(max(step - WINDOW, 0) + 1, step + 1) if bad[s % WINDOW]]

        # -- what is new is logged, with the ranks that have seen it
        total = int(table[:, 0].max())
        if total > self.skipped:
            ranks = table[:, 1].nonzero().flatten().tolist()
            where = f"; losses that are not finite on ranks {ranks}" if ranks else ""
            steps = f"{len(recent)} of the last {min(step, WINDOW)} steps up to step {step}"
            first = min(recent, default=step + 1)
            self.diagnosis = f"{steps} were bad, the first at {first}{where}"
            logger.warning(f"{total - self.skipped} steps skipped: {self.diagnosis}")
        self.skipped, self.last_is_bad = total, bad[step % WINDOW]

        if len(recent) > MOST_SKIPPED:
            self.first = recent[0]
            return True
        self.first = step + 1  # steps that were skipped earlier do not cause a rollback to before them
        while self.first - 1 in recent:
            self.first -= 1
        return last and self.last_is_bad

    def reset(self) -> None:
        """Start counting from zero, after a rollback."""
        self.bad.zero_()
        self.seen_here.zero_()
        self.losses.fill_(torch.nan)
        self.last_is_bad = False


def step_unless(bad: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Take the optimiser's step, unless it is bad, which its fused kernel checks on the device."""
    # For offloaded parameters the host waits for the flag, because torch's own copy would not wait.
    owned = (p.device for group in optimizer.param_groups for p in group["params"])
    flag = bad.float().to(next(owned, bad.device))
    optimizer.found_inf = flag  # type: ignore[attr-defined]  # torch's name, for its GradScaler
    optimizer.step()


# -- weights of replicas


class ReplicasDiverged(RunFailed):
    """Error of ranks with different bits in weights that should be equal."""


class Fingerprints:
    """Compares every `FINGERPRINT_STEPS` steps and before every save, all ranks together."""

    def __init__(self, model: ParallelModel) -> None:
        self.last_equal = ""  # description of the last step at which all were equal
        # "stage 0, fsdp 1, tp 0" -> the parameters of which this rank has that shard, by its coordinates on
        # the axes that shard them
        self.shards: dict[str, dict[str, Tensor]] = {}
        for name, parameter in model.parameters.items():
            coordinates = [f"stage {model.mesh.rank('pp')}"]
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                axes = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
                for axis, size, placement in axes:
                    if size > 1 and not placement.is_replicate():
                        coordinates.append(f"{axis} {mesh.get_local_rank(axis)}")
            self.shards.setdefault(", ".join(coordinates), {})[name] = parameter

    def restart(self, step: int) -> None:
        """Note that the weights are equal after `step`: a checkpoint was compared before it was saved."""
        self.last_equal = f"after step {step}" if step else "as the run began"

    @torch.no_grad()
    def compare(self, step: int, saves: bool) -> None:
        """Raise ReplicasDiverged on all ranks if two of them differ; then nothing is saved."""
        if dist.get_world_size() == 1 or not (saves or every(FINGERPRINT_STEPS, step)):
            return
        # -- a sum over the bits of each parameter: cheap, on the device, and any single flip changes it
        sums: dict[str, dict[str, int]] = {}
        for shard, parameters in self.shards.items():
            values = torch.stack([sum_of_bits(parameter) for parameter in parameters.values()])
            sums[shard] = dict(zip(parameters, values.tolist(), strict=True))
        gathered = from_all_ranks((f"{socket.gethostname()}, pid {os.getpid()}", sums))

        # -- in each shard, the parameters with different sums on the ranks that have it
        for shard in dict.fromkeys(shard for _, of_rank in gathered for shard in of_rank):
            of_ranks = {
                rank: of_rank[shard] for rank, (_, of_rank) in enumerate(gathered) if shard in of_rank
            }
            names = []
            for name in next(iter(of_ranks.values())):
                values = [of_rank[name] for of_rank in of_ranks.values()]
                if min(values) != max(values):
                    names.append(name)
            if not names:
                continue
            places = [f"rank {rank} ({gathered[rank][0]})" for rank in of_ranks]
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            raise ReplicasDiverged(
                f"step {step}: replicas have diverged: {', '.join(places)} have different bits in "
                f"{', '.join(names[:MOST_NAMES])}{more}; all were alike {self.last_equal}. A device that "
                "computes wrong or memory that flips does this, or code that decides on one rank alone. "
                "Start again to go on from the newest checkpoint, which was compared before it was saved; if "
                "it happens again, without one of these hosts at a time"
            )
        self.last_equal = f"after step {step}"


def sum_of_bits(parameter: Tensor) -> Tensor:
    """Return the sum of the bits of this rank's shard, an int64 scalar on the device."""
    plain = plain_weight(parameter)
    local = (plain.to_local() if isinstance(plain, DTensor) else plain).detach().reshape(-1)
    numbers = 8 // local.element_size()  # in an int64, of which a CPU adds up 16 times as many bytes a second
    if local.storage_offset() % numbers:
        local = local.clone()
    end = len(local) // numbers * numbers
    tail = local[end:].view(INTEGERS[local.element_size()])
    return local[:end].view(torch.int64).sum() + tail.sum(dtype=torch.int64)
