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
from traces.events import STEP, Loop
from traces.timeline import Table, Timeline
from traces.work import rates_of, work_by_class

# Work in cool colours, what a step need not have in warm ones.
COOL = ("#1f4e79", "#2e86c1", "#85c1e9", "#27ae60", "#a9dfbf")
WARM = ("#8e44ad", "#f1c40f", "#e67e22", "#e74c3c")
COLOURS = dict(zip(CLASSES, COOL + WARM, strict=True))
NARROW = 0.03  # of a step: parts narrower than this are not named
MAX_BARS = 16


def plot_breakdown(timelines: Sequence[Timeline], target: Path) -> None:
    """Bars by step and class, one step of each timeline drawn out, and classes with their floors."""
    rows = len(timelines)
    figure = plt.figure(figsize=(13, 5.2 + 1.1 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[4.4, 0.6 + 1.1 * rows])[:, 0]
    bars, floors = above.subplots(1, 2, squeeze=False, width_ratios=[3, 2])[0]
    draw_bars(bars, timelines)
    draw_floors(floors, timelines)
    strips = below.subplots(rows, 1, squeeze=False)[:, 0]
    for axes, timeline, label in zip(strips, timelines, labels_of(timelines), strict=True):
        draw_step(axes, timeline, label)
    handles = [Patch(color=COLOURS[name], label=name) for name in CLASSES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), fontsize=8)
    runs = dict.fromkeys(timeline.trace.run_name for timeline in timelines)
    figure.suptitle(f"Where the time of a step goes: {', '.join(runs)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def labels_of(timelines: Sequence[Timeline]) -> list[str]:
    """Short labels of timelines: their runs, or the ranks of one."""
    runs = [timeline.trace.run_name for timeline in timelines]
    same = len(timelines) > 1 and len(set(runs)) == 1
    return [f"rank {timeline.trace.rank}" for timeline in timelines] if same else runs


def draw_bars(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """A bar a step, stacked by class; an empty one between timelines."""
    bars: list[Table] = []
    for timeline, label in zip(timelines, labels_of(timelines), strict=True):
        by_step = timeline.table.pivot_table(index="step", columns="name", values="ms", aggfunc="sum")
        by_step.index = [step_number(timeline, i) for i in by_step.index]
        first_steps = by_step.head(max(MAX_BARS // len(timelines), 1))
        if len(timelines) > 1:
            first = first_steps.index[0]
            first_steps = first_steps.rename(index={first: f"{first}\n{label}"})
        bars += [first_steps, pd.DataFrame(index=[""])]
    table: Table = pd.concat(bars[:-1]).reindex(columns=list(COLOURS))
    table.plot.bar(stacked=True, ax=axes, color=COLOURS, legend=False, width=0.8, rot=0, fontsize=8)
    axes.set(xlabel="step", ylabel="ms", title="by step")
    axes.grid(axis="y", alpha=0.3)


def step_number(timeline: Timeline, index: int) -> str:
    return timeline.trace.steps[index].name.removeprefix(STEP)


def draw_floors(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """Mean time by class; a line where it need not be less."""
    height = 0.8 / len(timelines)
    for number, timeline in enumerate(timelines):
        work = work_by_class(timeline, rates_of(timeline))
        for row, name in enumerate(CLASSES):
            y = row + number * height
            axes.barh(y, timeline.by_class[name], height * 0.9, align="edge", color=COLOURS[name])
            floor = work[name].floor if name in work else None
            if floor:
                axes.plot([floor, floor], [y, y + height * 0.9], color="k", linewidth=2)
    axes.set_yticks([row + 0.4 for row in range(len(CLASSES))], CLASSES, fontsize=8)
    axes.invert_yaxis()
    order = f" ({', then '.join(labels_of(timelines))})" if len(timelines) == 2 else ""
    axes.set(xlabel="ms a step", title=f"mean; black: floor{order}")
    axes.grid(axis="x", alpha=0.3)


def draw_step(axes: Axes, timeline: Timeline, label: str) -> None:
    """The step of median length from left to right, with the parts of the loop above."""
    windows = timeline.windows
    index = sorted(range(len(windows)), key=lambda i: windows[i].end - windows[i].start)[len(windows) // 2]
    begin, end = windows[index]
    segments = timeline.table[timeline.table["step"] == index]
    for name, rows in segments.groupby("name"):
        spans = list(zip((rows["start"] - begin) / 1000, rows["ms"], strict=True))
        axes.broken_barh(spans, (0, 1), color=COLOURS[str(name)], linewidth=0)
    loop = Loop(timeline.trace)
    for part in loop.cut(begin, end):
        if part.name in loop.spans:
            first, last = (part.start - begin) / 1000, (part.end - begin) / 1000
            axes.plot([first, last], [1.1, 1.1], color="0.3", linewidth=1, marker="|", markersize=4)
            if part.end - part.start > NARROW * (end - begin):
                axes.text((first + last) / 2, 1.2, part.name, ha="center", fontsize=7)
    axes.set(xlim=(0, (end - begin) / 1000), ylim=(0, 1.5), yticks=[], xlabel="ms")
    axes.set_title(f"step {step_number(timeline, index)} of {label}", fontsize=9, loc="left")
