"""The pictures of a page, all of them in it: lines as SVG, which stays sharp, maps as they were drawn."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.pyplot import close

from datasets.variables import short_label
from reports.run import Run
from verification.plots import build_panels

POINTS = 500  # of a line: more of them nobody sees, and the page is sent around
CURVES = {
    "loss": ("loss", "normalised units"),
    "val/loss": ("validation loss", "normalised units"),
    "lr": ("learning rate", ""),
    "grad_norm": ("gradient norm", ""),
    "samples_per_second": ("throughput", "samples/s"),
    "memory_gib": ("peak memory", "GiB"),
}
LOGARITHMIC = ("loss", "val/loss", "grad_norm")


def svg(figure: Figure) -> str:
    """The element alone."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def embedded(data: bytes, kind: str) -> str:
    """As what a page's src can be."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def embedded_file(path: Path) -> str:
    return embedded(path.read_bytes(), path.suffix.lstrip("."))


def colour(number: int) -> str:
    return f"C{number % 10}"


def curves(runs: Sequence[Run]) -> str:
    """What is logged against the step, a panel a number, a line a run; dotted where one was started again."""
    shown = [
        key for key in CURVES if any(record.get(key) is not None for run in runs for record in run.records)
    ]
    figure, panels = build_panels(len(shown), "", columns=3, size=(4.0, 2.7))
    for axes, key in zip(panels, shown, strict=True):
        for number, run in enumerate(runs):
            points = [(r["step"], r[key]) for r in run.records if r.get(key) is not None]
            few = "o-" if len(points) < 10 else "-"
            axes.plot(*zip(*thinned(points), strict=True), few, color=colour(number), label=run.name, ms=3)
            draw_starts(axes, run, number)
        what, units = CURVES[key]
        axes.set(title=what, xlabel="step", ylabel=units, yscale="log" if key in LOGARITHMIC else "linear")
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return svg(figure)


def draw_starts(axes: Axes, run: Run, number: int) -> None:
    for start in run.starts[1:]:
        axes.axvline(start["step"], color=colour(number), linestyle=":", linewidth=1)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Every n-th and the last."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], *points[-1:]]


def rmse_by_lead(tables: dict[str, pd.DataFrame], names: Sequence[str]) -> str:
    """A panel a variable; tables: what is drawn -> variable, hours, value, units."""
    figure, panels = build_panels(len(names), "", columns=3, size=(4.0, 2.7))
    for axes, name in zip(panels, names, strict=True):
        units = ""
        for number, (label, table) in enumerate(tables.items()):
            own = table.query("variable == @name").sort_values("hours")
            axes.plot(own.hours / 24, own.value, "o-", ms=3, color=colour(number), label=label)
            units = units or next(iter(own.units.dropna()), "")
        axes.set(title=short_label(name), xlabel="lead time (days)", ylabel=units, ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    return svg(figure)
