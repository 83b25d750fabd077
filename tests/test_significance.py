"""Confidence intervals against plain loops, and known answers."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from errors import DataError
from verification.evaluation import Evaluation
from verification.scorecard import bootstrap, build_scorecard, draw_dates, write_scorecard


@pytest.mark.parametrize("length", [1, 3, 10])
def test_dates_are_drawn_in_whole_blocks(length: int) -> None:
    counts = draw_dates(10, length)
    assert counts.shape == (1000, 10) and (counts.sum(axis=1) == 10).all()
    assert (draw_dates(10, length) == counts).all()
    if length == 10:
        assert (counts == 1).all()  # there is one such block


def test_the_interval_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((2, 3, 12)), rng.random((2, 3, 12))
    first[0, 0, 3] = second[0, 0, 3] = np.nan
    found, weights = bootstrap(first, second, block_length=4), draw_dates(12, 4)
    for cell in np.ndindex(2, 3):
        a, b, draws = first[cell], second[cell], []
        for counts in [np.ones(12), *weights]:
            dates = [i for i in range(12) for _ in range(int(counts[i])) if not np.isnan(a[i])]
            means = [np.sqrt(np.mean([each[i] for i in dates])) for each in (a, b)]
            draws.append((means[1] - means[0]) / means[0])
        lower, upper = np.quantile(draws[1:], [0.025, 0.975])
        assert found[cell] == pytest.approx([draws[0], lower, upper], rel=1e-12)


def test_a_difference_is_significant_where_the_interval_excludes_0() -> None:
    rng = np.random.default_rng(2)
    first = rng.normal(10, 1, (60, 3)).T
    second = first + np.array([[0.5], [0], [-0.5]]) + rng.normal(0, 0.5, (60, 3)).T
    _, lower, upper = bootstrap(first, second, block_length=1).T
    assert (lower > 0).tolist() == [True, False, False] and (upper < 0).tolist() == [False, False, True]
    assert not bootstrap(first, first, block_length=1).any()


def test_blocks_widen_the_interval_of_dates_that_resemble_each_other() -> None:
    rng, noise = np.random.default_rng(3), np.zeros(400)
    for i, step in enumerate(rng.normal(size=400)):
        noise[i] = 0.9 * noise[i - 1] + step
    single, blocks = (bootstrap(np.full(400, 20.0), 20 + noise, block_length=n) for n in (1, 20))
    assert blocks[2] - blocks[1] > 2 * (single[2] - single[1])


def test_a_broken_forecast_is_no_better_one() -> None:
    first, second = np.ones((1, 5)), np.full((1, 5), 0.5)
    second[:, 2] = np.inf  # broken: the other one has a score
    assert not np.isfinite(bootstrap(first, second, block_length=1)).any()


def test_a_date_that_one_of_them_lacks_does_not_count() -> None:
    first, second = np.full((1, 5), 4.0), np.full((1, 5), 1.0)
    second[:, 2], first[:, 2] = np.nan, 100.0
    np.testing.assert_allclose(bootstrap(first, second, block_length=1), -0.5)


def scores(values: np.ndarray, leads: list[int], name: str = "geopotential") -> xr.Dataset:
    """(time, metric, region, lead_time, level) as evaluate gives them."""
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(len(values)) * np.timedelta64(12, "h"),
        "metric": ["mse", "bias"],
        "region": ["global"],
        "lead_time": np.asarray(leads, "timedelta64[h]").astype("timedelta64[ns]"),
        "level": [500, 850],
    }
    return xr.Dataset({name: (list(coords), values)}, coords)


def card(first: xr.Dataset, second: xr.Dataset) -> pd.DataFrame:
    found = {"first": Evaluation(first, first), "second": Evaluation(second, second)}
    return build_scorecard("first", "second", found)


def test_forecasts_are_compared_on_what_both_have(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    values = rng.random((30, 2, 1, 3, 2)) + 1
    first, second = scores(values, [6, 12, 24]), scores(4 * values[:20, :, :, 1:], [12, 24])
    found = card(first, second)
    assert found["variable"].tolist() == ["geopotential:500"] * 2 + ["geopotential:850"] * 2
    assert found["lead_hours"].tolist() == [12, 24] * 2 and set(found["num_dates"]) == {20}
    np.testing.assert_allclose(found["percent"], -50)  # half the RMSE
    write_scorecard(found, tmp_path)
    assert (tmp_path / "scorecard.html").read_text().count(">-50</td>") == 4
    assert pd.read_csv(tmp_path / "scorecard.csv")["percent"].tolist() == [-50.0] * 4
    with pytest.raises(DataError):
        card(first, scores(values, [48, 60, 72]))
    with pytest.raises(DataError):
        card(first, scores(values, [6, 12, 24], "temperature"))
    with pytest.raises(DataError, match="have no number to compare"):  # it was a KeyError of the table
        card(first, scores(np.inf * values, [6, 12, 24]))
