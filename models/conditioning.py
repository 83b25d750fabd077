"""A ViT whose blocks are told the hour, the season and the lead: by shift and scale of what their norms give.

What tells them is a few numbers a sample, which come as the last channels of its input, the same in every
cell: so they go wherever a part of a sample goes. A small MLP makes of them, for each block, the shifts and
scales of its two norms (adaptive layer norm: Peebles and Xie 2023, "Scalable Diffusion Models with
Transformers"). Its last layer starts at zero, and the model as the one without it; it has no gates.

Shapes: as models/vit.py; S numbers of a sample, F features of them, L blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from config import Model
from models.condition_numbers import CHANNELS, HALF_LEADS, HIDDEN, num_channels, num_features
from models.vit import Block, VisionTransformer


def features_of(numbers: Tensor, conditions: Sequence[str]) -> Tensor:
    """(B, S) -> (B, F) float32. Of a lead n they are n / (n + half): with no lead that was not trained on
    does one lie far from all others.
    """
    parts = list(numbers.float().split([CHANNELS[name] for name in conditions], dim=1))
    if "lead_time" in conditions:
        which = list(conditions).index("lead_time")
        parts[which] = parts[which] / (parts[which] + parts[which].new_tensor(HALF_LEADS))
    return torch.cat(parts, dim=1)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x (B, T, D), scale and shift (B, D) -> x (1 + scale) + shift, in the precision of x."""
    return x * (1 + scale).to(x.dtype)[:, None] + shift.to(x.dtype)[:, None]


class ConditionedBlock(Block):
    """tokens (B, T, D) and modulation (B, 4, D) -> (B, T, D)."""

    def forward(self, tokens: Tensor, modulation: Tensor) -> Tensor:  # type: ignore[override]
        first, second = modulation[:, :2].unbind(1), modulation[:, 2:].unbind(1)
        seen = modulated(self.attention_norm(tokens), *first)
        tokens = tokens + self.stochastic_depth(self.attention(seen))
        seen = modulated(self.mlp_norm(tokens), *second)
        return tokens + self.stochastic_depth(self.mlp(seen))


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
    """Patches whose last S channels are the numbers of the sample: (B, T, (C + S) P Q) -> (B, T, V P Q)."""

    block_type = ConditionedBlock

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        grid_shape: tuple[int, int],
        model: Model,
        periodic: bool = True,
    ) -> None:
        """in_channels: C + S; the patch embedding sees C of them."""
        self.conditions, self.numbers = model.conditions, num_channels(model.conditions)
        super().__init__(in_channels - self.numbers, out_channels, grid_shape, model, periodic)
        self.modulation = Modulation(num_features(model.conditions), 4 * model.num_layers * model.dim)

    def forward(self, patches: Tensor) -> Tensor:
        split = [self.in_channels, self.numbers]
        patches, numbers = patches.unflatten(-1, (sum(split), -1)).split(split, dim=-2)
        features = features_of(numbers[:, 0, :, 0].detach(), self.conditions)  # of any token that is here
        modulations = self.modulation(features).unflatten(-1, (-1, 4, self.dim)).unbind(1)  # each (B, 4, D)
        tokens = self.position(self.patch_embedding(patches.flatten(-2)))  # (B, T, D)
        for block, modulation in zip(self.blocks.values(), modulations, strict=True):
            tokens = block(tokens, modulation)
        return self.head(self.norm(tokens))  # (B, T, V P Q)

    def initial_std(self, name: str) -> float | None:
        if name == "modulation.out.weight":
            return 0.0
        if name == "modulation.hidden.weight":
            return self.modulation.hidden.in_features**-0.5
        return super().initial_std(name)
