"""Starting from another run's weights: everything by name, what is new as in a new run."""

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.interpolate import RegularGridInterpolator

from checkpoints.checkpointer import Checkpointer, find_checkpoint
from checkpoints.identity import Identity
from checkpoints.weights import load_initial_weights, token_centres
from config import ActivationCheckpoint, Checkpoint, Compile, Float8, Model, Parallelism
from datasets.channels import Channels
from datasets.grid import Grid
from models.registry import build_model
from parallelisms.degrees import resolve_degrees
from parallelisms.parallelize import Recipe, parallelize
from tests.distributed import shared_mesh
from tests.parity import full, global_grid

GRID, LARGER = (8, 16), (13, 20)
KEY = "checkpoint.initial_load_path"
OLD = Channels(("temperature:850", "2m_temperature"), static=("land_sea_mask",))
NEW = Channels(("2m_temperature", "total_precipitation", "temperature:850"), computed=("sin_local_time",))
CONFIG = """
[data]
variables = ["temperature", "2m_temperature"]
levels = [850]
static_variables = ["land_sea_mask"]
forcings = []
"""


def build(channels: Channels, seed: int, name: str = "vit", dim: int = 16, grid=GRID, **parallelism):
    """Parameters of a small model on all ranks of the group."""
    settings = dataclasses.replace(Model(), name=name, dim=dim, num_layers=2, num_heads=2, width=4, levels=1)
    asked = Parallelism(**parallelism)
    mesh = shared_mesh(resolve_degrees(dist.get_world_size(), asked))
    outputs = len(channels.variables)
    plan = build_model(settings, outputs, len(channels.inputs) - outputs, grid, True)
    recipe = Recipe(asked, ActivationCheckpoint(), Compile(), Float8(), torch.float32, torch.float32)
    return parallelize(plan, mesh, torch.device("cpu"), seed, recipe).parameters


def save(folder: Path, ema: bool = False, **options) -> dict[str, torch.Tensor]:
    """A checkpoint of a model of OLD; the weights, or averages, that it is used with."""
    parameters = {name: p.detach() for name, p in build(OLD, 0, **options).items()}
    used = {name: tensor + 1 for name, tensor in parameters.items()} if ema else parameters
    tensors = {f"model.{name}": tensor for name, tensor in parameters.items()}
    tensors |= {f"ema.{name}": tensor for name, tensor in used.items()} if ema else {}
    grid = global_grid(GRID)
    about = {"identity": {"grid": {axis: getattr(grid, axis).tolist() for axis in ("latitude", "longitude")}}}
    checkpointer = Checkpointer(folder / "checkpoints", Checkpoint(async_mode="disabled"), CONFIG, about)
    checkpointer.save(1, tensors)
    checkpointer.close()
    return {name: torch.from_numpy(full(tensor)) for name, tensor in used.items()}


def start_from(folder: Path, parameters: dict, channels: Channels, grid: Grid | None = None) -> None:
    identity = Identity.of(find_checkpoint(KEY, str(folder)).folder)
    load_initial_weights(identity, parameters, channels, grid or global_grid(GRID))


def patches(weight: torch.Tensor, channel: int, dim: int) -> torch.Tensor:
    """Slice of a channel in a layer: 16 numbers, those of a 4 x 4 patch."""
    return weight.narrow(dim, 16 * channel, 16)


@pytest.mark.parametrize("ema", [False, True])
def test_variables_are_found_by_name_and_new_ones_start_anew(one_rank, tmp_path, caplog, ema):
    old = save(tmp_path, ema)
    fresh = {name: p.detach().clone() for name, p in build(NEW, 7).items()}
    parameters = build(NEW, 7)
    start_from(tmp_path, parameters, NEW)
    embedding, head = parameters["patch_embedding.weight"], parameters["head.weight"]
    for weight, name, dim in ((embedding, "patch_embedding.weight", 1), (head, "head.weight", 0)):
        assert torch.equal(patches(weight, 0, dim), patches(old[name], 1, dim))  # 2m_temperature
        assert torch.equal(patches(weight, 1, dim), patches(fresh[name], 1, dim))  # total_precipitation
        assert torch.equal(patches(weight, 2, dim), patches(old[name], 0, dim))  # temperature:850
    assert torch.equal(patches(embedding, 3, 1), patches(fresh["patch_embedding.weight"], 3, 1))
    rest = [n for n in old if n.startswith(("blocks", "norm", "position")) or n == "patch_embedding.bias"]
    assert len(rest) > 20 and all(torch.equal(parameters[name], old[name]) for name in rest)
    assert "new channels, initialised: total_precipitation, sin_local_time" in caplog.text
    assert "no longer used: land_sea_mask" in caplog.text
    assert f"started from {'averaged ' if ema else ''}weights of" in caplog.text


def test_a_u_net_too(one_rank, tmp_path):
    old = save(tmp_path, name="unet")
    parameters = build(NEW, 7, name="unet")
    start_from(tmp_path / "checkpoints", parameters, NEW)
    assert torch.equal(parameters["stem.weight"][:, 2], old["stem.weight"][:, 0])
    assert torch.equal(parameters["head.bias"][[0, 2]], old["head.bias"][[1, 0]])


def load_on_another_grid(folder: Path, grid: Grid, channels: Channels = OLD, **parallelism) -> dict:
    parameters = build(channels, 7, grid=grid.shape, **parallelism)
    start_from(folder, parameters, channels, grid)
    return {name: full(parameter) for name, parameter in parameters.items()}


def test_positions_are_interpolated_to_another_grid(ranks, one_rank, tmp_path):
    """In degrees, against scipy, on a finer grid and on a part of the globe: at the edge a token has the
    value of the nearest row, and longitude goes round.
    """
    old, there = save(tmp_path), token_centres(global_grid(GRID), (4, 4))
    longitude = np.concatenate([there[1] - 360, there[1], there[1] + 360])
    values = np.tile(old["position.embedding"].numpy().reshape(2, 4, 16), (1, 3, 1))
    reference = RegularGridInterpolator((-there[0], longitude), values)
    region = Grid(np.linspace(60, 30, 8), np.linspace(0, 40, 16))
    for grid in (global_grid(LARGER), region):
        result, here = load_on_another_grid(tmp_path, grid), token_centres(grid, (4, 4))
        rows = (-here[0]).clip(*-there[0][[0, -1]])
        places = np.stack(np.meshgrid(rows, here[1], indexing="ij"), axis=-1)
        expected = reference(places).reshape(-1, 16)
        np.testing.assert_allclose(result["position.embedding"], expected, rtol=1e-5, atol=1e-6)
        others = [name for name in old if name != "position.embedding"]
        assert all((result[name] == old[name].numpy()).all() for name in others)
    latitude = token_centres(global_grid(LARGER), (4, 4))[0]
    np.testing.assert_allclose(latitude, 90 - 180 / 13 * (4 * np.arange(4) + 0.5 + 0.5), atol=1e-9)
    load_on_shards = partial(load_on_another_grid, channels=NEW, tensor_parallel_degree=2)
    whole = load_on_another_grid(tmp_path, region, NEW)
    sharded = ranks(4).run(load_on_shards, tmp_path, region)[0]
    assert all((sharded[name] == whole[name]).all() for name in whole)


def test_another_model_and_an_empty_folder_are_one_line_each(one_rank, tmp_path):
    with pytest.raises(ValueError, match="initial_load_path = .*no checkpoint there"):
        start_from(tmp_path, build(NEW, 7), NEW)
    save(tmp_path)
    with pytest.raises(ValueError, match=r"is \[.*\] there and \[.*\] in this configuration"):
        start_from(tmp_path, build(NEW, 7, dim=32), NEW)
    next((tmp_path / "checkpoints").glob("step-*/*.distcp")).unlink()
    with pytest.raises(ValueError, match="damaged ones only"):
        start_from(tmp_path, build(NEW, 7), NEW)
