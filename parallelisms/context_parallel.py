"""Context parallelism: the tokens of one sample sharded over ranks, with attention over all of them.

Attention is not causal, and any kernel works; torch's own context parallelism has no kernel on CPUs and no
choice of kernels. A rank has t = T'/cp tokens (TokenShards). Communication and memory of a forward block:

    ulysses     sends 3 t d, receives as much, computes N/cp heads over T tokens: 4 t d
    all_gather  receives 2 (cp - 1) t d, has the keys and values of all: 2 T d
    ring        sends 2 t d in each of cp - 1 rounds, has 4 t d: its own and the next rank's

Shapes: B batch, N heads on this rank, t tokens on this rank, T valid tokens of all, T' with padding, E head
size, C values of a token.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd

from models.embeddings import Position, Rotary
from models.vit import Attention
from parallelisms.mesh import Mesh
from parallelisms.ring_attention import ring_attention


class TokenShards:
    """Tokens in equal chunks: over cp for the model's input, over cp and tp for its output.

    Zeros are added at the end up to a multiple of cp x tp. Padded tokens are not used as keys (replacements
    of `Kernel` cut them off) and have weight 0 in the loss.
    """

    def __init__(self, mesh: Mesh, num_tokens: int) -> None:
        self.mesh, self.num_tokens = mesh, num_tokens
        self.cp, self.tp = mesh.degrees.cp, mesh.degrees.tp
        self.num_shards = self.cp * self.tp  # of a sample's output
        self.output_tokens = -(-num_tokens // self.num_shards)  # of this rank, between blocks too: t
        self.padded = self.output_tokens * self.num_shards  # T'
        self.groups = [mesh.group(axis) for axis in ("tp", "cp") if getattr(mesh.degrees, axis) > 1]

    @property
    def first_token(self) -> int:
        """Offset of this rank's chunk of the input."""
        return self.mesh.rank("cp") * self.padded // self.cp

    def cut_input(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/cp, C)."""
        return self._chunk(tokens, self.cp, self.mesh.rank("cp"))

    def cut_output(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/(cp tp), C)."""
        return self._chunk(tokens, self.num_shards, self.mesh.rank("cp") * self.tp + self.mesh.rank("tp"))

    def _chunk(self, tokens: Tensor, num_chunks: int, index: int) -> Tensor:
        missing = self.padded - tokens.shape[1]
        tokens = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
        # A copy: a view would keep all tokens alive through the step.
        return tokens.chunk(num_chunks, dim=1)[index].clone() if num_chunks > 1 else tokens

    def gather_output(self, shard: Tensor) -> Tensor:
        """Inverse of `cut_output`, for validation: a training step never has a whole field's tokens."""
        for group in self.groups:
            gathered = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, shard.contiguous(), group=group)
            shard = torch.cat(gathered, dim=1)
        return shard[:, : self.num_tokens]

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the other shards of the same samples, in place."""
        for group in self.groups:
            dist.all_reduce(value, group=group)
        return value


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
        cp = dist.get_world_size(self.group)
        # One collective: each rank gets its heads of this rank's tokens.
        by_rank = torch.stack([q, k, v]).unflatten(2, (cp, -1)).movedim(2, 0)  # (cp, 3, B, N/cp, t, E)
        by_rank = self._exchange(by_rank)  # from each rank: its tokens
        q, k, v = by_rank.movedim(0, 3).flatten(3, 4).unbind(0)  # each (B, N/cp, T', E)
        out = super().forward(q, k, v)  # (B, N/cp, T', E)
        by_rank = out.unflatten(2, (cp, -1)).movedim(2, 0)  # (cp, B, N/cp, t, E)
        return self._exchange(by_rank).movedim(0, 1).flatten(1, 2)  # (B, N, t, E)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """All-to-all over the first dim, which has one entry a rank."""
        flat = by_rank.contiguous().flatten()
        splits = [flat.numel() // len(by_rank)] * len(by_rank)
        return all_to_all_single_autograd(flat, splits, splits, self.group).view(by_rank.shape)


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
        backend = self.inner.backend
        return ring_attention(q, k, v, self.num_tokens, backend, self.reduce_dtype, self.group_name)[0]


def apply_context_parallel(
    model: nn.Module, group: dist.ProcessGroup, method: str, shards: TokenShards, reduce_dtype: torch.dtype
) -> None:
    """Replace the attention kernel of every block by one over the tokens of all ranks in `group`.

    Positions get the offset of this rank's tokens. reduce_dtype: type of the ring's gradients in messages.
    """
    for module in model.modules():
        if isinstance(module, Position | Rotary):
            module.first_token = shards.first_token
        elif isinstance(module, Attention) and method == "ring":
            module.kernel = RingKernel(module.kernel, shards.num_tokens, group, reduce_dtype)
        elif isinstance(module, Attention):
            kernel = {"ulysses": UlyssesKernel, "all_gather": AllGatherKernel}[method]
            module.kernel = kernel(module.kernel, shards.num_tokens, group)
