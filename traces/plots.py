"""A picture of traces: time by class, and one step drawn out."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from traces.classes import CLASSES
from traces.timeline import Table, Timeline

# Cool colours for work, warm colours for avoidable time.
COOL = ("#1f4e79", "#2e86c1", "#85c1e9", "#27ae60", "#a9dfbf")
WARM = ("#8e44ad", "#f1c40f", "#e67e22", "#e74c3c")
COLORS = dict(zip(CLASSES, COOL + WARM, strict=True))


def plot_breakdown(timelines: Sequence[Timeline], target: Path) -> None:
    """Draw bars by rank and class, and one step of each rank."""
    rows = len(timelines)
    figure = plt.figure(figsize=(13, 4.6 + 1.1 * rows), layout="constrained")
    bars, *strips = figure.subplots(1 + rows, 1, height_ratios=[3.8, *[1.1] * rows])
    draw_bars(bars, timelines)
    for axes, timeline in zip(strips, timelines, strict=True):
        draw_step(axes, timeline)
    handles = [Patch(color=COLORS[name], label=name) for name in CLASSES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), fontsize=8)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_bars(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Draw a bar a rank, stacked by class: the mean of its steps."""
    table: Table = pd.DataFrame({f"rank {t.trace.rank}": t.by_class for t in timelines}).T
    table.plot.bar(stacked=True, ax=axes, color=COLORS, legend=False, width=0.8, rot=0, fontsize=8)
    axes.set(ylabel="ms", title="a step by rank")
    axes.grid(axis="y", alpha=0.3)


def draw_step(axes: Axes, timeline: Timeline) -> None:
    """Draw the step of median length from left to right."""
    windows = timeline.windows
    index = sorted(range(len(windows)), key=lambda i: windows[i].end - windows[i].start)[len(windows) // 2]
    begin, end, _ = windows[index]
    for name, rows in timeline.table[timeline.table["step"] == index].groupby("name"):
        spans = list(zip((rows["start"] - begin) / 1000, rows["ms"], strict=True))
        axes.broken_barh(spans, (0, 1), color=COLORS[str(name)], linewidth=0)
    axes.set(xlim=(0, (end - begin) / 1000), ylim=(0, 1), yticks=[], xlabel="ms")
    axes.set_title(f"step {timeline.trace.step_number(index)} of rank {timeline.trace.rank}", fontsize=9)
