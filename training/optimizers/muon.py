"""Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all else.

A matrix moves along its mean gradient with all singular values brought near 1, by 0.2 sqrt(max(rows,
columns)) x lr, so that learning rate and weight decay are those of AdamW (Liu et al. 2025, arXiv:2502.16982).
With matrix products in bfloat16 a matrix that is not sharded takes torch.optim.Muon's step, to the bit; that
one knows nothing of shards, of other precisions, of bad steps.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.parallelize import copy_part
from training.optimizers.fused_adamw import adamw_step
from training.optimizers.shards import MOMENTS, allocate, gradient, local, with_gradient

BUFFER = "momentum_buffer"
# Jordan et al.: a quintic whose slope at 0 is steep, so that five times are enough. It does not converge to
# 1: singular values end between 0.7 and 1.2.
COEFFICIENTS, ITERATIONS, SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.AdamW):
    """`dtype`: of the products of matrices. A bad step (`found_inf`) changes nothing, to the bit.

    Every rank gathers each matrix, makes the same of it and keeps its part: for 64 ranks and vit1b 49 TFLOP a
    step, less than a hundredth of what the step's samples take.
    """

    def __init__(
        self,
        groups: list[dict],
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.momentum, self.dtype = momentum, dtype
        orthogonal = (group["params"] for group in self.param_groups if group["blocks"])
        self.orthogonal = {parameter for parameters in orthogonal for parameter in parameters}

    def moments_of(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (BUFFER,) if parameter in self.orthogonal else ("step", *MOMENTS)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # nobody here has a closure
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            parameters = with_gradient(group)
            if not group["blocks"]:
                adamw_step(self, parameters, group, bad)
                continue
            for parameter in parameters:
                allocate(self, parameter, (BUFFER,))
                self._step_matrix(parameter, group, None if bad is None else bad.bool())

    def _step_matrix(self, parameter: nn.Parameter, group: dict, bad: Tensor | None) -> None:
        weight, mean, new = local(parameter), local(self.state[parameter][BUFFER]), gradient(parameter)
        if bad is not None:
            new = torch.where(bad, mean, new)  # which leaves the mean as it is
        mean.lerp_(new, 1 - self.momentum)
        update = self._orthogonal(new.lerp(mean, self.momentum), parameter)  # Nesterov's
        rows, columns = parameter.shape[0], parameter.shape[1:].numel()
        scale = 0.2 * math.sqrt(max(rows, columns))
        moved = weight * (1 - group["lr"] * group["weight_decay"])
        moved.add_(update, alpha=-group["lr"] * scale)
        weight.copy_(moved if bad is None else torch.where(bad, weight, moved))

    def _orthogonal(self, part: Tensor, parameter: nn.Parameter) -> Tensor:
        """Of this rank's part of a matrix, its part of the orthogonal one."""
        if not isinstance(parameter, DTensor):
            return orthogonalized(part.flatten(1).to(self.dtype)).view_as(part).to(part.dtype)
        layout = {"shape": parameter.shape, "stride": parameter.stride()}
        sharded = DTensor.from_local(
            part.to(self.dtype), parameter.device_mesh, parameter.placements, run_check=False, **layout
        )
        whole = sharded.full_tensor()
        found = torch.zeros_like(sharded, dtype=part.dtype)
        copy_part(found, orthogonalized(whole.flatten(1)).view_as(whole))
        return local(found)


def orthogonalized(matrix: Tensor) -> Tensor:
    """(M, N) -> U S V^T with singular values S near 1, by Newton-Schulz iterations in its precision."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=SMALLEST)  # no singular value is above 1 then
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
