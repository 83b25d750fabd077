"""Compiled blocks: one compilation for all of them, the same numbers, the same names."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from config import ActivationCheckpoint, Model
from models.initialization import init_weights
from models.vit import VisionTransformer
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.compile import apply_compile

MODES = ("none", "full", "every_n_blocks", "selective")


pytestmark = pytest.mark.usefixtures("no_compilations")


def build(layers: int = 3, mode: str = "none", **options) -> VisionTransformer:
    model = VisionTransformer(2, 2, (4, 8), Model("vit", (1, 1), 32, layers, 2, **options))
    init_weights(model, seed=0)
    apply_activation_checkpoint(model, ActivationCheckpoint(mode))  # type: ignore[arg-type]
    return model


def patches() -> Tensor:
    return torch.randn(4, 32, 2, generator=torch.Generator().manual_seed(1))


def step(model: nn.Module) -> None:
    """Forward and backward, in which blocks may drop samples."""
    model(patches(), torch.arange(4)).square().mean().backward()


WINDOWS = ((2, 0), (0, 2), (2, 2), (0, 0))
CASES = [(mode, {"attention_backend": "flash", "stochastic_depth": 0.5}, 1) for mode in MODES]


@pytest.mark.parametrize(
    ("mode", "options", "number"), [*CASES, ("selective", {"attention_windows": WINDOWS}, len(WINDOWS))]
)
def test_one_compilation_for_all_blocks_of_a_shape(mode: str, options: dict, number: int) -> None:
    """Ten blocks: more than the eight compilations after which torch gives up."""
    model, graphs = build(10, mode, **options), CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    for _ in range(2):
        step(model)
    assert graphs.frame_count == number
    with torch.no_grad():
        model.eval()(patches())
    assert graphs.frame_count == 2 * number  # evaluation is another graph
    step(model.train())
    assert graphs.frame_count == 2 * number


def test_one_compilation_under_fsdp(one_rank: torch.device) -> None:
    model, graphs = build(4, "selective"), CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    mesh = init_device_mesh(one_rank.type, (1,))
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step(model)
    assert graphs.frame_count == 1


def test_ddp_does_not_cut_a_block(one_rank: torch.device) -> None:
    """12 MB of gradients, which do not fit into the first bucket of 1 MB."""
    model = VisionTransformer(2, 2, (1, 2), Model("vit", (1, 1), 512, 2, 2))
    graphs = CompileCounterWithBackend("aot_eager")
    apply_compile(model, backend=graphs)
    replica = DistributedDataParallel(model, init_sync=False)
    replica(torch.randn(1, 2, 2)).sum().backward()
    assert graphs.frame_count == 1


def test_what_cannot_be_one_graph_is_an_error() -> None:
    class Printing(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return tokens

    model = build(1)
    model.blocks["0"].mlp = Printing()
    apply_compile(model, backend="aot_eager")
    with pytest.raises(Unsupported):
        step(model)
