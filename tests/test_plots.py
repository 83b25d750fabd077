"""The plots of a run: which variables are mapped, with which units and dates; the picture of a scorecard."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from datasets.grid import global_grid
from verification import plots, scorecard
from verification.plots import plot_run
from verification.score_tables import by_variable
from verification.scorecard import plot_scorecard
from verification.validation import Scores

NAMES = ["geopotential:500", "2m_temperature", "a", "b", "leaf_wetness"]
GRID = global_grid((6, 12))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for module in (plots, scorecard):
        monkeypatch.setattr(module, "save", lambda figure, target: figures.update({target.name: figure}))
    return figures


def scores_of(names: list[str], hours: list[int], num_dates: list[int], units: dict[str, str]) -> Scores:
    """All are 1."""
    leads = np.array(hours, "timedelta64[h]").astype("timedelta64[ns]")
    coords = {"metric": ["rmse"], "region": ["global"], "lead_time": leads}
    coords["num_dates"] = ("lead_time", num_dates)
    dims = ("metric", "region", "lead_time", "variable")
    table = by_variable(np.ones((1, 1, len(hours), len(names))), dims, names, coords, units)
    return Scores(names, {"model": table}, 0.5)


def run(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    units = dict(zip(NAMES, ["m2 s-2", "K", "", "", "mm"], strict=True))
    scores = scores_of(NAMES, [6, 240], [47, 7], units)
    fields = {name: (np.zeros(GRID.shape), np.full(GRID.shape, 3.0)) for name in NAMES}
    plot_run(folder, scores, (np.datetime64("2020-01-01T00", "s"), fields), GRID, None)


def test_the_first_four_are_mapped(tmp_path: Path, drawn: dict[str, Figure]) -> None:
    """Truth (0) and forecast (3) share their colours."""
    run(tmp_path)
    titles = [axes.get_title() for axes in drawn["maps.png"].axes if axes.get_title().startswith("truth")]
    assert titles == ["truth: z500 (m2 s-2)", "truth: t2m (K)", "truth: a", "truth: b"]
    assert "47 initial dates at 6 h, 7 at 240 h" in drawn["rmse.png"].get_suptitle()
    assert [axes.get_title().split()[0] for axes in drawn["rmse.png"].axes[:5]] == NAMES
    assert [axes.collections[0].get_clim() for axes in drawn["maps.png"].axes[:2]] == [(0, 3), (0, 3)]
    plt.close("all")


# -- a scorecard


def card(num_leads: int) -> pd.DataFrame:
    """Two variables at 6 h, 12 h, ...: fewer dates the longer the lead."""
    rows = [
        ("ours", "persistence", name, 6 * (lead + 1), -20.0 - lead, lead % 2, 50 - lead)
        for name in ("geopotential:500", "2m_temperature")
        for lead in range(num_leads)
    ]
    columns = ["first", "second", "variable", "lead_hours", "percent", "significant", "num_dates"]
    found = pd.DataFrame(rows, columns=columns)
    found.attrs["dates_needed"] = 10
    return found


@pytest.mark.parametrize(("num_leads", "numbers"), [(6, 6), (8, 3), (40, 11)])
def test_numbers_stay_apart(num_leads: int, numbers: int, drawn: dict[str, Figure]) -> None:
    """At 40 leads every cell has its colour, and 6 h and each whole day its number and label."""
    plot_scorecard(card(num_leads), Path("x.png"))
    figure = drawn["x.png"]
    axes = figure.axes[0]
    assert np.array(axes.images[0].get_array()).shape == (2, num_leads)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    texts = [text for text in axes.texts if any(c.isdigit() for c in text.get_text())]
    assert len(texts) == 2 * numbers
    for group in (axes.get_xticklabels(), texts[:numbers]):
        boxes = sorted((text.get_window_extent(renderer) for text in group), key=lambda box: box.x0)
        assert len(boxes) == numbers
        assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:], strict=False))
    labels = [text.get_text() for text in axes.get_xticklabels()]
    assert labels[0] == "6\n50" and labels[-1] == f"{6 * num_leads}\n{51 - num_leads}"  # lead, dates
    assert figure.get_size_inches()[0] < 14
    plt.close(figure)
