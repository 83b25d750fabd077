"""The sweep of the learning rate: what it takes, where it stops, what it suggests, what it leaves behind."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from datasets.selection import open_selection
from tests.sample_archives import weatherbench
from train import train
from training.config_checks import load_checked
from training.journal import read_records
from training.optimizers.lr_range import (
    MARGIN,
    WINDOW,
    Sweep,
    Trial,
    for_a_sweep,
    has_blown_up,
    main,
    scaling,
    smoothed,
    suggestion,
    sweep_losses,
)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A wave that travels east for 30 days, and a small model for it."""
    time = np.datetime64("2020-01-01", "ns") + np.arange(120) * np.timedelta64(6, "h")
    latitude, longitude = np.arange(75.0, -90, -30.0), np.arange(0, 360, 22.5)
    phase = 2 * np.deg2rad(longitude)[None, None] + 0.4 * np.arange(120)[:, None, None]
    wind = 10 * np.cos(np.deg2rad(latitude))[None, :, None] * np.sin(phase)
    axes = {"time": time, "latitude": latitude, "longitude": longitude}
    wind += np.random.default_rng(0).normal(0, 0.1, wind.shape)
    dataset = xr.Dataset({"10m_u_component_of_wind": (tuple(axes), wind.astype("f4"))}, axes)
    path = tmp_path / "tiny.toml"
    path.write_text(f"""
[job]
dump_folder = "{tmp_path / "run"}"
[data]
path = "{weatherbench(tmp_path, dataset)}"
variables = ["10m_u_component_of_wind"]
train_period = ["2020-01-01", "2020-01-20"]
validation_period = ["2020-01-21", "2020-01-30"]
[model]
attention_backend = "math"
patch_size = [2, 2]
dim = 16
num_layers = 1
num_heads = 1
[optimizer]
lr_reference_batch_size = 2
[training]
steps = 1
local_batch_size = 8
[metrics]
log_freq = 1
enable_tensorboard = false
[validation]
enable = false
""")
    return path


def test_a_sweep(config_file: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("training.optimizers.lr_range.ROWS", 60)
    train(load_checked(["--job.config_file", str(config_file)]))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    capsys.readouterr()
    main([str(config_file), "--steps", "60", "--lowest", "1e-4", "--highest", "100"])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    own = tmp_path / "run-lr_range"
    assert (own / "lr_range.png").stat().st_size > 5000 and not (own / "checkpoints").exists()
    said = capsys.readouterr().out
    rows = [[float(word) for word in line.split()] for line in re.findall(r"^ *\d+ .*", said, re.MULTILINE)]
    assert 20 < len(rows) < 60 and rows[-1][2] > 1.5 * min(loss for _, _, loss in rows)  # stopped
    suggested = float(re.findall(r"suggested: --optimizer.lr (\S+) ", said)[0])
    assert 1e-4 < suggested < 0.1
    best = min(rows, key=lambda row: row[2])[1]
    assert suggested == pytest.approx(best / MARGIN / 4, rel=0.1)  # linear: 8 samples a step, not 2


def test_its_first_step_is_the_runs(config_file: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("training.optimizers.lr_range.WINDOW", 1)
    train(load_checked(["--job.config_file", str(config_file)]))
    capsys.readouterr()
    main([str(config_file), "--steps", "10", "--lowest", "1e-9", "--highest", "1e-8"])
    first = re.findall(r"^ *1 +1.0e-09 +(\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert float(first[0]) == pytest.approx(read_records(tmp_path / "run/metrics.jsonl")[0]["loss"], abs=5e-6)


def losses_on_ranks(argv: list[str]) -> list[float]:
    config = for_a_sweep(load_checked(argv))
    trial = Trial(config, open_selection(config.data, config.model.patch_size, ()), torch.device("cpu"))
    return sweep_losses(trial, Sweep(12, 1e-3, 1e-2))


@pytest.mark.slow
def test_two_ranks_sweep_as_one(config_file: Path, one_rank, ranks) -> None:
    argv = [f"--job.config_file={config_file}"]
    expected = losses_on_ranks([*argv, f"--job.dump_folder={config_file.parent / 'one'}"])
    for found in ranks(2).run(losses_on_ranks, [*argv, "--training.local_batch_size=4"]):
        assert found == pytest.approx(expected, rel=1e-5) and len(found) == 12


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "3"], "--steps = 3: at least 10 expected"),
        (
            ["--lowest", "0.1", "--highest", "0.01"],
            "--lowest = 0.1: a rate above 0 and below --highest = 0.01",
        ),
        (["--lowest", "x"], "--lowest: 'x': number expected"),
        (["--training.step", "3"], "training.step: unknown key in the command line; did you mean"),
        (["absent.toml"], "job.config_file = absent.toml: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    lines = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(lines) == 1 and said in lines[0]


def test_rates_are_a_geometric_series() -> None:
    rates = [Sweep(5, 1e-4, 1.0).rate(step) for step in range(1, 6)]
    assert rates == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


def test_what_blows_up() -> None:
    falling = [1.0 - 0.02 * i for i in range(40)]
    assert not any(has_blown_up(falling[:n]) for n in range(1, 41))
    assert has_blown_up([*falling, math.nan]) and has_blown_up([*falling, *[0.6] * WINDOW])
    assert not has_blown_up([*falling, 0.6])  # one step is no trend


def test_suggestions() -> None:
    rates = [1e-5 * 1.5**i for i in range(30)]
    valley = [1.0 + 0.1 * abs(i - 20) for i in range(30)]
    assert smoothed(valley).index(min(smoothed(valley))) == 20
    assert suggestion(rates, valley, True)[0] == pytest.approx(rates[20] / MARGIN)
    assert suggestion(rates, [30.0 - i for i in range(30)], True)[1].endswith("raise --highest")
    assert suggestion(rates, [1.0 + i for i in range(30)], False)[1].startswith("the loss never fell")
    assert suggestion([], [], False)[0] is None


def test_a_rate_that_grows_with_the_batch() -> None:
    root = ["--optimizer.lr_reference_batch_size=64", "--optimizer.lr_scaling=sqrt", "--optimizer.lr_max=0.1"]
    assert scaling(load_checked(root), 256) == pytest.approx(2.0)
    assert scaling(load_checked([]), 256) == 1.0
