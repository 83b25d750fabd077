"""The test of differences against plain loops and known answers; the scorecard."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from errors import DataError
from verification.tables import build_scorecard, differs_from_0, write_scorecard

SCORES = ["mse", "mae", "bias", "common_area"]


def autoregressive(rng: np.random.Generator, shape: tuple[int, int], factor: float) -> np.ndarray:
    """Series (N, n) of variance 1 and this correlation of neighbours."""
    series = rng.normal(size=shape)
    for i in range(1, shape[1]):
        series[:, i] = factor * series[:, i - 1] + np.sqrt(1 - factor**2) * series[:, i]
    return series


def test_the_inflation_is_that_of_an_autoregressive_process() -> None:
    """As long as the series is, its mean varies as the inverse of so many independent dates."""
    factor, length = 0.8, 20_000
    series = autoregressive(np.random.default_rng(0), (1, length), factor)
    deviation = np.sqrt((1 + factor) / (1 - factor) / length)  # of the mean
    series -= series.mean()
    for size in (1.85, 2.07):  # around the quantile of the normal distribution, 1.96
        assert differs_from_0(series + size * deviation).tolist() == [size > 1.96]


@pytest.mark.parametrize(("days", "most"), [(60, 0.12), (365, 0.08)])
@pytest.mark.parametrize("decorrelation", [1, 2, 5])
def test_equally_good_forecasts_are_rarely_marked(days: int, most: float, decorrelation: int) -> None:
    """5 % are asked; the block bootstrap marked 20 to 39 % of 30 days, and 9 to 23 % of a year."""
    for per_day in (1, 2):
        factor, rng = np.exp(-1 / (decorrelation * per_day)), np.random.default_rng(days)
        marked = differs_from_0(autoregressive(rng, (1000, days * per_day), factor))
        assert 0.02 < marked.mean() < most


def test_a_clear_difference_is_significant_whatever_dates_are_missing() -> None:
    rng = np.random.default_rng(2)
    difference = rng.normal(0, 0.5, (3, 60)) + np.array([[0.5], [0], [-0.5]])
    assert differs_from_0(difference).tolist() == [True, False, True]
    difference[:, rng.integers(0, 60, 10)] = np.nan
    assert differs_from_0(difference).tolist() == [True, False, True]
    assert not differs_from_0(np.zeros((1, 60))).any()


def by_date(values: dict[str, np.ndarray], leads: list[int], name: str = "geopotential") -> xr.Dataset:
    """forecast -> squared errors (initial_time, lead_time, level) as a table of scores by date."""
    first = next(iter(values.values()))
    statistics = np.stack([np.repeat(v[..., None, None], len(SCORES), axis=-1) for v in values.values()])
    coords = {
        "forecast": list(values),
        "initial_time": np.datetime64("2020-01-01", "ns") + np.arange(len(first)) * np.timedelta64(12, "h"),
        "lead_time": np.asarray(leads, "timedelta64[h]").astype("timedelta64[ns]"),
        "variable": [f"{name}:{level}" for level in (500, 850)],
        "region": ["global"],
        "score": SCORES,
    }
    return xr.Dataset({"statistics": (list(coords), statistics)}, coords)


def test_forecasts_are_compared_on_what_both_have(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    first = rng.random((80, 3, 2)) + 1
    second = 4 * first
    second[70:] = np.nan  # dates and a lead that it lacks
    second[:, 0] = np.nan
    table = by_date({"first": first, "second": second, "broken": np.inf * first}, [6, 12, 24])
    card = build_scorecard(table, "first", "second")
    assert card["variable"].tolist() == ["geopotential:500"] * 2 + ["geopotential:850"] * 2
    assert card["lead_hours"].tolist() == [12, 24] * 2 and set(card["num_dates"]) == {70}
    np.testing.assert_allclose(card["percent"], -50)  # half the RMSE
    assert card["significant"].tolist() == [1] * 4 and card.attrs["dates_needed"] == 60
    assert "4 of 4 tested cells are marked" in card.attrs["by_chance"]
    assert "5%, about 0, would be by chance" in card.attrs["by_chance"]
    few = build_scorecard(table.isel(initial_time=slice(59)), "first", "second")
    assert min(few["percent"]) < 0 and True not in few["significant"].tolist()
    write_scorecard(card, tmp_path)
    assert (tmp_path / "scorecard.html").read_text().count(">-50</td>") == 4
    assert pd.read_csv(tmp_path / "scorecard.csv")["percent"].tolist() == [-50.0] * 4
    with pytest.raises(DataError, match="have no number to compare"):  # it was a KeyError of the table
        build_scorecard(table, "first", "broken")
    with pytest.raises(DataError):
        build_scorecard(table.isel(lead_time=[0]), "first", "second")
