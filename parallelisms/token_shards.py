"""Which part of a sample a rank holds. Shapes: B batch, T tokens, T' padded tokens, C values of a token."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallelisms.mesh import Mesh


def pad_tokens(tokens: Tensor, count: int) -> Tensor:
    """tokens (B, T, C) -> (B, count, C), zeros at the end."""
    return F.pad(tokens, (0, 0, 0, count - tokens.shape[1])) if count > tokens.shape[1] else tokens


class TokenShards:
    """Tokens dealt out in chunks: over cp for the model's input, over cp and tp for its output.

    Tokens that cp x tp does not divide are padded with zeros at the end. Padded tokens are keys for nobody
    (`Kernel` replacements cut them off) and weigh nothing in the loss.
    """

    def __init__(self, mesh: Mesh, num_tokens: int) -> None:
        self.mesh, self.num_tokens = mesh, num_tokens
        self.cp, self.tp = mesh.degrees.cp, mesh.degrees.tp
        self.padded = -(-num_tokens // (self.cp * self.tp)) * self.cp * self.tp  # T'

    @property
    def num_shards(self) -> int:
        """Of a sample's output."""
        return self.cp * self.tp

    @property
    def first_token(self) -> int:
        """Where this rank's cp chunk begins."""
        return self.mesh.rank("cp") * self.padded // self.cp

    @property
    def output_tokens(self) -> int:
        """Tokens of this rank between blocks and in the output: t."""
        return self.padded // (self.cp * self.tp)

    def cut_input(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/cp, C)."""
        return pad_tokens(tokens, self.padded).chunk(self.cp, dim=1)[self.mesh.rank("cp")]

    def cut_output(self, tokens: Tensor) -> Tensor:
        """(B, T, C) -> this rank's (B, T'/(cp tp), C)."""
        return self.cut_input(tokens).chunk(self.tp, dim=1)[self.mesh.rank("tp")]

    def gather_output(self, shard: Tensor) -> Tensor:
        """The inverse of `cut_output`, for validation: a training step never has a whole field's tokens."""
        for axis in ("tp", "cp"):
            if getattr(self, axis) > 1:
                parts = [torch.empty_like(shard) for _ in range(getattr(self, axis))]
                dist.all_gather(parts, shard.contiguous(), group=self.mesh.group(axis))
                shard = torch.cat(parts, dim=1)
        return shard[:, : self.num_tokens]

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """The sum of `value` over the ranks that hold the other shards of the same samples."""
        for axis in ("tp", "cp"):
            if getattr(self, axis) > 1:
                dist.all_reduce(value, group=self.mesh.group(axis))
        return value
