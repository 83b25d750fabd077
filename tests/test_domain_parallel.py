"""A split grid computes what the whole grid does: outputs, loss, gradients; and sends what is stated."""

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from config import Model
from models.initialization import fill_with_nan, init_weights
from models.unet import UNet
from parallelisms.domain_parallel import NO_RANK, GridTiles, apply_domain_parallel, build_tiles, choose_tiles

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


def gradient_differences(model: nn.Module, plain: nn.Module, tiles: GridTiles) -> float:
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(difference(total(p.grad, tiles), q.grad) for p, q in pairs if q.grad is not None)


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """[messages, bytes] that this rank sends inside."""
    sent, send = [0, 0], dist.batch_isend_irecv

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes = [op.tensor.nbytes for op in operations if op.op is dist.isend]
        sent[0], sent[1] = sent[0] + len(sizes), sent[1] + sum(sizes)
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", counting):
        yield sent


def halo_traffic(model: UNet, tiles: GridTiles, batch_size: int, itemsize: int) -> tuple[int, int]:
    """(messages, bytes) that this rank sends in one forward pass.

    With m neighbours in latitude and p in longitude (0 to 2), every 3 x 3 convolution (the stem and two a
    block: 4 levels + 3 of them) sends p messages of B D h values and m of B D (w + 2), where D are the
    channels it reads and h x w is its tile at its own resolution. Others send nothing. Backward sends the
    same again, without the stem's where the fields need no gradient. `itemsize` is that of the activations;
    under autocast the stem still reads, and sends, what it is given.
    """
    m = sum(peer != NO_RANK for peer in tiles.neighbors(0, model.periodic))
    p = sum(peer != NO_RANK for peer in tiles.neighbors(1, model.periodic))
    channels = [(c.in_channels, f) for c, f in model.convolutions() if c.kernel_size[0] == 3]
    (h, w), messages = tiles.shape, (m + p) * len(channels)
    return messages, itemsize * batch_size * sum(d * (p * h // f + m * (w // f + 2)) for d, f in channels)


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
    with counted_messages() as forward:
        output = model(tiles.cut_input(part))
    part_loss = (output - tiles.cut_output(target)).square().sum()
    with counted_messages() as backward:
        part_loss.backward()
    return {
        "output": difference(tiles.gather_output(output), expected),
        "loss": difference(total(part_loss, tiles), loss),
        "input_gradient": difference(total(part.grad, tiles), whole.grad),  # type: ignore[reportArgumentType]
        "gradients": gradient_differences(model, plain, tiles),
        "names": [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()],
        "forward": forward,
        "backward": backward,
        "stated": list(halo_traffic(model, tiles, 2, dtype.itemsize)),
    }


# -- what the tests ask of it


@pytest.mark.parametrize(("periodic", "precision"), [(True, "float32"), (False, "float64")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_grid_equals_the_whole(ranks, layout, periodic, precision):
    """With the messages and bytes that are stated."""
    for found in ranks(NUM_RANKS).run(check_model, layout, periodic, precision):
        assert found["names"] and found["forward"][0] > 0
        assert found["forward"] == found["backward"] == found["stated"]
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
