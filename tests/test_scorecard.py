"""The picture of a scorecard: readable at few and at many leads, with the number of dates."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from verification import scorecard
from verification.scorecard import plot_scorecard


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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []
    monkeypatch.setattr(scorecard, "save", lambda figure, target: figures.append(figure))
    return figures


@pytest.mark.parametrize(("num_leads", "numbers"), [(8, 8), (40, 11)])
def test_numbers_stay_apart(num_leads: int, numbers: int, drawn: list[Figure]) -> None:
    """At 40 leads every cell has its colour, and 6 h and each whole day its number and label."""
    plot_scorecard(card(num_leads), Path("x.png"))
    figure = drawn[0]
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
