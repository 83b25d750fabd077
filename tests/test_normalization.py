"""Physical fields to normalised ones and back."""

import numpy as np
import pytest
import torch

from datasets.archive import open_archive
from datasets.grid import area_weights
from datasets.normalization import Normalizer
from datasets.statistics import Source, compute
from tests.sample_archives import NAMES, analyses, values, weatherbench

STEP = np.timedelta64(6 * 3600, "s")


@pytest.fixture
def archive(tmp_path):
    return open_archive(weatherbench(tmp_path, analyses()))


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
