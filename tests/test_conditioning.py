"""Norms of blocks that are told the hour, the season and the lead (models/conditioning.py)."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoints.export import OneStep, export_program
from config import Config, Model
from datasets.conditions import Conditions
from datasets.grid import global_grid
from datasets.normalization import Normalizer
from errors import ConfigError
from models.conditioning import ConditionedTransformer, compute_features
from models.initialization import init_weights
from models.registry import build_model, num_channels
from planning.start_checks import check_model
from planning.workload import architecture_of
from tests.parity import TOLD, Layout, SmallRun, full
from tests.planned import run_forecast, run_train
from tests.started_jobs import write_config
from tests.test_conservation import described, statistics, weather
from verification.rollout import model_forecast, rollout

NAMES = ("time_of_day", "day_of_year", "lead_time")
GRID = global_grid((8, 12))
SMALL = Model(dim=32, num_layers=2, attention_backend="math")


def built(**changes: Any) -> Any:
    """A model of 3 variables, with weights from its seed."""
    model = dataclasses.replace(SMALL, **changes)
    found = build_model(model, 3, num_channels(model.conditions), GRID.shape, True).to_empty(device="cpu")
    init_weights(found, 0)
    return found


def test_it_starts_as_the_model_without(one_rank):
    """To the bit: loss, gradients of what both have, and a forecast."""
    told, plain = (SmallRun(Layout(rollout=2, model=model)) for model in (TOLD, ()))
    assert told.step(0)[0] == plain.step(0)[0]
    more = {name for name in told.gradients if name not in plain.gradients}
    assert more == {f"modulation.{name}.{part}" for name in ("hidden", "out") for part in ("weight", "bias")}
    for name, gradient in plain.gradients.items():
        assert np.array_equal(gradient, told.gradients[name]), name
    assert np.abs(told.gradients["modulation.out.weight"]).max() > 0
    before = {name: full(p) for name, p in told.model.parameters.items()}
    told.step(1)  # the rest learns as soon as the last layer is not zero
    assert np.abs(told.gradients["modulation.hidden.weight"]).max() > 0
    assert not np.array_equal(
        before["modulation.out.weight"], full(told.model.parameters["modulation.out.weight"])
    )


def test_scale_and_shift_are_those_of_the_norms():
    """A scale of 1 and a shift of 1/2 for all: as twice the weights of the norms, and 1/2 added to biases."""
    told, plain = built(conditions=NAMES), built()
    assert isinstance(told, ConditionedTransformer)
    fields = torch.randn(2, 3, *GRID.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        told.modulation.out.bias.view(2, 2, 2, -1).copy_(
            torch.tensor([1.0, 0.5])[:, None].expand(2, 2, 2, 32)
        )
        for block in plain.blocks.values():
            for norm in (block.attention_norm, block.mlp_norm):
                norm.weight.mul_(2)
                norm.bias.mul_(2).add_(0.5)
        numbers = torch.rand(2, 5, 1, 1).expand(-1, -1, *GRID.shape)
        torch.testing.assert_close(told.predict(torch.cat([fields, numbers], dim=1)), plain.predict(fields))


def test_features():
    """Angles as they come; of a lead n / (n + 1), n / (n + 4), ..., which no lead takes beyond 1."""
    numbers = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 4.0], [0.6, 0.8, 1e4]])
    found = compute_features(numbers, ("day_of_year", "lead_time"))
    np.testing.assert_allclose(found[:2], [[0, 1, 0, 0, 0, 0], [1, 0, 0.8, 0.5, 0.2, 4 / 68]], rtol=1e-6)
    assert found.abs().max() <= 1


class Watched:
    """A model that keeps what it is given."""

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        assert torch.equal(inputs[:, -5:], inputs[:, -5:, :1, :1].expand(-1, -1, *GRID.shape))
        self.numbers.append(inputs[:, -5:, 0, 0])
        return inputs[:, :3]


def test_each_step_of_a_forecast_is_told_its_own():
    """From 06 UTC on 31 December 1999, and from 1 July 2000: a quarter of a day and of four leads a step."""
    starts = np.array(["1999-12-31T06", "2000-07-01T06"], "datetime64[s]").astype(np.int64)
    model, conditions = Watched(), Conditions([], [], GRID, single=NAMES)
    start, times = weather(GRID), torch.from_numpy(starts)
    list(
        rollout(
            model, Normalizer(statistics(GRID.shape), "change"), conditions, 21_600, start, times, 4, times
        )
    )
    hour, quarter = np.array([1, 2, 3, 4]) * np.pi / 2, np.arange(4) * 0.25
    for row, days in enumerate((-0.75, 182.25)):  # since 1 January 2000
        season = 2 * np.pi * (days + quarter) / 365.2425
        expected = [np.sin(hour), np.cos(hour), np.sin(season), np.cos(season), np.arange(4)]
        np.testing.assert_allclose(torch.stack(model.numbers)[:, row], np.stack(expected, 1), atol=1e-6)


def test_rollouts_in_training_are_told_the_same(one_rank):
    """First the forecast, then the steps again from the last to the first."""
    run, seen = SmallRun(Layout(rollout=3, model=TOLD)), []
    run.model.parts[0].modulation.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[union-attr, operator]
    run.step(0)
    halves = [float(features[0, 4]) for features in seen]  # n / (n + 1)
    assert halves == pytest.approx([0, 1 / 2, 2 / 3, 1 / 2, 0])
    first = 21_600 * run.order.local_batch(0, 0)[0] % 86_400 / 86_400
    hours = [float(features[0, 0]) for features in seen]
    expected = [np.sin(2 * np.pi * (first + 0.25 * lead)) for lead in (0, 1, 2, 1, 0)]
    np.testing.assert_allclose(hours, expected, atol=1e-6)


def test_an_exported_program_takes_the_step(tmp_path):
    model, conditions = built(conditions=NAMES), Conditions([], [], GRID, single=NAMES)
    with torch.no_grad():
        model.modulation.out.weight.normal_(0, 1.0, generator=torch.Generator().manual_seed(1))
    normalizer, start = Normalizer(statistics(GRID.shape), "change"), weather(GRID, 3)
    times = torch.full((3,), 946_684_800)
    with torch.no_grad():
        one_step = OneStep(model, normalizer, conditions)
        export_program(tmp_path / "step.pt2", one_step, described(one_step, GRID))
        program, state, wrong = torch.export.load(tmp_path / "step.pt2").module(), start, start
        for step in range(2):
            date = times + 21_600 * step
            state = program(state, date, steps=torch.full((3,), step))
            wrong = program(wrong, date, steps=torch.zeros(3, dtype=torch.int64))
        forecast = model_forecast(model.predict, normalizer, conditions, 21_600)(start, times, [2])[:, 0]
    deviation = normalizer.std * normalizer.change_scale
    torch.testing.assert_close(state / deviation, forecast / deviation, atol=1e-3, rtol=1e-6)
    assert ((wrong - forecast) / deviation).abs().max() > 0.01


def test_the_planner_counts_it():
    model = dataclasses.replace(SMALL, conditions=NAMES)
    counted = sum(parameter.numel() for parameter in built(conditions=NAMES).parameters())
    assert architecture_of(model, GRID.shape, 3, 3).parameters == counted


def test_a_model_that_is_told_more_passes_the_checks_of_a_start():
    check_model(Config(model=dataclasses.replace(SMALL, conditions=NAMES)), GRID)


@pytest.mark.slow
def test_a_run_begins_with_weights_that_were_trained_without(tmp_path, caplog):
    """And its forecasts are told the lead; a forecast by a model that is told nothing is refused."""
    plain = ["--job.config_file", str(write_config(tmp_path)), "--training.steps", "2"]
    run_train(*plain, "--job.dump_folder", str(tmp_path / "plain"))
    told = [*plain, "--job.dump_folder", str(tmp_path / "told"), "--training.rollout_steps", "[2]"]
    told += ["--model.conditions", str(list(NAMES)).replace("'", '"')]
    run_train(*told, "--checkpoint.initial_load_path", str(tmp_path / "plain"))
    assert "weights that are not there, initialised: modulation.hidden.bias" in caplog.text
    told += ["--forecast.num_steps", "2", "--forecast.period", '["2020-01-07", "2020-01-07T00"]']
    run_forecast(told, tmp_path / "f.zarr")
    with pytest.raises(ConfigError, match=r"model.conditions = \[\]: .* was trained with \['time_of_day'"):
        run_forecast(told, tmp_path / "f.zarr", "--model.conditions", "[]")
