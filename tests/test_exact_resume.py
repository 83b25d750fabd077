"""A run that goes on from any of its checkpoints ends with the bits of the run that was not stopped.

Configurations are drawn: spikes that are skipped, going back, averages, updates in backward, accumulation,
rollouts in stages, windows, ensembles, ways of saving.
"""

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from checkpoints.files import complete_steps, step_folder
from tests.planned import run_train
from tests.started_jobs import records, run_options, small_dataset, small_wave, write_config

STEPS, INTERVAL = 60, 5
OTHERS = {1: "LAMB", 4: "Muon"}  # seed -> optimiser that is not AdamW
SECTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-3},
    "lr_scheduler": {"decay_type": "cosine"},
    "training": {"steps": STEPS},
    "checkpoint": {"interval": INTERVAL, "keep_latest_k": 0},
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """Waves, with some dates that cause spikes of the loss, and with `holes` that make a step bad."""
    folder = tmp_path_factory.mktemp("exact")
    u = small_wave(90)
    u[[30, 31, 62]] += 60 * np.random.default_rng(0).normal(size=u[:3].shape)
    return write_config(folder, small_dataset({"10m_u_component_of_wind": u}), **SECTIONS)


def draw(seed: int) -> list[str]:
    rng = random.Random(seed)
    choices = {
        "training.spike_threshold": ["0", "4", "8"],
        "training.ema_decay": ["0", "0.9"],
        "training.seed": ["0", "1", "2"],
        "checkpoint.async_mode": ["disabled", "async", "async_with_pinned_mem"],
        "data.num_workers": ["0", "1"],
    }
    drawn = [word for key, values in choices.items() for word in (f"--{key}", rng.choice(values))]
    drawn += ["--data.history", str(1 + seed % 2)]
    drawn += ["--training.augmentation=roll"] * (seed % 3 != 1)
    drawn += ["--training.loss=crps", "--training.members=2", "--model.noise_dim=2"] * (seed % 3 == 0)
    if seed in OTHERS:
        return [*drawn, f"--optimizer.name={OTHERS[seed]}"]
    drawn += ["--training.global_batch_size", rng.choice(["2", "4"])]
    rollouts = ["--training.rollout_steps", "[1, 2]", "--model.stochastic_depth", "0.3"]  # from step 31 on
    return drawn + rng.choice([[], rollouts])


def test_rollouts_in_stages_go_on_from_any_step(config_file, tmp_path):
    """From the last step of the first stage, and from the middle of the second."""
    options = ["--training.global_batch_size=6", "--training.rollout_steps=[1,2]", "--checkpoint.interval=10"]
    goes_on_exactly(config_file, tmp_path, [*options, "--checkpoint.async_mode=disabled"], [30, 40])


def end(folder: Path) -> tuple[dict[str, torch.Tensor], dict[int, tuple]]:
    """All tensors after the last step, and step -> loss and gradient norm."""
    dcp_to_torch_save(str(step_folder(folder / "checkpoints", STEPS)), folder / "whole.pt")
    return torch.load(folder / "whole.pt"), {r["step"]: (r["loss"], r["grad_norm"]) for r in records(folder)}


@pytest.mark.parametrize("seed", [0, 1, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_every_checkpoint_leads_to_the_same_end(config_file, tmp_path, seed, monkeypatch):
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", (1, 4, 100)[seed % 3])
    options, rng = draw(seed), random.Random(seed)
    goes_on_exactly(config_file, tmp_path, options, [rng.randrange(3 * INTERVAL, STEPS, INTERVAL)])


def goes_on_exactly(config_file: Path, tmp_path: Path, options: list[str], steps: list[int]) -> None:
    """From the checkpoint of each of these steps."""
    run_train(*run_options(config_file, tmp_path / "whole", *options))
    expected, losses = end(tmp_path / "whole")
    for kept in steps:
        folder = tmp_path / f"from-{kept}"
        shutil.copytree(tmp_path / "whole", folder)
        for step in complete_steps(folder / "checkpoints"):
            if step > kept:
                shutil.rmtree(step_folder(folder / "checkpoints", step))
        run_train(*run_options(config_file, folder, *options))
        tensors, again = end(folder)
        assert again == losses, options
        different = [n for n in expected if not np.array_equal(tensors[n], expected[n], equal_nan=True)]
        assert tensors.keys() == expected.keys() and not different, (options, kept, different)


def test_the_draws_reach_what_they_are_for(config_file, tmp_path, caplog, monkeypatch):
    """Skipped spikes and going back, so that the test above is about them."""
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 1)
    with suppress(RuntimeError):
        run_train(*run_options(config_file, tmp_path / "run", "--training.spike_threshold", "4"))
    assert "steps skipped" in caplog.text and "on with other samples" in caplog.text
