"""The plots of a run: which variables are mapped, with which units and dates."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from datasets.grid import Grid, global_grid
from verification import plots
from verification.details import circumference
from verification.plots import plot_run
from verification.validation import Scores

NAMES = ["geopotential:500", "2m_temperature", "a", "b", "leaf_wetness"]
GRID = global_grid((6, 12))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    monkeypatch.setattr(plots, "save", lambda figure, target: figures.update({target.name: figure}))
    return figures


def run(folder: Path, chosen: list[str]) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    units = dict(zip(NAMES, ["m2 s-2", "K", "", "", "mm"], strict=True))
    table = torch.ones(2, len(NAMES))
    scores = Scores(NAMES, [6, 240], [47, 7], units, {"model": table}, 0.5)
    fields = {name: (np.zeros(GRID.shape), np.full(GRID.shape, 3.0)) for name in NAMES}
    plot_run(folder, scores, (np.datetime64("2020-01-01T00", "s"), fields), GRID, None, chosen)


def test_the_first_four_are_mapped_or_those_chosen(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Truth (0) and forecast (3) share their colours."""
    run(tmp_path, [])
    titles = [axes.get_title() for axes in drawn["maps.png"].axes if axes.get_title().startswith("truth")]
    assert titles == ["truth: z500 (m2 s-2)", "truth: t2m (K)", "truth: a", "truth: b"]
    assert "47 initial dates at 6 h, 7 at 240 h" in drawn["rmse.png"].get_suptitle()
    run(tmp_path, ["leaf_wetness"])
    titles = [axes.get_title() for axes in drawn["maps.png"].axes]
    assert "truth: leaf_wetness (mm)" in titles and not any("z500" in title for title in titles)
    assert [axes.collections[0].get_clim() for axes in drawn["maps.png"].axes[:2]] == [(0, 3), (0, 3)]
    plt.close("all")


def test_spectra_are_drawn_where_rows_go_round_the_globe(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Of cos(2 longitude): all energy lies in wavenumber 2, a quarter of it in that of half of it."""
    table, names = torch.ones(1, 1), ["geopotential:500"]
    wave = np.cos(2 * np.deg2rad(GRID.longitude))[None] * np.ones((6, 1))
    scores = Scores(names, [6], [47], {names[0]: "m2 s-2"}, {"model": table}, 0.5)
    example = (np.datetime64("2020-01-01T00", "s"), {names[0]: (wave, wave / 2)})
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    files = plot_run(tmp_path, scores, example, GRID, None)
    truth, forecast = drawn["spectra.png"].axes[0].lines
    energy = np.asarray(truth.get_ydata())
    wavelengths = circumference(GRID.latitude[[1]]) / 2  # of wavenumber 2 at 45 degrees
    assert np.asarray(truth.get_xdata())[energy.argmax()] == pytest.approx(wavelengths[0] / 1000)
    assert np.asarray(forecast.get_ydata()).max() == pytest.approx(energy.max() / 4)
    assert list(files) == ["loss", "rmse", "maps", "spectra"]
    region = Grid(GRID.latitude, GRID.longitude[:6])
    part = {names[0]: (wave[:, :6], wave[:, :6])}
    assert "spectra" not in plot_run(tmp_path, scores, (example[0], part), region, None)
    plt.close("all")
