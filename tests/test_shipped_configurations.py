"""Two steps of every shipped configuration at reduced size, and a dry run of the largest ones."""

import dataclasses
from pathlib import Path

import pytest
import torch

from config import Compile, Config, Model, Parallelism
from datasets.channels import Channels
from datasets.grid import area_weights, global_grid
from parallelisms.mesh import mesh_of
from planning.dry_run import dry_run
from tests.distributed import own_device
from tests.test_house import CONFIGURATIONS
from training.assembly import Fields, assemble
from training.batches import Batch
from training.config_checks import load_checked
from training.due import Rollouts
from training.state import build_state
from training.step import Run, train_step

GRID, LOCAL_BATCH, ACCUMULATION = (16, 32), 2, 2


def ranks_of(path: Path) -> int:
    """Ranks of the command in the header of a configuration."""
    words = dict(
        word.split("=") for word in path.read_text().split() if word.startswith(("NNODES=", "NGPU="))
    )
    return int(words.get("NNODES", 1)) * int(words.get("NGPU", 1))


def load(path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("WORLD_SIZE", str(ranks_of(path)))
    config = load_checked(["--job.config_file", str(path)])
    monkeypatch.setenv("WORLD_SIZE", "1")
    return config


def with_smaller_windows(model: Model) -> Model:
    windows = tuple((min(rows, 2), min(columns, 2)) for rows, columns in model.attention_windows)
    return dataclasses.replace(model, attention_windows=windows)


def reduced(config: Config) -> Config:
    """The configuration for one rank, with a small model and short rollouts."""
    training = dataclasses.replace(
        config.training,
        steps=2,
        local_batch_size=LOCAL_BATCH,
        global_batch_size=LOCAL_BATCH * ACCUMULATION,
        rollout_steps=tuple(min(steps, 3) for steps in config.training.rollout_steps),
    )
    model = dataclasses.replace(
        config.model, patch_size=(2, 4), dim=32, num_layers=2, num_heads=2, mlp_dim=0, width=8, levels=2
    )
    model = with_smaller_windows(model)
    return dataclasses.replace(
        config, training=training, model=model, parallelism=Parallelism(), compile=Compile()
    )


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: path.stem)
def test_two_steps_at_reduced_size(one_rank, monkeypatch, path: Path) -> None:
    config, grid, device = reduced(load(path, monkeypatch)), global_grid(GRID), own_device()
    num_variables = len(Channels.of(config.data).predicted)
    fields = Fields.standard(config, grid, num_variables)
    assembly = assemble(config, fields, mesh_of(config.parallelism, device), device)
    state = build_state(config, assembly)
    run = Run(config, assembly, state, area_weights(grid.latitude), LOCAL_BATCH * ACCUMULATION)
    assembly.model.train()
    before = {name: p.detach().clone() for name, p in state.parameters.items() if p.requires_grad}
    for step in (1, 2):
        states = config.data.history + Rollouts.of(config.training).at(step)
        shape = (LOCAL_BATCH, states, num_variables, *GRID)
        batches = [Batch(torch.randn(shape), torch.arange(LOCAL_BATCH) * 21_600) for _ in range(ACCUMULATION)]
        result = train_step(run, step, batches)
        assert torch.isfinite(result.loss) and result.grad_norm > 0
    assert any(not torch.equal(before[name], state.parameters[name].detach()) for name in before)


QUICK = ("vit1b_muon",)  # the others are like them, and slower
LARGEST = [
    pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else [pytest.mark.slow])
    for path in CONFIGURATIONS
    if path.stem.startswith("vit1b")
]


@pytest.mark.parametrize("path", LARGEST)
def test_a_dry_run_of_the_largest(monkeypatch, path: Path) -> None:
    """Of two of the blocks; one rank has no more parameters than all ranks together."""
    config, ranks = load(path, monkeypatch), ranks_of(path)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    model = with_smaller_windows(dataclasses.replace(config.model, num_layers=2))
    small = dataclasses.replace(config, model=model)
    found = dry_run(small, ranks, global_grid((64, 128)), len(Channels.of(config.data).predicted))
    assert 0 < found.parameters <= found.total_parameters and found.peak["Total"] > found.parameters
