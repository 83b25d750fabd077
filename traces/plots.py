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
from traces.events import Loop
from traces.timeline import Table, Timeline

# Work in cool colours, what a step need not have in warm ones.
COOL = ("#1f4e79", "#2e86c1", "#85c1e9", "#27ae60", "#a9dfbf")
WARM = ("#8e44ad", "#f1c40f", "#e67e22", "#e74c3c")
COLORS = dict(zip(CLASSES, COOL + WARM, strict=True))
NARROW = 0.03  # of a step: parts narrower than this are not named
MAX_BARS = 16


def plot_breakdown(timelines: Sequence[Timeline], target: Path) -> None:
    """Draw bars by step and class, and one step of each rank."""
    rows = len(timelines)
    figure = plt.figure(figsize=(13, 4.6 + 1.1 * rows), layout="constrained")
    bars, *strips = figure.subplots(1 + rows, 1, height_ratios=[3.8, *[1.1] * rows])
    draw_bars(bars, timelines)
    for axes, timeline in zip(strips, timelines, strict=True):
        draw_step(axes, timeline)
    handles = [Patch(color=COLORS[name], label=name) for name in CLASSES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), fontsize=8)
    trace = timelines[0].trace
    figure.suptitle(f"Where the time of a step goes: {(trace.run or trace.path).name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def draw_bars(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Draw a bar a step, stacked by class; an empty one between ranks."""
    bars: list[Table] = []
    for timeline in timelines:
        by_step = timeline.table.pivot_table(index="step", columns="name", values="ms", aggfunc="sum")
        by_step.index = [timeline.trace.step_number(i) for i in by_step.index]
        first_steps = by_step.head(max(MAX_BARS // len(timelines), 1))
        first = first_steps.index[0]
        named = first_steps.rename(index={first: f"{first}\nrank {timeline.trace.rank}"})
        bars += [named, pd.DataFrame(index=[""])]
    table: Table = pd.concat(bars[:-1]).reindex(columns=list(COLORS))
    table.plot.bar(stacked=True, ax=axes, color=COLORS, legend=False, width=0.8, rot=0, fontsize=8)
    axes.set(xlabel="step", ylabel="ms", title="by step")
    axes.grid(axis="y", alpha=0.3)


def draw_step(axes: Axes, timeline: Timeline) -> None:
    """Draw the step of median length from left to right, with the parts of the loop above."""
    windows = timeline.windows
    index = sorted(range(len(windows)), key=lambda i: windows[i].end - windows[i].start)[len(windows) // 2]
    begin, end, _ = windows[index]
    for name, rows in timeline.table[timeline.table["step"] == index].groupby("name"):
        spans = list(zip((rows["start"] - begin) / 1000, rows["ms"], strict=True))
        axes.broken_barh(spans, (0, 1), color=COLORS[str(name)], linewidth=0)
    loop = Loop(timeline.trace)
    for part in loop.cut(begin, end):
        if part.name in loop.spans:
            first, last = (part.start - begin) / 1000, (part.end - begin) / 1000
            axes.plot([first, last], [1.1, 1.1], color="0.3", linewidth=1, marker="|", markersize=4)
            if part.end - part.start > NARROW * (end - begin):
                axes.text((first + last) / 2, 1.2, part.name, ha="center", fontsize=7)
    axes.set(xlim=(0, (end - begin) / 1000), ylim=(0, 1.5), yticks=[], xlabel="ms")
    title = f"step {timeline.trace.step_number(index)} of rank {timeline.trace.rank}"
    axes.set_title(title, fontsize=9, loc="left")
