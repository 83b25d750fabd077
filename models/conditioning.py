"""A ViT with adaptive layer norm: time of day, season and lead time set the scale and shift of its norms.

The conditions are a few numbers a sample. They are the last channels of its input, equal in every cell, so
that every shard of a sample has them. A small MLP computes from them the scales and shifts of the two norms
of each block (Peebles and Xie 2023, "Scalable Diffusion Models with Transformers"; without gates). Its last
layer starts at zero, so that the model starts as the one without conditions.

Shapes: as models/vit.py; S numbers of a sample, F features of them, L blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config import Model
from models.registry import CHANNELS, HALF_LEADS, HIDDEN, num_channels, num_features
from models.vit import Block, VisionTransformer
from models.weather_model import run_blocks


def compute_features(numbers: Tensor, conditions: Sequence[str]) -> Tensor:
    """(B, S) -> (B, F) float32. Of a lead time n: n / (n + half), so that none is far from the others."""
    parts = list(numbers.float().split([CHANNELS[name] for name in conditions], dim=1))
    if "lead_time" in conditions:
        index = list(conditions).index("lead_time")
        parts[index] = parts[index] / (parts[index] + parts[index].new_tensor(HALF_LEADS))
    return torch.cat(parts, dim=1)


def modulate(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x (B, T, D), scale and shift (B, D) -> x (1 + scale) + shift, in the precision of x."""
    return x * (1 + scale).to(x.dtype)[:, None] + shift.to(x.dtype)[:, None]


class ConditionedBlock(Block):
    """tokens (B, T, D) and modulation (B, 4, D) -> (B, T, D)."""

    def forward(self, tokens: Tensor, modulation: Tensor) -> Tensor:  # type: ignore[override]
        first, second = modulation[:, :2].unbind(1), modulation[:, 2:].unbind(1)
        normed = modulate(self.attention_norm(tokens), *first)
        tokens = tokens + self.stochastic_depth(self.attention(normed))
        normed = modulate(self.mlp_norm(tokens), *second)
        return tokens + self.stochastic_depth(self.mlp(normed))


class Modulation(nn.Module):
    """features (B, F) -> (B, 4 L D)."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, HIDDEN)
        self.activation = nn.SiLU()
        self.out = nn.Linear(HIDDEN, num_outputs)

    def forward(self, features: Tensor) -> Tensor:
        return self.out(self.activation(self.hidden(features)))


class ConditionedTransformer(VisionTransformer):
    """Patches with the S numbers of the sample as last channels: (B, T, (C + S) P Q) -> (B, T, V P Q)."""

    block_type = ConditionedBlock

    def __init__(
        self, in_channels: int, out_channels: int, grid_shape: tuple[int, int], model: Model, periodic: bool
    ) -> None:
        """in_channels: C + S; the patch embedding has C of them."""
        self.conditions, self.num_numbers = model.conditions, num_channels(model.conditions)
        super().__init__(in_channels - self.num_numbers, out_channels, grid_shape, model, periodic)
        self.modulation = Modulation(num_features(model.conditions), 4 * model.num_layers * model.dim)

    def forward(self, patches: Tensor) -> Tensor:
        split = [self.in_channels, self.num_numbers]
        patches, numbers = patches.unflatten(-1, (sum(split), -1)).split(split, dim=-2)
        features = compute_features(numbers[:, 0, :, 0].detach(), self.conditions)  # equal in all tokens
        modulations = self.modulation(features).unflatten(-1, (-1, 4, self.dim)).unbind(1)  # each (B, 4, D)
        tokens = self.position(self.patch_embedding(patches.flatten(-2)))  # (B, T, D)
        tokens = run_blocks(list(self.blocks.values()), tokens, self.checkpoint_every, modulations)
        return self.head(self.norm(tokens))  # (B, T, V P Q)

    def initial_std(self, name: str) -> float | None:
        if name == "modulation.out.weight":
            return 0.0
        if name == "modulation.hidden.weight":
            return self.modulation.hidden.in_features**-0.5
        return super().initial_std(name)


def build_vit(
    in_channels: int, out_channels: int, grid_shape: tuple[int, int], model: Model, periodic: bool
) -> VisionTransformer:
    kind = ConditionedTransformer if model.conditions else VisionTransformer
    return kind(in_channels, out_channels, grid_shape, model, periodic)
