"""Casts of weights in a step that accumulates gradients."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parity import Layout, SmallRun


class Casts(TorchDispatchMode):
    """How many matrices are cast from float32 to bfloat16, by shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
            self.shapes.append(tuple(args[0].shape))
        return out


def casts_of_a_step(layout: Layout) -> int:
    """Of a block's first MLP matrix, which has a shape of its own."""
    small = SmallRun(layout)
    shapes = [tuple(p.shape) for name, p in small.model.parameters.items() if name.endswith("mlp.up.weight")]
    small.watch = casts = Casts()
    small.step(0)
    return casts.shapes.count(shapes[0]) // len(shapes)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_weights_are_cast_once_a_step(one_rank, checkpointing: str) -> None:
    layout = Layout(1, accumulation=4, dtype="bfloat16", activation_checkpoint=checkpointing)
    assert casts_of_a_step(layout) == 1
