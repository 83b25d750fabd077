"""Muon (Jordan et al. 2024) for the matrices of blocks, AdamW for all else.

A matrix moves along its mean gradient with all singular values brought near 1, by 0.2 sqrt(max(rows,
columns)) x lr, so that learning rate and weight decay are those of AdamW (Liu et al. 2025, arXiv:2502.16982).
With matrix products in bfloat16 an unsharded matrix takes torch.optim.Muon's step, bit-exact; that one
supports no shards, no other precision and no bad steps.
"""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelisms.mesh import copy_part
from training.optimizers.shards import MOMENTS, adamw_step, allocate, gradient, local, with_gradient

BUFFER = "momentum_buffer"
# Jordan et al.: a quintic with a steep slope at 0, so that five iterations are enough. It does not converge
# to 1: singular values end between 0.7 and 1.2.
COEFFICIENTS, ITERATIONS, SMALLEST = (3.4445, -4.7750, 2.0315), 5, 1e-7


class Muon(torch.optim.AdamW):
    """`dtype`: of the products of matrices. A bad step (`found_inf`) changes nothing, bit-exact.

    Every rank gathers each matrix, orthogonalizes it and keeps its part: for 64 ranks and vit1b 49 TFLOP a
    step, less than a hundredth of the model's.
    """

    def __init__(
        self, groups: list[dict], betas: tuple[float, float], eps: float, momentum: float, dtype: torch.dtype
    ) -> None:
        super().__init__(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        self.momentum, self.dtype = momentum, dtype
        self.in_blocks = {p for group in self.param_groups if group["blocks"] for p in group["params"]}

    def moment_names(self, parameter: nn.Parameter) -> tuple[str, ...]:
        return (BUFFER,) if parameter in self.in_blocks else ("step", *MOMENTS)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not used
        bad = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if not group["blocks"]:
                adamw_step(self, with_gradient(group), group, bad)
                continue
            parameters, is_bad = with_gradient(group), None if bad is None else bad.bool()
            allocate(self, parameters)
            for parameter in parameters:
                # -- the mean gradient, with Nesterov's momentum
                weight, new = local(parameter), gradient(parameter)
                mean = local(self.state[parameter][BUFFER])
                if is_bad is not None:
                    new = torch.where(is_bad, mean, new)  # leaves the mean unchanged
                mean.lerp_(new, 1 - self.momentum)
                part = new.lerp(mean, self.momentum)

                # -- this rank's part of the orthogonalized matrix, from its part of the matrix
                if isinstance(parameter, DTensor):
                    sharded = DTensor.from_local(
                        part.to(self.dtype),
                        parameter.device_mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
                    matrix, result = sharded.full_tensor(), torch.zeros_like(sharded, dtype=part.dtype)
                    copy_part(result, orthogonalize(matrix.flatten(1)).view_as(matrix))
                    update = local(result)
                else:
                    update = orthogonalize(part.flatten(1).to(self.dtype)).view_as(part).to(part.dtype)

                # -- the weights
                scale = 0.2 * math.sqrt(max(parameter.shape[0], parameter.shape[1:].numel()))
                moved = weight * (1 - group["lr"] * group["weight_decay"])
                moved.add_(update, alpha=-group["lr"] * scale)
                weight.copy_(moved if is_bad is None else torch.where(is_bad, weight, moved))


def orthogonalize(matrix: Tensor) -> Tensor:
    """(M, N) -> U S V^T with singular values S near 1, by Newton-Schulz iterations in its precision."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=SMALLEST)  # all singular values are at most 1
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.shape[0] > matrix.shape[1] else x
