"""Every score against loops in plain Python, without its code; spectra; the test of differences."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr

from datasets.grid import Grid
from errors import ConfigError, DataError
from tests.forecasts import grid as coordinates
from verification.scores import (
    EARTH_RADIUS,
    REGIONS,
    RegionMeans,
    Spectra,
    date_statistics,
    final_scores,
    mean_of_midlatitudes,
    statistic_names,
    wind_pairs,
    zonal_energy_spectrum,
)
from verification.tables import build_scorecard, differs_from_0, write_scorecard

GRIDS = {"poles": (7, 8, True), "no poles": (6, 12, False)}
REGION_NAMES = ["global", "tropics", "extra-tropics", "europe"]


def make_grid(rows: int, columns: int, poles: bool) -> Grid:
    coords = coordinates(rows, columns, poles)
    return Grid(coords["latitude"][::-1], coords["longitude"])


def loop_mean(cells: dict[tuple[int, int], float], grid: Grid, region: str) -> float:
    """Mean over the cells given, weighted by their area, of a region's cells."""
    edges = [90.0, *[(a + b) / 2 for a, b in zip(grid.latitude, grid.latitude[1:], strict=False)], -90.0]
    total = weight = 0.0
    for (i, j), value in cells.items():
        north, east = grid.latitude[i], grid.longitude[j]
        inside = any(low <= north <= high for low, high in REGIONS[region].latitudes)
        if inside and any(low <= east <= high for low, high in REGIONS[region].longitudes):
            area = math.sin(math.radians(edges[i])) - math.sin(math.radians(edges[i + 1]))
            total, weight = total + area * value, weight + area
    return total / weight if weight else math.nan


def loop_statistics(forecast, truth, climatology, grid: Grid, region: str) -> dict[str, float]:
    """Statistics of one variable (H, W); forecast (H, W) or (M, H, W)."""
    members = forecast[None] if forecast.ndim == 2 else forecast
    cells: dict[str, dict] = {}
    for i, j in np.ndindex(*truth.shape):
        y, c = float(truth[i, j]), float(climatology[i, j])
        if math.isnan(y):
            continue
        x = [float(value) for value in members[:, i, j]]
        mean, count = sum(x) / len(x), len(x)
        values = {"mse": (mean - y) ** 2, "mae": abs(mean - y), "bias": mean - y}
        values |= {"anomaly_covariance": (mean - c) * (y - c)}
        values |= {"forecast_anomaly_square": (mean - c) ** 2, "truth_anomaly_square": (y - c) ** 2}
        if count > 1:
            pairs = sum(abs(a - b) for a in x for b in x) / (count * (count - 1))
            values["crps"] = sum(abs(a - y) for a in x) / count - pairs / 2
            values["variance"] = sum((a - mean) ** 2 for a in x) / (count - 1)
        for name, value in values.items():
            cells.setdefault(name, {})[i, j] = value
    found = {name: loop_mean(each, grid, region) for name, each in cells.items()}
    found["rmse_sqrt_before_time_avg"] = math.sqrt(found["mse"])
    product = found["forecast_anomaly_square"] * found["truth_anomaly_square"]
    return found | {"acc": found["anomaly_covariance"] / math.sqrt(product)}


def fields(grid: Grid, members: int = 0, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Forecast, truth, climatology (3, H, W) float32, the forecast with members in front where asked for."""
    rng, shape = np.random.default_rng(seed), (3, *grid.shape)
    truth, climatology = rng.normal(280, 9, shape), rng.normal(280, 3, shape)
    forecast = truth + rng.normal(0.5, 2, (*[members] * bool(members), *shape))
    return forecast.astype("f4"), truth.astype("f4"), climatology.astype("f4")


def statistics_of(
    forecast: np.ndarray, truth: np.ndarray, climatology: np.ndarray | None, mean: RegionMeans
) -> torch.Tensor:
    """(S, V, R) of a single forecast."""
    of_forecast, of_truth = map(torch.from_numpy, (forecast, truth))
    normal = None if climatology is None else torch.from_numpy(climatology)
    return date_statistics([of_forecast], of_truth, normal, mean)[0]


@pytest.mark.parametrize("members", [0, 2, 5])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("shape", GRIDS.values(), ids=GRIDS.keys())
def test_statistics_are_those_of_a_loop(shape: tuple, missing: bool, members: int) -> None:
    grid = make_grid(*shape)
    forecast, truth, climatology = fields(grid, members)
    if missing:
        truth[0, 1, 2] = truth[1, 4:] = truth[2, 3, :3] = np.nan
        forecast[..., 0, 1, 2] = np.nan  # where there is no truth nobody asks
    mean = RegionMeans(grid, REGION_NAMES)
    names = statistic_names(with_climatology=True, with_members=members > 0)
    values = statistics_of(forecast, truth, climatology, mean)
    assert values.dtype == torch.float64 and values.isfinite().all()
    for v, (r, region) in itertools.product(range(3), enumerate(REGION_NAMES)):
        expected = loop_statistics(forecast[..., v, :, :], truth[v], climatology[v], grid, region)
        assert values[:, v, r].tolist() == pytest.approx([expected[name] for name in names], rel=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_forecast_shows_where_it_is_broken_and_nowhere_else(value: float) -> None:
    grid = make_grid(18, 36, poles=False)
    forecast, truth, climatology = fields(grid)
    forecast[1, 0, 0] = value  # at 85 N
    mean = RegionMeans(grid, ["global", "tropics", "arctic", "antarctic"])
    values = statistics_of(forecast, truth, climatology, mean)
    broken = torch.isinf(values).any(0)
    assert not values.isnan().any() and broken[1].tolist() == [True, False, True, False]
    assert not broken[[0, 2]].any()


def test_a_field_without_truth_is_absent_and_a_region_off_the_grid_too() -> None:
    grid = Grid(np.arange(60.0, 29, -3), np.arange(0, 31, 3.0))
    forecast, truth, _ = fields(grid)
    truth[2] = np.nan
    values = statistics_of(forecast, truth, None, RegionMeans(grid, ["global", "ausnz"]))
    assert (~values[0].isnan()).tolist() == [[True, False], [True, False], [False, False]]


def test_regions_are_the_cells_whose_centres_lie_inside() -> None:
    """Counted by hand on WeatherBench2's 240 x 121 grid, every 1.5 degrees from the poles and from 0 E."""
    grid = make_grid(121, 240, poles=True)
    with pytest.raises(ConfigError, match="'arctics'"):
        RegionMeans(grid, ["arctics"])
    size = {}
    for name in REGIONS:
        mean = RegionMeans(grid, [name])
        columns = sum(part.stop - part.start for part in mean.stretches[0])
        size[name] = int((mean.rows > 0).sum()), columns
    assert size == {
        "global": (121, 240),
        "tropics": (27, 240),  # -19.5 .. 19.5
        "extra-tropics": (94, 240),
        "northern-hemisphere": (47, 240),
        "southern-hemisphere": (47, 240),
        "europe": (27, 37),  # 36 .. 75; 348 .. 358.5 and 0 .. 42
        "north-america": (24, 31),  # 25.5 .. 60; 240 .. 285
        "north-atlantic": (27, 40),  # 25.5 .. 64.5; 291 .. 349.5
        "north-pacific": (24, 57),  # 145.5 .. 229.5
        "east-asia": (24, 32),  # 103.5 .. 150
        "ausnz": (22, 37),  # -45 .. -13.5; 120 .. 174
        "arctic": (21, 240),
        "antarctic": (21, 240),
    }


def test_scores_of_means_in_closed_form() -> None:
    """Two dates; the anomalies of the second are twice those of the first."""
    dates = {"mse": [1, 7], "mae": [1, 2], "bias": [-3, 1], "anomaly_covariance": [1.2, 4.8]}
    dates |= {"forecast_anomaly_square": [3.6, 14.4], "truth_anomaly_square": [1.6, 6.4]}
    dates |= {"crps": [0.5, 1.5], "variance": [0, 2], "common_area": [1, 0.5]}
    statistics = xr.DataArray(list(dates.values()), {"score": list(dates)}, ("score", "initial_time"))
    scores = final_scores(statistics, num_members=2)
    found = {name: float(scores.sel(metric=name)) for name in scores.metric.values}
    expected = {"mse": 4, "rmse": 2, "rmse_sqrt_before_time_avg": (1 + math.sqrt(7)) / 2, "mae": 1.5}
    expected |= {"bias": -1, "num_dates": 2, "common_area": 0.75, "acc": 0.5, "acc_ratio_of_means": 0.5}
    expected |= {"forecast_activity": 3, "truth_activity": 2, "crps": 1, "spread": 1}
    expected |= {"spread_skill_ratio": 0.5, "unbiased_spread_skill_ratio": math.sqrt(1 / 3.5)}
    assert found == pytest.approx(expected, rel=1e-15)


def test_both_components_of_a_wind_vector_are_found() -> None:
    variables = ["u_component_of_wind:500", "10m_v_component_of_wind", "v_component_of_wind:500"]
    variables += ["10m_u_component_of_wind", "u_component_of_wind:850"]
    assert wind_pairs(variables) == {"wind_vector:500": (0, 2), "10m_wind_vector": (3, 1)}


def test_means_do_not_depend_on_threads_nor_on_the_block_of_variables() -> None:
    """The bits: ranks of one run may have other numbers of threads."""
    grid, threads = make_grid(37, 72, True), torch.get_num_threads()
    f, t, c = fields(grid)
    mean = RegionMeans(grid, ["global"])
    found = statistics_of(f, t, c, mean)
    alone = [statistics_of(f[[v]], t[[v]], c[[v]], mean) for v in range(3)]
    assert torch.equal(found, torch.cat(alone, dim=1))
    torch.set_num_threads(threads + 2)
    assert torch.equal(found, statistics_of(f, t, c, mean))
    torch.set_num_threads(threads)


# -- spectra

ROWS = np.array([60.0, 0.0, -30.0])
LENGTH = 2 * np.pi * EARTH_RADIUS * np.array([0.5, 1.0, np.sqrt(3) / 2])  # by hand


def test_circles_of_latitude() -> None:
    rows = Grid(np.array([90.0, *ROWS]), np.arange(0, 360, 90.0))
    length = Spectra([], rows, "cpu").length
    np.testing.assert_allclose(length[1:], LENGTH, rtol=1e-15)
    assert abs(length[0]) < 1e-8


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wave_has_its_energy_at_its_wavenumber(number: int) -> None:
    """A cos(k x) has the mean square A^2 / 2 (A^2 for k = 0), times the length of the circle."""
    angle = 2 * np.pi * np.arange(16) / 16
    field = torch.from_numpy(np.tile(5 * np.cos(number * angle + 0.3), (3, 1)))
    energy = zonal_energy_spectrum(field, torch.from_numpy(LENGTH)).numpy()
    square = (5 * np.cos(0.3)) ** 2 if number == 0 else 12.5
    np.testing.assert_allclose(energy[:, number], square * LENGTH, rtol=1e-13)
    assert np.delete(energy, number, axis=1).max() < 1e-13 * energy.max()


def test_energies_add_up_to_the_integral_of_the_square() -> None:
    field = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 15)))
    energy = zonal_energy_spectrum(field, torch.from_numpy(LENGTH))
    expected = (field**2).mean(-1) * torch.from_numpy(LENGTH)
    assert torch.allclose(energy.sum(-1), expected, rtol=1e-13)


def test_the_mean_of_middle_latitudes_leaves_out_missing_rows_and_poles() -> None:
    energy = np.array([[8.0], [1.0], [np.nan], [3.0], [5.0], [9.0]])
    rows = np.array([90.0, 60.0, 45.0, 30.0, 0.0, -90.0])
    spectrum = xr.DataArray(energy, {"latitude": rows}, ("latitude", "zonal_wavenumber"))
    assert mean_of_midlatitudes(spectrum).values == [2.0]
    assert mean_of_midlatitudes(spectrum[[0, 4, 5]]).values == [5.0]  # no row is in the middle


# -- significance of differences, and the scorecard

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
