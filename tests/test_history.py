"""A model that sees a window of states: forecasts, gradients, samples and refusals, written out here."""

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from config import Data
from datasets.channels import Channels
from datasets.conditions import Conditions
from datasets.grid import area_weights, global_grid
from datasets.loader import split_sample
from datasets.normalization import Normalizer
from datasets.selection import open_selection
from errors import UserError
from models.noise import noise_keys
from tests import parity
from tests.forecasts import plain_forecast
from tests.parity import Layout, SmallRun, difference
from tests.planned import run_forecast, run_train
from tests.started_jobs import LATITUDE, LONGITUDE, run_options, small_dataset, write_config
from training.assembly import Fields
from training.config_checks import load_checked
from verification.rollout import model_forecast, rollout

U, V = "10m_u_component_of_wind", "10m_v_component_of_wind"
FREQUENCY = 0.7  # radians a step
MISSING = np.datetime64("2020-02-05T12")  # a date that is not there
EMPTY = np.datetime64("2020-02-06T18")  # V has no value there
HOLED = np.datetime64("2020-02-03T06")  # V lacks a cell there
STEP = np.timedelta64(6, "h")
SECTIONS: dict[str, Any] = {
    "data": {
        "train_period": ["2020-01-01", "2020-01-31"],
        "validation_period": ["2020-02-01", "2020-02-09"],
        "history": 2,
    },
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"warmup_steps": 10, "decay_type": "cosine"},
    "training": {"steps": 200, "local_batch_size": 8},
    "metrics": {"log_freq": 100},
    "checkpoint": {"interval": 100, "async_mode": "disabled"},
    "validation": {"enable": True, "lead_hours": [6, 12], "plots": False},
    "forecast": {"num_steps": 2},
}


@pytest.fixture(scope="module")
def config_file(tmp_path_factory) -> Path:
    """A standing wave: where it stands does not say which way it goes."""
    folder = tmp_path_factory.mktemp("history")
    pattern = np.cos(np.deg2rad(LATITUDE))[:, None] * np.sin(np.deg2rad(2 * LONGITUDE))
    wave = 10 * np.cos(FREQUENCY * np.arange(160))[:, None, None] * pattern
    ds = small_dataset({U: wave, V: 3 - 0.5 * wave})
    ds[V].loc[{"time": EMPTY}] = np.nan
    ds[V].loc[{"time": HOLED, "latitude": 45.0, "longitude": 90.0}] = np.nan
    return write_config(folder, ds.drop_sel(time=MISSING), **SECTIONS)


def run(config_file: Path, folder: Path, *options: str) -> dict[str, float]:
    """A training in this process; what its validation has found."""
    return run_train(*run_options(config_file, folder, *options))[-1]


@pytest.fixture(scope="module")
def trained(config_file, tmp_path_factory) -> tuple[Path, dict[str, float]]:
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, run(config_file, folder)


# -- the model, applied to itself


@pytest.mark.parametrize("predict", ["state", "change"])
def test_an_oscillation_is_forecast_from_two_states(predict) -> None:
    """x(t + 1) = 2 cos(w) x(t) - x(t - 1), which no function of x(t) alone can say."""
    channels = Channels(("a", "b"), history=2)
    statistics = parity.fields_of((4, 8), ("a", "b")).statistics
    normalizer = Normalizer(replace(statistics, change_std=np.full(2, 0.5)), predict, channels)
    conditions = Conditions([], channels, global_grid((4, 8)))

    def predicted(inputs: Tensor) -> Tensor:
        now, before = inputs[:, :2], inputs[:, 2:]
        change = 2 * np.cos(FREQUENCY) * now - before - now
        return now + change if predict == "state" else change / 0.5

    phase = torch.rand(3, 2, 4, 8, generator=torch.Generator().manual_seed(0)).double()
    start = torch.cat([torch.cos(phase), torch.cos(phase - FREQUENCY)], dim=1).float()
    times = torch.zeros(3, dtype=torch.int64)
    windows = list(rollout(predicted, normalizer, conditions, 3600, start, times, 20))
    for step, window in enumerate(windows, 1):
        expected = torch.cos(phase + step * FREQUENCY).float()
        torch.testing.assert_close(window[:, :2], expected, atol=1e-4, rtol=0)
        assert step == 1 or torch.equal(window[:, 2:], windows[step - 2][:, :2])
    found = list(model_forecast(predicted, normalizer, conditions, 3600)(start, times, [2, 5]))
    assert [fields.shape for fields in found] == [(3, 2, 4, 8)] * 2
    torch.testing.assert_close(found[1], torch.cos(phase + 5 * FREQUENCY).float(), atol=1e-5, rtol=0)


def test_two_states_say_where_a_standing_wave_goes(trained) -> None:
    """From one, the best guess errs by sin(w) times the deviation of the wave."""
    deviation = trained[1][f"val/rmse_training_mean/{U}"]
    assert trained[1][f"val/rmse/{U}"] < 0.2 * np.sin(FREQUENCY) * deviation


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_forecasts_are_those_of_a_plain_loop(config_file, trained, tmp_path, caplog, capsys) -> None:
    """From dates of which the newest state or the one before lacks a cell, too."""
    with caplog.at_level(logging.INFO, "datasets.selection"):
        words = run_options(config_file, trained[0], "--forecast.num_steps", "4")
        found = run_forecast(words, tmp_path / "f.zarr", code=1)
    said = capsys.readouterr().err
    archive = xr.open_zarr(config_file.parent / "wb.zarr")
    for date in (np.datetime64("2020-02-01"), HOLED, HOLED + STEP):
        window = [[archive[n].sel(time=t).values for n in (U, V)] for t in (date, date - STEP)]
        expected = plain_forecast(trained[0], (200, "model"), window, 4)
        for v, name in enumerate((U, V)):
            np.testing.assert_allclose(found[name].sel(time=date), expected[:, v], atol=1e-4)
    # Left out, and counted: the date after the one that is missing. Said at the end: what lacks V.
    assert len(found.time) == 36 - 1 - 1 and MISSING + STEP not in found.time.values
    assert "forecast.period: 1 dates left out: the data lack some of the data.history = 2" in caplog.text
    wrong = found.time.values[found[U].isnull().all(("prediction_timedelta", "latitude", "longitude"))]
    assert (wrong == np.array([EMPTY, EMPTY + STEP], "M8[ns]")).all()
    assert f"no value of {V}" in said and f"no value of {V} 6 h before" in said


# -- what is refused


def test_a_wanted_date_without_its_past_is_named(config_file, trained, tmp_path) -> None:
    words, path = run_options(config_file, trained[0], "--forecast.period"), tmp_path / "f.zarr"
    with pytest.raises(UserError, match=r"can start from 2020-02-05T18:00:00: .*data.history = 2"):
        run_forecast([*words, '["2020-02-05T18", "2020-02-06"]', "--forecast.interval_hours", "6"], path)
    with pytest.raises(UserError, match=r"forecast.period = .*no forecast can start from 2020-01-01"):
        run_forecast([*words, '["2020-01-01", "2020-01-01T00"]'], path)


# -- samples


def test_windows_keep_to_their_period_and_make_nothing_of_gaps(config_file) -> None:
    data: Data = load_checked(run_options(config_file, Path("unused"))).data
    for history in (1, 2, 3):
        selection = open_selection(replace(data, history=history), (1, 1), ())
        times = selection.archive.times
        period = set(times[selection.validation])
        window = [-number * STEP for number in range(history)]
        expected = [
            [t + each for each in [*window, STEP, 2 * STEP]]
            for t in sorted(period)
            if {t + each for each in [*window, STEP, 2 * STEP]} <= period
        ]
        rows = selection.samples("validation", [1, 2])
        assert rows.shape[1] == history + 2  # with a history of 1 what there was before, and no date more
        np.testing.assert_array_equal(times[rows], np.array(expected))
        a_lead = selection.samples_by_lead("validation", [1, 4], history=history)
        starts = [t for t in sorted(period) if {t + each for each in window} <= period]
        some = [t for t in starts if {t + STEP, t + 4 * STEP} & period]
        np.testing.assert_array_equal(times[a_lead[:, 0]], some)
        lacking = [[t + lead * STEP not in period for lead in (1, 4)] for t in some]
        np.testing.assert_array_equal(a_lead[:, history:] < 0, lacking)
        assert selection.samples_by_lead("train", [1]).shape[1] == 2


# -- gradients

THIRDS = [1 / 3] * 3
MEAN, STD, CHANGE = (1.0, -2.0, 0.5), (2.0, 1.0, 0.5), (0.5, 2.0, 1.0)


def fields_with_moments(grid: tuple[int, int], *variables: tuple[str, ...]) -> Fields:
    mean, std, change = (np.array(numbers) for numbers in (MEAN, STD, CHANGE))
    plain = PLAIN_FIELDS(grid)
    return replace(plain, statistics=replace(plain.statistics, mean=mean, std=std, change_std=change))


PLAIN_FIELDS = parity.fields_of


def loss_in_one_graph(run: SmallRun, fields: Tensor, shares: list[float]) -> tuple[Tensor, dict]:
    """Of physical fields (B, h + R, V, H, W), in float64, and its gradients, all of it written out here."""
    mean, std, change = (torch.tensor(n).double()[:, None, None] for n in (MEAN, STD, CHANGE))
    model, objective, members = deepcopy(run.model.meta_model).double(), run.objective, run.layout.members
    area = torch.from_numpy(area_weights(objective.conditions.latitude.numpy())).double()
    static, history = objective.conditions.static.double(), run.layout.history
    times, number_of = run.batches(0)[0].times.repeat_interleave(members), torch.arange(members)
    keys = noise_keys(0, 1, times, number_of.repeat(len(fields)))
    if run.layout.roll:  # each sample by a number of columns, and some mirrored
        _, shifts = objective.augment(fields, keys)
        assert shifts is not None
        turns = [(shift, [-2] * (shift >= fields.shape[-1])) for shift in shifts[::members].tolist()]
        fields = torch.stack([x.roll(n, -1).flip(image) for x, (n, image) in zip(fields, turns, strict=True)])
        static = torch.stack([static.roll(n, -1).flip(image) for n, image in turns])
        static = static.flatten(0, -4).repeat_interleave(members, 0)
    seen, variable_weights = torch.ones(3, 1, 1), torch.tensor((1, 2, 0.5)) / 3
    if run.layout.roles:  # the second is diagnostic, the third a forcing
        seen[1], change[1] = 0, std[1]
        variable_weights = torch.tensor((1, 2, 0)) / 2
    edge = torch.zeros(fields.shape[-2:], dtype=torch.bool)
    if run.layout.boundary:
        edge[[0, -1]], edge[:, [0, -1]] = True, True
    normalised = ((fields.double() - mean) / std).repeat_interleave(members, 0)
    states, loss = [normalised[:, number].nan_to_num() for number in range(history)], torch.zeros(())
    for number, share in enumerate(shares):
        truth = normalised[:, history + number]
        known = edge & truth.isfinite()
        given = [state * seen for state in states]
        ahead = torch.where(known, truth, 0)[:, : 2 if run.layout.roles else 3]
        given += [ahead] * run.layout.boundary
        forcing = torch.where(truth.isnan(), states[0], truth)[:, 2:]
        given += [forcing] * run.layout.roles  # of the target, too
        date = times + number * objective.step_seconds
        given += [static.expand(len(times), -1, -1, -1)]
        if objective.conditions.noise:  # each member has its own, new at each step
            given += [objective.conditions.noise.draw(keys, date).double()]
        dropped = objective.drop_keys(keys, date)
        output = model.predict(torch.cat(given, dim=1), *([] if dropped is None else [dropped]))
        if run.layout.conserve:  # the first two are surface pressure and vapour
            pressure, vapour = ((output * change * area[:, None]).mean((-2, -1)) / area.mean()).unbind(1)[:2]
            shift = torch.zeros_like(change)
            shift[0] = 1 / change[0]
            output = output - (pressure - 9.80665 * vapour)[:, None, None, None] * shift
        new = output if objective.normalizer.predict == "state" else given[0] + change / std * output
        new = torch.where(known, truth, new)
        if run.layout.roles:
            new = torch.cat([new[:, :2], forcing], dim=1)
        states = [new, *states[:-1]]
        weights = (truth.isfinite() & ~edge) * area[:, None]
        weights = weights / weights.sum((-2, -1), keepdim=True)
        error = (new - truth.nan_to_num()).unflatten(0, (-1, members))
        if members > 1:  # the almost fair CRPS of Lang et al. 2024
            apart = (error[:, :, None] - error[:, None]).abs().sum(dim=(1, 2)) / (2 * members * (members - 1))
            costs = error.abs().mean(dim=1) - (1 - 0.05 / members) * apart
        else:
            costs = error[:, 0].abs() if run.layout.loss == "mae" else error[:, 0].square()
        means = (weights[::members] * costs).sum((-2, -1))  # (B, V)
        means = means.sqrt() if run.layout.loss == "rmse" else means
        loss = loss + share * (means * variable_weights).sum() / len(fields)
    loss.backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return loss, found


@pytest.mark.parametrize(
    ("layout", "shares"),
    [
        (Layout(history=2), [1.0]),
        (Layout(history=2, rollout=3), THIRDS),
        (Layout(history=3, rollout=3), THIRDS),
        (Layout(history=2, rollout=3, model=(("predict", "state"),)), THIRDS),
        (Layout(history=2, rollout=3, unet=True), THIRDS),
        (Layout(history=2, rollout=3, roles=True), THIRDS),
        (Layout(boundary=True), [1.0]),
        (Layout(history=2, rollout=3, boundary=True), THIRDS),
        (Layout(rollout=3, boundary=True, model=(("predict", "state"),)), THIRDS),
        (Layout(rollout=3, roles=True, boundary=True), THIRDS),
        (Layout(rollout=3), THIRDS),
        (Layout(rollout=3, model=(("stochastic_depth", 0.5),)), THIRDS),
        (Layout(rollout=3, conserve=True), THIRDS),
        (Layout(rollout=3, members=3), THIRDS),
        (Layout(history=3, rollout=3, members=3), THIRDS),
        (Layout(loss="mae"), [1.0]),
        (Layout(loss="rmse", rollout=3), THIRDS),
        (Layout(loss="rmse", unet=True), [1.0]),
        (Layout(roll=True, history=2, rollout=3), THIRDS),
        (Layout(roll=True, unet=True), [1.0]),
        (Layout(roll=True, rollout=3, members=3), THIRDS),
        (Layout(roll=True, rollout=3, roles=True), THIRDS),
        (Layout(roll=True, rollout=3, conserve=True), THIRDS),
    ],
)
def test_gradients_are_those_of_one_graph(one_rank, monkeypatch, layout, shares) -> None:
    monkeypatch.setattr(parity, "fields_of", fields_with_moments)
    model = () if layout.unet else (("attention_backend", "math"), *layout.model)
    layout = replace(layout, grid=(11, 10), model=model)  # patches of 4 x 4 do not divide it
    run, plain = (SmallRun(layout) for _ in range(2))
    fields = plain.batches(0)[0][0]
    assert split_sample(fields, layout.history)[1].shape[1] == len(shares)
    expected, gradients = loss_in_one_graph(plain, fields, shares)
    loss, _ = run.step(0)
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    assert difference(run.gradients, gradients)[0] < 1e-5
