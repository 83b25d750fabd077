"""A run that goes on from any of its checkpoints ends with the bits of the run that was not stopped."""

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


ROLLED, DISABLED = "--training.augmentation=roll", "--checkpoint.async_mode=disabled"
PINNED = "--checkpoint.async_mode=async_with_pinned_mem"
CRPS = "--training.loss=crps --training.members=2 --model.noise_dim=2 --training.global_batch_size=4"
STAGES = "--training.rollout_steps=[1,2] --model.stochastic_depth=0.3"  # of two steps from step 31 on
# Options, bad steps before going back, and the steps from which a run goes on.
RUNS = [
    (f"--training.spike_threshold=4 --training.ema_decay=0.9 {ROLLED} {CRPS} {STAGES}", 1, [45]),
    (f"--optimizer.name=LAMB --data.history=2 {DISABLED}", 4, [25]),
    (f"--optimizer.name=Muon --training.ema_decay=0.9 {PINNED}", 4, [30]),
    # From the last step of the first stage, and from the middle of the second.
    (f"--training.global_batch_size=6 {STAGES} --checkpoint.interval=10 {DISABLED}", 100, [30, 40]),
]
SLOW = [
    (f"--data.num_workers=0 --training.global_batch_size=4 {ROLLED} {STAGES}", 100, [15]),
    (f"--data.history=2 {ROLLED} {CRPS} {PINNED}", 1, [30]),
]


def end(folder: Path) -> tuple[dict[str, torch.Tensor], dict[int, tuple]]:
    """All tensors after the last step, and step -> loss and gradient norm."""
    dcp_to_torch_save(str(step_folder(folder / "checkpoints", STEPS)), folder / "whole.pt")
    return torch.load(folder / "whole.pt"), {r["step"]: (r["loss"], r["grad_norm"]) for r in records(folder)}


@pytest.mark.parametrize(
    ("words", "most_skipped", "steps"), [*RUNS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW)]
)
def test_every_checkpoint_leads_to_the_same_end(
    config_file, tmp_path, words: str, most_skipped, steps, monkeypatch
):
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", most_skipped)
    options = ["--checkpoint.async_mode=async", *words.split()]
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
        assert again == losses
        different = [n for n in expected if not np.array_equal(tensors[n], expected[n], equal_nan=True)]
        assert tensors.keys() == expected.keys() and not different, (kept, different)


def test_the_runs_reach_what_they_are_for(config_file, tmp_path, caplog, monkeypatch):
    """Skipped spikes and going back, so that the test above is about them."""
    monkeypatch.setattr("training.bad_steps.MOST_SKIPPED", 1)
    with suppress(RuntimeError):
        run_train(*run_options(config_file, tmp_path / "run", "--training.spike_threshold", "4"))
    assert "steps skipped" in caplog.text and "on with other samples" in caplog.text
