"""Scores and baselines against numpy in float64."""

import numpy as np
import pytest
import torch

from datasets.archive import open_archive
from datasets.convert import main
from datasets.grid import area_weights
from datasets.loader import FieldDataset, Loader
from datasets.selection import Selection
from errors import ConfigError
from tests.sample_archives import NAMES, analyses, values, weatherbench
from verification.baselines import fit_baselines, persistence
from verification.validation import Validation

SAMPLES = np.array([[0, 1, 2], [1, 2, 3], [2, 3, 4]])  # the state, and the truth after 6 and 12 h


@pytest.fixture
def dataset(tmp_path):
    return FieldDataset(open_archive(weatherbench(tmp_path, analyses())), NAMES, SAMPLES)


@pytest.fixture
def area(dataset):
    return torch.tensor(area_weights(dataset.archive.grid.latitude), dtype=torch.float32)


def reference_rmse(forecast: np.ndarray, lead: int, area: np.ndarray) -> np.ndarray:
    """(V,): forecast (n, V, H, W) of the samples against the truth of a lead, where state and truth have
    values.
    """
    fields = values(analyses()).astype(np.float64)
    state, truth = fields[SAMPLES[:, 0]], fields[SAMPLES[:, lead]]
    weights = np.isfinite(truth + state) * area[:, None]
    squares = np.where(weights > 0, forecast - truth, 0) ** 2
    return np.sqrt(((weights * squares).sum((2, 3)) / weights.sum((2, 3))).mean(axis=0))


def run(dataset, area, model, batch_size=2, **baselines):
    validation = Validation(dataset, [1, 2], 6, area.device, batch_size)
    return validation.run(
        model, baselines, lambda predicted, truth: (predicted - truth).nan_to_num().abs().mean()
    )


def test_persistence_scores_what_numpy_says(one_rank, dataset, area):
    scores = run(dataset, area, persistence)
    state = values(analyses()).astype(np.float64)[SAMPLES[:, 0]]
    for lead in (1, 2):
        expected = reference_rmse(state, lead, area.double().numpy())
        np.testing.assert_allclose(scores.values("rmse")[lead - 1], expected, rtol=1e-6)


def test_the_loss_has_the_cells_of_training(one_rank, dataset, area):
    """Also those that are missing at the start, which have no score."""
    seen = []
    Validation(dataset, [1, 2], 6, area.device, 2).run(
        persistence, {}, lambda predicted, truth: seen.append(truth) or truth.new_zeros(())
    )
    assert dataset.__getitems__([2])[0][0, 0].isnan().any()
    np.testing.assert_array_equal(torch.cat(seen), values(analyses())[SAMPLES[:, 1]])


def test_scores_do_not_depend_on_the_batch_size(one_rank, dataset, area):
    tables = [run(dataset, area, persistence, batch_size=n).values("rmse") for n in (1, 2, 3)]
    assert np.array_equal(tables[0], tables[1]) and np.array_equal(tables[1], tables[2])


def test_a_forecast_equal_to_the_truth_scores_zero_and_nan_is_not_hidden(one_rank, dataset, area):
    truth = torch.from_numpy(values(analyses()))

    def perfect(fields, times, leads):
        start = [int(np.searchsorted(dataset.archive.times.astype(int), t)) for t in times.tolist()]
        return [truth[[s + lead for s in start]].nan_to_num() for lead in leads]

    assert not run(dataset, area, perfect).values("rmse").any()
    broken = run(dataset, area, lambda *args: [fields * torch.nan for fields in perfect(*args)])
    assert np.isnan(broken.values("rmse")).all()


def test_damped_persistence_is_the_least_squares_fit(one_rank, dataset, area):
    mean_field = torch.from_numpy(np.nanmean(values(analyses()), axis=0))
    forecasts = fit_baselines(dataset.archive, NAMES, SAMPLES, mean_field, [1, 2])
    fields = values(analyses()).astype(np.float64) - mean_field.double().numpy()
    state, weights = fields[SAMPLES[:, 0]], area.double().numpy()[:, None]
    for row, lead in enumerate((1, 2)):
        truth = fields[SAMPLES[:, lead]]
        for v in range(len(NAMES)):
            both = np.isfinite(state[:, v] + truth[:, v])
            w = np.broadcast_to(weights, both.shape)[both]
            x, y = state[:, v][both], truth[:, v][both]
            a = np.linalg.lstsq((np.sqrt(w) * x)[:, None], np.sqrt(w) * y, rcond=None)[0][0]
            ones = mean_field[None] + 1.0
            by_lead = list(forecasts["damped persistence"](ones, torch.zeros(1), [1, 2]))
            got = by_lead[row][0, v] - mean_field[v]
            np.testing.assert_allclose(got.nan_to_num(a).numpy(), a, rtol=2e-4, atol=1e-6)


def test_a_long_lead_takes_no_dates_from_short_ones(one_rank, tmp_path, area):
    """Five dates: four have 6 h, two have 18 h; scores at 6 h are those of a run that asks for it alone."""
    archive = open_archive(weatherbench(tmp_path / "all", analyses()))
    dates = np.arange(5)
    step = np.timedelta64(6 * 3600, "s")
    selection = Selection(archive, list(NAMES), {}, step, train=dates, validation=dates)
    scores = {}
    for leads in ([1], [1, 3]):
        samples = selection.samples_by_lead("validation", leads)
        validation = Validation(FieldDataset(archive, NAMES, samples), leads, 6, area.device, batch_size=2)
        scores[len(leads)] = validation.run(
            persistence, {}, lambda p, t: (p - t).nan_to_num().square().mean()
        )
    assert scores[1].num_dates == [4] and scores[2].num_dates == [4, 2]
    assert np.array_equal(scores[1].values("rmse")[0], scores[2].values("rmse")[0])
    assert scores[1].loss == scores[2].loss
    fields = values(analyses()).astype(np.float64)
    np.testing.assert_allclose(
        scores[2].values("rmse")[1, 0],
        np.sqrt((((fields[3:, 0] - fields[:2, 0]) ** 2) * area.double().numpy()[:, None]).mean()),
        rtol=1e-6,
    )
    said = scores[2].table()
    assert "validation over 4 initial dates at 6 h, 2 at 18 h" in said
    assert [line.split()[1:4] for line in said.splitlines() if NAMES[0] in line] == [
        ["6", "h", "4"],
        ["18", "h", "2"],
        ["18", "h", "2"],  # in geopotential metres
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_samples_do_not_depend_on_how_they_are_read(one_rank, tmp_path, area, dtype):
    """From files and from a store, by this thread and by another one, where a date lacks a variable."""
    ds = analyses()
    ds["2m_temperature"][1] = np.nan
    (tmp_path / "all").mkdir()
    source, step = weatherbench(tmp_path / "all", ds), np.timedelta64(6 * 3600, "s")
    assert main([source, str(tmp_path / "store"), "--dtype", dtype]) == 0
    found = []
    for path, workers in ((source, 0), (source, 1), (tmp_path / "store", 0), (tmp_path / "store", 1)):
        archive, dates = open_archive(str(path)), np.arange(5)
        selection = Selection(archive, list(NAMES), {}, step, train=dates, validation=dates)
        dataset = FieldDataset(archive, NAMES, selection.samples_by_lead("validation", [1]))
        validation = Validation(dataset, [1], 6, area.device, 2, workers)
        scores = validation.run(persistence, {}, lambda p, t: (p - t).nan_to_num().square().mean())
        batches = [dataset.unpack(fields) for fields, _ in Loader(dataset, validation.batches)]
        later = torch.cat(batches)[:, 1]
        assert later.isfinite().flatten(1).any(1).tolist() == [True, False, True, True]
        found.append((scores.num_dates, scores.loss, scores.values("rmse").tolist()))
    assert found[0] == found[1] and found[2] == found[3] and found[0][0] == found[2][0] == [3]


def test_a_factor_does_not_depend_on_other_leads(one_rank, tmp_path, area):
    """train.py and evaluate.py ask for different leads, and must draw the same damped persistence."""
    archive = open_archive(weatherbench(tmp_path / "all", analyses()))
    dates, mean = np.arange(5), torch.zeros(len(NAMES), 6, 8)
    step = np.timedelta64(6 * 3600, "s")
    selection = Selection(archive, list(NAMES), {}, step, train=dates, validation=dates)
    factors = []
    for leads in ([1], [1, 2, 4]):
        samples = selection.samples_by_lead("train", leads, limit=4)
        fitted = fit_baselines(archive, NAMES, samples, mean, leads)
        forecast = fitted["damped persistence"](mean[None] + 1, torch.zeros(1), [1])
        factors.append(next(iter(forecast))[0])
    assert torch.equal(*factors) and factors[0].abs().max() > 0
    with pytest.raises(ConfigError, match="data.train_period: none of its 5 dates has another 30 hours"):
        selection.samples_by_lead("train", [1, 5])


def test_the_loss_is_of_one_step_whatever_the_leads(one_rank, tmp_path, area):
    """As in training, where leads of two steps are scored; their scores do not depend on it."""
    (tmp_path / "one").mkdir()
    archive = open_archive(weatherbench(tmp_path / "one", analyses()))
    dates, step = np.arange(5), np.timedelta64(6 * 3600, "s")
    selection = Selection(archive, list(NAMES), {}, step, train=dates, validation=dates)
    seen: list[int] = []

    def forecast(fields, times, steps):
        for number in steps:
            seen.append(number)
            yield fields + number

    def loss(predicted, truth):
        return (predicted - truth).nan_to_num().square().mean()

    scores = []
    for steps in ([1, 2], [2]):
        dataset = FieldDataset(archive, NAMES, selection.samples_by_lead("validation", steps))
        validation = Validation(dataset, [2], 6, area.device, 2)
        scores.append(validation.run(forecast, {}, loss))
    fields = values(analyses())
    expected = np.mean([np.nan_to_num(fields[t] + 1 - fields[t + 1]) ** 2 for t in range(4)])
    assert scores[0].loss == pytest.approx(float(expected), rel=1e-5) and 1 in seen
    np.testing.assert_array_equal(scores[0].values("rmse"), scores[1].values("rmse"))
