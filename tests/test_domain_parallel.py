"""A split grid computes what the whole grid does: outputs, loss, gradients."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config import Model
from models.initialization import fill_with_nan, init_weights
from models.unet import UNet
from parallelisms.domain_parallel import GridTiles, apply_domain_parallel, build_tiles, choose_tiles

NUM_RANKS = 4
GRID = (27, 43)  # 28 x 44 padded, 7 x 11 units of 4 x 4 cells: no layout divides it evenly
LAYOUTS = [(2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]
# Relative to the largest value of a tensor. Measured: 6e-7 and 2e-15; gradients of parameters, sums over all
# cells in another order, 7e-6 and 6e-15.
TOLERANCE = {"float32": 2e-6, "float64": 5e-15}  # 1.01e-6 on one processor of those it was run on
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 2e-14}


def build_model(periodic: bool, dtype: torch.dtype) -> UNet:
    model = UNet(5, 3, GRID, Model(width=8, levels=2), periodic)
    fill_with_nan(model)
    init_weights(model, seed=0)
    return model.to(dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest value."""
    return ((a - b).abs().max() / b.abs().max()).item()


def total(value: Tensor | None, tiles: GridTiles) -> Tensor:
    """Sum over the tiles, of a copy."""
    assert value is not None
    return tiles.sum_over_shards(value.detach().clone())


# -- what every rank does


@functools.cache
def domain(layout: tuple[int, int]) -> DeviceMesh:
    """Axis of the ranks that share a sample; two samples at once if the layout needs half of the ranks."""
    size = layout[0] * layout[1]
    return init_device_mesh("cpu", (NUM_RANKS // size, size), mesh_dim_names=("dp", "domain"))["domain"]


def check_model(layout: tuple[int, int], periodic: bool, precision: str, compiled: bool = False) -> dict:
    """Loss, outputs and gradients of this rank's tile against the same on the whole grid."""
    mesh, dtype = domain(layout), getattr(torch, precision)
    model = build_model(periodic, dtype)
    if compiled:
        model.blocks["middle"].compile(backend="aot_eager", fullgraph=True)
    plain, tiles = copy.deepcopy(model), build_tiles(mesh, layout, model.padded_shape, model.multiple)
    apply_domain_parallel(model, tiles)
    torch.manual_seed(dist.get_rank() // mesh.size())
    fields = model.from_fields(torch.randn(2, 5, *GRID, dtype=dtype))
    target = torch.randn(2, 3, *model.padded_shape, dtype=dtype)
    whole, part = (fields.clone().requires_grad_() for _ in range(2))
    expected = plain(whole)
    loss = (expected - target).square().sum()
    loss.backward()
    output = model(tiles.cut_input(part))
    part_loss = (output - tiles.cut_output(target)).square().sum()
    part_loss.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return {
        "output": difference(tiles.gather_output(output), expected),
        "loss": difference(total(part_loss, tiles), loss),
        "input_gradient": difference(total(part.grad, tiles), whole.grad),  # type: ignore[reportArgumentType]
        "gradients": max(difference(total(p.grad, tiles), q.grad) for p, q in pairs if q.grad is not None),
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()],
    }


# -- what the tests ask of it


@pytest.mark.parametrize(("periodic", "precision"), [(True, "float32"), (False, "float64")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_grid_equals_the_whole(ranks, layout, periodic, precision):
    for found in ranks(NUM_RANKS).run(check_model, layout, periodic, precision):
        assert found["names"]
        for what in ("output", "loss", "input_gradient"):
            assert found[what] <= TOLERANCE[precision], what
        assert found["gradients"] <= GRADIENT_TOLERANCE[precision]


def test_a_compiled_block_exchanges_in_its_graph(ranks):
    """tests/test_parity.py has tiles with replicas, FSDP and recomputed blocks."""
    for found in ranks(NUM_RANKS).run(check_model, (2, 2), True, "float32", True):
        assert found["gradients"] <= GRADIENT_TOLERANCE["float32"]


@pytest.mark.parametrize(
    ("number", "shape", "tiles"),
    [
        (1, (32, 48), (1, 1)),
        (2, (736, 1440), (1, 2)),  # columns are shorter than rows: the shorter halo
        (2, (64, 32), (2, 1)),
        (4, (48, 48), (2, 2)),  # 3 x 3 units: no 4 rows or columns of tiles
        (8, (736, 1440), (2, 4)),
    ],
)
def test_tiles_are_balanced_and_compact(number: int, shape: tuple[int, int], tiles: tuple[int, int]) -> None:
    assert choose_tiles(number, shape, 16) == tiles
