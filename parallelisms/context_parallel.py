"""Context parallelism: the tokens of one sample sharded over ranks, with attention over all of them.

Attention is not causal, and any kernel works; torch's own context parallelism has no kernel on CPUs and no
choice of kernels. A rank has t = T'/cp tokens (token_shards.py). Communication and memory of a forward block:

    ulysses     sends 3 t d, receives as much, computes N/cp heads over T tokens: 4 t d
    all_gather  receives 2 (cp - 1) t d, has the keys and values of all: 2 T d
    ring        sends 2 t d in each of cp - 1 rounds, has 4 t d: its own and the next rank's

Shapes: B batch, N heads on this rank, t tokens on this rank, T valid tokens of all, E head size.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from models.embeddings import Position, Rotary
from parallelisms.parameter_names import blocks_of
from parallelisms.ring_attention import ring_attention
from parallelisms.token_shards import TokenShards


class TrimmedKernel(nn.Module):
    """Attention without padded keys: for tokens that tensor parallelism alone does not divide."""

    def __init__(self, inner: nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.inner, self.num_tokens = inner, num_tokens

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.inner(q, k[:, :, : self.num_tokens], v[:, :, : self.num_tokens])


class UlyssesKernel(TrimmedKernel):
    """Exchange tokens for heads, attend over all tokens, exchange back (Jacobs et al. 2023)."""

    def __init__(self, inner: nn.Module, num_tokens: int, group: dist.ProcessGroup) -> None:
        super().__init__(inner, num_tokens)
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = self._to_heads(torch.stack([q, k, v])).unbind(0)  # each (B, N/cp, T', E)
        return self._to_tokens(super().forward(q, k, v))

    def _to_heads(self, x: Tensor) -> Tensor:
        """(3, B, N, t, E) -> (3, B, N/cp, T', E), in one collective."""
        cp = dist.get_world_size(self.group)
        parts = x.unflatten(2, (cp, -1)).movedim(2, 0)  # (cp, 3, B, N/cp, t, E): for each rank
        parts = _exchange(parts, self.group)  # from each rank: its tokens
        return parts.movedim(0, 3).flatten(3, 4)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """(B, N/cp, T', E) -> (B, N, t, E)."""
        cp = dist.get_world_size(self.group)
        parts = x.unflatten(2, (cp, -1)).movedim(2, 0)  # (cp, B, N/cp, t, E)
        return _exchange(parts, self.group).movedim(0, 1).flatten(1, 2)


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-to-all over the first dim, which has one entry a rank."""
    flat = parts.contiguous().flatten()
    splits = [flat.numel() // len(parts)] * len(parts)
    return all_to_all_single_autograd(flat, splits, splits, group).view(parts.shape)


class AllGatherKernel(TrimmedKernel):
    """Kernel that gathers keys and values; queries are not communicated."""

    def __init__(self, inner: nn.Module, num_tokens: int, group: dist.ProcessGroup) -> None:
        super().__init__(inner, num_tokens)
        self.group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cp = dist.get_world_size(self.group)
        gathered = all_gather_tensor_autograd(torch.stack([k, v]), 0, self.group)  # (2 cp, B, N, t, E)
        k, v = gathered.unflatten(0, (cp, 2)).movedim(0, 3).flatten(3, 4).unbind(0)  # each (B, N, T', E)
        return super().forward(q, k, v)


class RingKernel(nn.Module):
    """Kernel that passes keys and values from rank to rank; see parallelisms/ring_attention.py."""

    def __init__(
        self, inner: nn.Module, num_tokens: int, group: dist.ProcessGroup, reduce_dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.inner, self.num_tokens = inner, num_tokens
        self.reduce_dtype, self.group_name = reduce_dtype, group.group_name

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring = (self.num_tokens, self.inner.backend, self.reduce_dtype, self.group_name)
        return ring_attention(q, k, v, *ring)[0]


def apply_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, method: str, shards: TokenShards, reduce_dtype: torch.dtype
) -> None:
    """Replace the attention kernel of every block by one over the tokens of all ranks in `group`.

    Positions get the offset of this rank's tokens. reduce_dtype: type of the ring's gradients in messages.
    """
    for module in model.modules():
        if isinstance(module, Position | Rotary):
            module.first_token = shards.first_token
    for block in blocks_of(model):
        arguments = (block.attention.kernel, shards.num_tokens, group)
        if method == "ring":
            kernel = RingKernel(*arguments, reduce_dtype)
        else:
            kernel = {"ulysses": UlyssesKernel, "all_gather": AllGatherKernel}[method](*arguments)
        block.attention.kernel = kernel


def trim_padding(model: nn.Module, num_tokens: int) -> None:
    """Cut padded tokens off the keys of every block."""
    for block in blocks_of(model):
        block.attention.kernel = TrimmedKernel(block.attention.kernel, num_tokens)
