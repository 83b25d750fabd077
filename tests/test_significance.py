"""Confidence intervals against plain loops, known distributions and known answers."""

import numpy as np
import pytest
import xarray as xr

from verification.significance import bootstrap_difference, compare, draw_dates


@pytest.mark.parametrize("length", [1, 3, 10])
def test_dates_are_drawn_in_whole_blocks(length: int) -> None:
    counts = draw_dates(10, length, 200, seed=0)
    assert counts.shape == (200, 10) and (counts.sum(axis=1) == 10).all()
    assert (draw_dates(10, length, 200, seed=0) == counts).all()
    if length == 10:
        assert (counts == 1).all()  # there is one such block
    else:
        assert (draw_dates(10, length, 200, seed=1) != counts).any()


def test_the_interval_is_that_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.random((12, 2, 3)), rng.random((12, 2, 3))
    first[3, 0, 0] = second[3, 0, 0] = np.nan
    found = bootstrap_difference(
        first, second, root=True, relative=True, block_length=4, resamples=50, seed=5
    )
    weights = draw_dates(12, 4, 50, seed=5)
    for place in np.ndindex(2, 3):
        a, b, draws = first[:, *place], second[:, *place], []
        for counts in [np.ones(12), *weights]:
            dates = [i for i in range(12) for _ in range(int(counts[i])) if not np.isnan(a[i])]
            means = [np.sqrt(np.mean([each[i] for i in dates])) for each in (a, b)]
            draws.append((means[1] - means[0]) / means[0])
        lower, upper = np.quantile(draws[1:], [0.025, 0.975])
        expected = [draws[0], lower, upper]
        assert [each[place] for each in found] == pytest.approx(expected, rel=1e-12)


def test_the_interval_of_many_dates_is_the_normal_one() -> None:
    """Mean of n normal differences: +- 1.96 standard errors, to the noise of 4,000 resamples."""
    rng = np.random.default_rng(1)
    first = rng.normal(0, 1, 2000)
    second = first + rng.normal(0.1, 2, 2000)
    found = bootstrap_difference(first, second, resamples=4000)
    error = np.std(second - first, ddof=1) / np.sqrt(2000)
    assert found.lower == pytest.approx(found.difference - 1.96 * error, abs=0.1 * error)
    assert found.upper == pytest.approx(found.difference + 1.96 * error, abs=0.1 * error)


def test_significance_is_an_interval_without_zero() -> None:
    rng = np.random.default_rng(2)
    first = rng.normal(10, 1, (60, 3))
    second = first + np.array([0.5, 0, -0.5]) + rng.normal(0, 0.5, (60, 3))
    assert bootstrap_difference(first, second).significant.tolist() == [True, False, True]
    assert bootstrap_difference(first, first).significant.tolist() == [False] * 3


def test_blocks_widen_the_interval_of_dates_that_resemble_each_other() -> None:
    rng, noise = np.random.default_rng(3), np.zeros(400)
    for i, step in enumerate(rng.normal(size=400)):
        noise[i] = 0.9 * noise[i - 1] + step
    single, blocks = (bootstrap_difference(np.zeros(400), noise, block_length=n) for n in (1, 20))
    assert blocks.upper - blocks.lower > 2 * (single.upper - single.lower)


def test_a_broken_forecast_is_no_better_one() -> None:
    first, second = np.ones((5, 1)), np.full((5, 1), 0.5)
    second[2] = np.nan  # broken: the other one has a score
    found = bootstrap_difference(first, second)
    assert np.isnan(found.difference) and not found.significant.any()


def test_a_block_longer_than_the_dates_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 6 dates: the scores have 5; take 1 to 5"):
        draw_dates(5, 6, 10, seed=0)


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


def test_forecasts_are_compared_on_what_both_have() -> None:
    rng = np.random.default_rng(4)
    values = rng.random((30, 2, 1, 3, 2)) + 1
    first, second = scores(values, [6, 12, 24]), scores(4 * values[:20, :, :, 1:], [12, 24])
    found = compare(first, second, "rmse", relative=True, block_length=2)
    assert found["geopotential"].dims == ("quantity", "region", "lead_time", "level")
    assert found["geopotential"].shape == (4, 1, 2, 2)
    assert found["geopotential"].sel(quantity="difference").values == pytest.approx(1)  # twice the RMSE
    assert (found["geopotential"].sel(quantity="significant") == 1).all()
    with pytest.raises(ValueError, match="no initial date and lead in common"):
        compare(first, scores(values, [48, 60, 72]), "rmse")
    with pytest.raises(ValueError, match="no variable in common"):
        compare(first, scores(values, [6, 12, 24], "temperature"), "rmse")
