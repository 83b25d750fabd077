"""Shards of a sample's tokens. Shapes: B batch, T tokens, T' padded tokens, C values of a token."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallelisms.mesh import Mesh


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

    @property
    def first_token(self) -> int:
        """Offset of this rank's chunk of the input."""
        return self.mesh.rank("cp") * self.padded // self.cp

    def cut_input(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/cp, C)."""
        return self._cut(tokens, self.cp, self.mesh.rank("cp"))

    def cut_output(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/(cp tp), C)."""
        return self._cut(tokens, self.cp * self.tp, self.mesh.rank("cp") * self.tp + self.mesh.rank("tp"))

    def _cut(self, tokens: Tensor, num_parts: int, part: int) -> Tensor:
        missing = self.padded - tokens.shape[1]
        tokens = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
        # A copy: a view would keep all tokens alive through the step.
        return tokens.chunk(num_parts, dim=1)[part].clone() if num_parts > 1 else tokens

    def gather_output(self, shard: Tensor) -> Tensor:
        """Inverse of `cut_output`, for validation: a training step never has a whole field's tokens."""
        for group, size in self._groups():
            parts = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather(parts, shard.contiguous(), group=group)
            shard = torch.cat(parts, dim=1)
        return shard[:, : self.num_tokens]

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over the other shards of the same samples, in place."""
        for group, _ in self._groups():
            dist.all_reduce(value, group=group)
        return value

    def _groups(self) -> list[tuple[dist.ProcessGroup, int]]:
        sizes = {"tp": self.tp, "cp": self.cp}
        return [(self.mesh.group(axis), size) for axis, size in sizes.items() if size > 1]
