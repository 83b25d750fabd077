"""Scores of a validation against numpy in float64, its loss, and the samples of both."""

import numpy as np
import pytest
import torch

from datasets.archive import Archive
from datasets.grid import area_weights
from datasets.loader import FieldDataset
from datasets.selection import Selection
from errors import ConfigError
from tests.sample_archives import NAMES, analyses, training_store, values, weatherbench
from verification.baselines import fit_baselines, persistence
from verification.validation import Scores, Validation

FIELDS = values(analyses())  # (5, V, 6, 8)


def selection_of(archive: Archive) -> Selection:
    dates = np.arange(5)
    return Selection(archive, list(NAMES), {}, np.timedelta64(6 * 3600, "s"), train=dates, validation=dates)


def squared(predicted, truth):
    return (predicted - truth).nan_to_num().square().mean()


def run(
    archive, model=persistence, leads=(1, 2), loss=squared, steps=None, batch_size=2, workers=0
) -> Scores:
    """steps: those that samples have, if they are not the leads."""
    samples = selection_of(archive).samples_by_lead("validation", steps or leads)
    dataset = FieldDataset(archive, NAMES, samples)
    return Validation(dataset, leads, 6, torch.device("cpu"), batch_size, workers).run(model, {}, loss)


def reference_rmse(lead: int) -> np.ndarray:
    """(V,) of persistence, where state and truth have values."""
    state, truth = FIELDS[:-lead].astype("f8"), FIELDS[lead:].astype("f8")
    weights = np.isfinite(truth + state) * area_weights(np.arange(75.0, -80, -30))[:, None]
    squares = np.where(weights > 0, state - truth, 0) ** 2
    return np.sqrt(((weights * squares).sum((2, 3)) / weights.sum((2, 3))).mean(axis=0))


def test_persistence_scores_what_numpy_says_and_a_long_lead_takes_no_dates_from_short_ones(one_rank, archive):
    """Five dates: four have 6 h, two have 18 h; scores at 6 h are those of a run that asks for it alone."""
    scores, alone = run(archive, leads=(1, 3)), run(archive, leads=(1,))
    assert scores.num_dates == [4, 2] and alone.num_dates == [4] and scores.loss == alone.loss
    for row, lead in enumerate((1, 3)):
        np.testing.assert_allclose(scores.values("rmse")[row], reference_rmse(lead), rtol=1e-6)
    np.testing.assert_array_equal(scores.values("rmse")[0], alone.values("rmse")[0])
    table = scores.table()
    assert "validation over 4 initial dates at 6 h, 2 at 18 h" in table
    rows = [line.split()[1:4] for line in table.splitlines() if NAMES[0] in line]
    assert rows == [["6", "h", "4"], ["18", "h", "2"], ["18", "h", "2"]]  # the last in geopotential metres


def test_scores_do_not_depend_on_the_batch_size(one_rank, archive):
    tables = [run(archive, batch_size=n).values("rmse") for n in (1, 2, 3)]
    assert np.array_equal(tables[0], tables[1]) and np.array_equal(tables[1], tables[2])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_samples_do_not_depend_on_how_they_are_read(one_rank, tmp_path, dtype):
    """By this thread and by another one, where a date lacks a variable."""
    ds = analyses()
    ds["2m_temperature"][1] = np.nan
    store = training_store(weatherbench(tmp_path, ds), tmp_path / "store", "--dtype", dtype)
    found, other = (run(store, leads=(1,), workers=workers) for workers in (0, 1))
    assert found.num_dates == other.num_dates == [3] and found.loss == other.loss
    np.testing.assert_array_equal(found.values("rmse"), other.values("rmse"))


def test_a_forecast_equal_to_the_truth_scores_zero_and_nan_is_not_hidden(one_rank, archive):
    def perfect(fields, times, leads):
        start = np.searchsorted(archive.times.astype(int), times)
        return [torch.from_numpy(FIELDS[(start + lead) % 5]).nan_to_num() for lead in leads]

    assert not run(archive, perfect).values("rmse").any()
    broken = run(archive, lambda *args: [fields * torch.nan for fields in perfect(*args)])
    assert np.isnan(broken.values("rmse")).all()


def test_the_loss_is_of_one_step_and_has_the_cells_of_training(one_rank, archive):
    """Also where leads of two steps are scored, and of cells that are missing at the start."""
    seen: list[int] = []

    def forecast(fields, times, steps):
        for number in steps:
            seen.append(number)
            yield fields + number

    scores = [run(archive, forecast, (2,), steps=steps) for steps in ((1, 2), (2,))]
    expected = np.mean([np.nan_to_num(FIELDS[t] + 1 - FIELDS[t + 1]) ** 2 for t in range(4)])
    assert scores[0].loss == pytest.approx(float(expected), rel=1e-5) and 1 in seen
    np.testing.assert_array_equal(scores[0].values("rmse"), scores[1].values("rmse"))
    truths: list[torch.Tensor] = []
    run(archive, loss=lambda predicted, truth: truths.append(truth) or truth.new_zeros(()))
    assert np.isnan(FIELDS[2]).any()
    np.testing.assert_array_equal(torch.cat(truths), FIELDS[1:])


def test_a_factor_does_not_depend_on_other_leads(one_rank, archive):
    """train.py and evaluate.py ask for different leads, and must draw the same damped persistence."""
    selection = selection_of(archive)
    mean = torch.zeros(len(NAMES), 6, 8)
    factors = []
    for leads in ([1], [1, 2, 4]):
        samples = selection.samples_by_lead("train", leads, limit=4)
        fitted = fit_baselines(archive, NAMES, samples, mean, leads)
        factors.append(next(iter(fitted["damped persistence"](mean[None] + 1, torch.zeros(1), [1])))[0])
    assert torch.equal(*factors) and factors[0].abs().max() > 0
    with pytest.raises(ConfigError, match="data.train_period: none of its 5 dates has another 30 hours"):
        selection.samples_by_lead("train", [1, 5])
