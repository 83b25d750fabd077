"""Physical fields to normalised ones and back."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from datasets.grid import area_weights
from datasets.normalization import Normalizer
from datasets.statistics import Source, compute
from tests.sample_archives import NAMES, analyses, values

STEP = np.timedelta64(6 * 3600, "s")


@pytest.mark.parametrize("predict", ["state", "change"])
def test_normalizer(archive, predict):
    statistics = compute(Source(archive, NAMES, np.arange(5), STEP, area_weights(archive.grid.latitude)))
    normalizer = Normalizer(statistics, predict)
    fields = torch.from_numpy(values(analyses()))
    state, mask = normalizer.normalize(fields)
    assert torch.isfinite(state).all() and torch.equal(mask, torch.isfinite(fields))
    assert not state[~mask].any()
    torch.testing.assert_close(normalizer.denormalize(state)[mask], fields[mask], rtol=1e-5, atol=1e-5)
    output = torch.ones_like(state)
    change = normalizer.denormalize(normalizer.advance(state, output)) - normalizer.denormalize(state)
    if predict == "change":  # an output of 1 is one standard deviation of the change
        expected = torch.tensor(statistics.change_std, dtype=torch.float32).view(-1, 1, 1).expand_as(change)
        torch.testing.assert_close(change, expected, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(normalizer.advance(state, output), output)


def test_logarithms(archive):
    """Moments are those of log(1 + x / s), negative values as 0; the mean field is of the values."""
    scales, area = [0.0] * (len(NAMES) - 1) + [0.5], area_weights(archive.grid.latitude)
    source = Source(archive, NAMES, np.arange(5), STEP, area)
    plain, statistics = compute(source), compute(replace(source, scales=scales))
    fields = values(analyses())
    logs = np.log1p(np.maximum(fields[:, -1], 0).astype(float) / 0.5)
    weights = np.broadcast_to(area[:, None], logs.shape) * np.isfinite(logs)
    mean = np.nansum(weights * logs) / weights.sum()
    std = np.sqrt(np.nansum(weights * (logs - mean) ** 2) / weights.sum())
    np.testing.assert_allclose([statistics.mean[-1], statistics.std[-1]], [mean, std], rtol=1e-6)
    np.testing.assert_array_equal(statistics.mean[:-1], plain.mean[:-1])
    np.testing.assert_array_equal(statistics.mean_field, plain.mean_field)
    assert statistics.fingerprint != plain.fingerprint
    normalizer = Normalizer(statistics, "state", log_scales=scales)
    state, mask = normalizer.normalize(torch.from_numpy(fields))
    expected = torch.from_numpy(fields)
    expected[:, -1].clamp_(min=0)
    torch.testing.assert_close(normalizer.denormalize(state)[mask], expected[mask], rtol=1e-5, atol=1e-5)
    assert normalizer.denormalize(torch.full_like(state, -1e4))[:, -1].max() == 0
