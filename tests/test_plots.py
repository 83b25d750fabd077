"""Plots: which variables are mapped, with which units and dates; colours; limits and coastlines of maps."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from datasets.archive import open_archive
from datasets.grid import Grid, global_grid
from tests.forecasts import analyses, forecasts, grid, write
from verification import plots
from verification.baselines import Baseline
from verification.plots import COLORS, color_range, draw_map, plot_evaluation, plot_run
from verification.scores_by_date import evaluate
from verification.stores import open_forecast
from verification.tables import by_variable
from verification.validation import Scores

NAMES = {"geopotential:500": "m2 s-2", "2m_temperature": "K", "a": "", "b": "", "leaf_wetness": "mm"}
GRID = global_grid((6, 12))
EUROPE = Grid(np.arange(60.0, 29, -1), np.arange(-10.0, 21))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "save", lambda figure, target: figures.update({target.name: figure}))
    return figures


def test_the_first_four_are_mapped(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Truth (0) and forecast (3) share their colours. Of scores that all are 1."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    leads = np.array([6, 240], "timedelta64[h]").astype("timedelta64[ns]")
    coords: dict[str, Any] = {"metric": ["rmse"], "region": ["global"], "lead_time": leads}
    coords |= {"forecast": ["model"], "num_dates": (("forecast", "lead_time"), [[47, 7]])}
    dims = ("forecast", "metric", "region", "lead_time", "variable")
    ones = xr.DataArray(np.ones((1, 1, 1, 2, len(NAMES))), coords, dims)
    fields = {name: (np.zeros(GRID.shape), np.full(GRID.shape, 3.0)) for name in NAMES}
    scores = Scores([*NAMES], by_variable(ones, [*NAMES], NAMES), 0.5)
    plot_run(tmp_path, scores, (np.datetime64("2020-01-01T00", "s"), fields), GRID, None)
    titles = [axes.get_title() for axes in drawn["maps.png"].axes if axes.get_title().startswith("truth")]
    expected = ["geopotential at 500 hPa (m2 s-2)", "2m temperature (K)", "a", "b"]
    assert titles == [f"truth: {name}" for name in expected]
    assert "47 initial dates at 6 h, 7 at 240 h" in drawn["rmse.png"].get_suptitle()
    titles = [axes.get_title() for axes in drawn["rmse.png"].axes[:5]]
    assert titles == [*expected, "leaf wetness (mm)"]
    assert {axes.get_xlabel() for axes in drawn["rmse.png"].axes[:5]} == {"lead time (days)"}
    assert [axes.collections[0].get_clim() for axes in drawn["maps.png"].axes[:2]] == [(0, 3), (0, 3)]
    plt.close("all")


def test_a_baseline_has_one_colour_in_all_figures(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Whatever forecasts come before it; by the curves themselves, not by their legend."""
    truth = analyses(grid(6, 8, poles=False), 12)
    archive = open_archive(write(truth, tmp_path / "truth.zarr"))
    ours = open_forecast(write(forecasts(truth, 3, [6, 12]), tmp_path / "ours.zarr"))
    baseline = Baseline(archive, archive.variables, ours.times, ours.leads)
    colors = set()
    for compared in ({"a": ours}, {"a": ours, "b": ours, "c": ours}):
        evaluation = evaluate({**compared, "persistence": baseline}, archive, detail_lead=6)
        plot_evaluation(evaluation, None, tmp_path)
        for name in ("rmse.png", "spectra.png"):
            curves, legend = drawn[name].axes[0].lines, drawn[name].legends[0]
            labels = [text.get_text() for text in legend.get_texts()]
            assert [line.get_color() for line in curves] == [line.get_color() for line in legend.get_lines()]
            colors.add(curves[labels.index("persistence")].get_color())
            assert len({line.get_color() for line in curves}) == len(curves)
    assert colors == {COLORS["persistence"]}
    plt.close("all")


# -- maps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grid", [EUROPE, global_grid((12, 24))], ids=["region", "globe"])
def test_every_map_keeps_the_limits_of_its_grid(grid: Grid) -> None:
    figure, axes = plt.subplots()
    draw_map(axes, grid, np.zeros(grid.shape), "", None)
    half = (grid.longitude[1] - grid.longitude[0]) / 2
    assert axes.get_xlim() == pytest.approx((grid.longitude[0] - half, grid.longitude[-1] + half))
    plt.close(figure)


def test_one_range_of_colours_for_truth_and_forecast() -> None:
    truth, forecast = np.linspace(270, 280, 1001), np.linspace(275, 300, 1001)
    found = color_range(truth, forecast)
    assert found["vmin"] == pytest.approx(270, abs=0.1) and found["vmax"] == pytest.approx(300, abs=0.1)
    winds = color_range(np.array([-5.0, 3.0, np.nan]), np.array([12.0, np.inf]))
    assert winds["vmin"] == -winds["vmax"] and winds["vmax"] == pytest.approx(12, abs=0.1)
    assert color_range(np.full(3, np.nan), signed=True)["vmax"] == 1


def test_a_fine_grid_is_drawn_as_fine_as_a_panel_shows() -> None:
    """Nine maps of 1024 x 2048 cells took 1.1 GiB and 6 s; so thinned 0.14 GiB and 1.3 s."""
    grid = global_grid((1024, 2048))
    figure, axes = plt.subplots()
    draw_map(axes, grid, np.broadcast_to(grid.longitude, grid.shape), "", None)
    (mesh,) = [each for each in axes.collections if each.get_array() is not None]
    values = np.asarray(mesh.get_array()).reshape(-1)
    assert values.size == 342 * 683 and values.max() == grid.longitude[::3][-1]
    plt.close(figure)
