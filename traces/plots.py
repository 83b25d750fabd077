"""Pictures of traces: time by class, one step drawn out, memory over time."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from traces.classes import (
    AROUND,
    ATTENTION,
    CLASSES,
    COMMUNICATION,
    COPIES,
    DATA_WAIT,
    ELEMENTWISE,
    GEMM,
    IDLE,
    OPTIMIZER,
)
from traces.events import Interval, Loop
from traces.memory import MemoryTimeline
from traces.timeline import Timeline
from traces.work import Rates, work_by_class

# Work in cool colours, what a step need not have in warm ones.
COLOURS = {
    GEMM: "#1f4e79",
    ATTENTION: "#2e86c1",
    ELEMENTWISE: "#85c1e9",
    OPTIMIZER: "#27ae60",
    COPIES: "#a9dfbf",
    COMMUNICATION: "#8e44ad",
    DATA_WAIT: "#f1c40f",
    AROUND: "#e67e22",
    IDLE: "#e74c3c",
}
NARROW = 0.03  # of a step: parts narrower than this are not named
MAX_BARS = 16


def plot_breakdown(timelines: Sequence[Timeline], rates: Sequence[Rates], target: Path) -> None:
    """Bars by step and class, one step of each timeline drawn out, and classes beside their floors."""
    rows = len(timelines)
    figure = plt.figure(figsize=(13, 5.2 + 1.1 * rows), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[4.4, 0.6 + 1.1 * rows])[:, 0]
    bars, floors = above.subplots(1, 2, squeeze=False, width_ratios=[3, 2])[0]
    draw_bars(bars, timelines)
    draw_floors(floors, timelines, rates)
    strips = below.subplots(rows, 1, squeeze=False)[:, 0]
    for axes, timeline, label in zip(strips, timelines, labels_of(timelines), strict=True):
        draw_step(axes, timeline, label)
    handles = [Patch(color=COLOURS[name], label=name) for name in CLASSES]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(CLASSES), fontsize=8)
    runs = dict.fromkeys(timeline.trace.run_name for timeline in timelines)
    figure.suptitle(f"Where the time of a step goes: {', '.join(runs)}")
    save(figure, target)


def labels_of(timelines: Sequence[Timeline]) -> list[str]:
    """Short: what tells them apart, runs or the ranks of one."""
    runs = [timeline.trace.run_name for timeline in timelines]
    same = len(timelines) > 1 and len(set(runs)) == 1
    return [f"rank {timeline.trace.rank}" for timeline in timelines] if same else runs


def draw_bars(axes: Axes, timelines: Sequence[Timeline]) -> None:
    """A bar a step, stacked by class; an empty one between timelines."""
    x, ticks = 0, {}
    for timeline, label in zip(timelines, labels_of(timelines), strict=True):
        head = f"\n{label}" if len(timelines) > 1 else ""
        for number, window in list(timeline.steps())[: max(MAX_BARS // len(timelines), 1)]:
            bottom = 0.0
            for name in CLASSES:
                height = sum(p.milliseconds for p in timeline.segments_of(window) if p.name == name)
                axes.bar(x, height, bottom=bottom, color=COLOURS[name], width=0.8)
                bottom += height
            ticks[x], head = number + head, ""
            x += 1
        x += 1
    axes.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set(xlabel="step", ylabel="ms", title="by step")
    axes.grid(axis="y", alpha=0.3)


def draw_floors(axes: Axes, timelines: Sequence[Timeline], rates: Sequence[Rates]) -> None:
    """Mean time by class; a line where it need not be less."""
    height = 0.8 / len(timelines)
    for number, (timeline, reachable) in enumerate(zip(timelines, rates, strict=True)):
        work = work_by_class(timeline, reachable)
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
    steps = sorted(timeline.steps(), key=lambda step: step[1].end - step[1].start)
    number, window = steps[len(steps) // 2]
    segments = timeline.segments_of(window)
    for name in CLASSES:
        spans = [((p.start - window.start) / 1000, p.milliseconds) for p in segments if p.name == name]
        axes.broken_barh(spans, (0, 1), color=COLOURS[name], linewidth=0)
    name_parts(axes, timeline, window)
    axes.set(xlim=(0, (window.end - window.start) / 1000), ylim=(0, 1.5), yticks=[], xlabel="ms")
    axes.set_title(f"step {number} of {label}", fontsize=9, loc="left")


def name_parts(axes: Axes, timeline: Timeline, window: Interval) -> None:
    loop, length = Loop(timeline.trace), window.end - window.start
    for part in loop.cut(window.start, window.end):
        if part.name in loop.spans:
            begin, end = (part.start - window.start) / 1000, (part.end - window.start) / 1000
            axes.plot([begin, end], [1.1, 1.1], color="0.3", linewidth=1, marker="|", markersize=4)
            if part.end - part.start > NARROW * length:
                axes.text((begin + end) / 2, 1.2, part.name, ha="center", fontsize=7)


def plot_memory(timelines: Sequence[MemoryTimeline], title: str, target: Path) -> None:
    """Allocated memory over time, a panel a GPU."""
    size = (10, 1 + 3 * len(timelines))
    figure, panels = plt.subplots(len(timelines), 1, figsize=size, squeeze=False, layout="constrained")
    for axes, memory in zip(panels[:, 0], timelines, strict=True):
        axes.fill_between(memory.seconds, memory.gib, step="post", color=COLOURS[GEMM], alpha=0.7)
        peak = int(memory.gib.argmax())
        axes.plot(memory.seconds[peak], memory.gib[peak], "v", color=COLOURS[IDLE])
        held = [f"{h.gib:.2f} GiB  {h.where}" for h in memory.holders[:4]]
        text = "\n".join([f"peak {memory.gib[peak]:.2f} GiB", *held])
        axes.text(0.01, 0.97, text, transform=axes.transAxes, va="top", fontsize=7, family="monospace")
        axes.set(xlabel="seconds", ylabel="allocated (GiB)", ylim=(0, None))
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    save(figure, target)


def save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
