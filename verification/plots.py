"""The plots of a run: loss, error against lead time, maps of one date; and what all plots have in common."""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datasets.grid import Grid
from datasets.variables import short_label, units
from verification.validation import Scores, dates_of_leads

STYLES = {
    "model": {"color": "C3", "marker": "o", "linewidth": 2},
    "persistence": {"color": "C0", "marker": "s", "linestyle": "--"},
    "damped persistence": {"color": "C2", "marker": "^", "linestyle": "--"},
    "climatology": {"color": "0.4", "linestyle": ":"},
}
MAX_MAPS = 4


def build_panels(
    count: int, title: str, columns: int = 4, size: tuple[float, float] = (3.6, 2.9)
) -> tuple[Figure, list[Axes]]:
    """So many panels of a size in inches, in rows of at most `columns`."""
    columns = min(columns, count)
    rows = -(-count // columns)
    whole = (size[0] * columns + 0.6, size[1] * rows + 0.9)
    figure, panels = plt.subplots(rows, columns, figsize=whole, squeeze=False, layout="constrained")
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(title)
    return figure, list(panels.flat[:count])


def draw_map(
    axes: Axes, longitude: np.ndarray, latitude: np.ndarray, field: np.ndarray, title: str, **colours: Any
) -> None:
    """A field (H, W) on its grid, in degrees, with a colour bar."""
    mesh = axes.pcolormesh(longitude, latitude, field, shading="nearest", rasterized=True, **colours)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.xaxis.set_major_formatter("{x:g}°E")
    axes.yaxis.set_major_formatter("{x:g}°N")
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01).ax.tick_params(labelsize=7)


def error_colours(error: np.ndarray) -> dict[str, Any]:
    """0 in the middle, and an end that a few outliers do not move."""
    bound = float(np.nanpercentile(np.abs(error), 99.5)) or 1.0
    return {"vmin": -bound, "vmax": bound, "cmap": "PuOr_r"}


def save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def plot_run(
    folder: Path,
    scores: Scores,
    example: tuple[np.datetime64, dict[str, tuple[np.ndarray, np.ndarray]]],
    grid: Grid,
    land: np.ndarray | None,
) -> None:
    """The three plots, in `folder`/plots; `example` is what is mapped: see `plot_maps`."""
    plot_loss(folder / "metrics.jsonl", folder / "plots/loss.png")
    plot_rmse(scores, folder / "plots/rmse.png")
    plot_maps(*example, scores.lead_hours[0], grid, land, folder / "plots/maps.png")


def plot_loss(metrics_file: Path, target: Path) -> None:
    """Training and validation loss against the step, from metrics.jsonl."""
    records = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label, style in (("loss", "training", "-"), ("val/loss", "validation", "o")):
        points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=f"{label} ({points[-1][1]:.4f} at the end)")
    title = f"Loss: {target.parent.parent.name}"
    axes.set(xlabel="step", ylabel="loss (normalised units)", yscale="log", title=title)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, target)


def plot_rmse(scores: Scores, target: Path) -> None:
    """RMSE against lead time, a panel a variable, beside the baselines."""
    dates = dates_of_leads(scores.num_dates, scores.lead_hours)
    title = f"Root-mean-square error, validation period: {dates}"
    figure, panels = build_panels(len(scores.variables), title)
    for v, (axes, variable) in enumerate(zip(panels, scores.variables, strict=True)):
        for name, table in scores.rmse.items():
            axes.plot(scores.lead_hours, table[:, v].tolist(), label=name, **STYLES.get(name, {}))
        axes.set(title=variable.replace("_", " "), xlabel="lead time (h)", xticks=scores.lead_hours)
        axes.set_ylabel(f"RMSE ({scores.units[v]})")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    save(figure, target)


def plot_maps(
    date: np.datetime64,
    fields: dict[str, tuple[np.ndarray, np.ndarray]],
    lead_hours: int,
    grid: Grid,
    land: np.ndarray | None,
    target: Path,
) -> None:
    """Truth, forecast and error from one initial date; fields: variable -> (truth, forecast), each (H, W)."""
    chosen = list(fields.items())[:MAX_MAPS]
    valid = str(date + np.timedelta64(lead_hours, "h"))[:16]
    title = f"{lead_hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    figure, panels = build_panels(3 * len(chosen), title, columns=3, size=(4.5, 2.4))
    for row, (variable, (truth, forecast)) in enumerate(chosen):
        low, high, error = np.nanmin(truth), np.nanmax(truth), forecast - truth
        colours = {"vmin": low, "vmax": high, "cmap": "viridis"}
        if low < 0 < high:  # winds: 0 in the middle
            colours = {"vmin": -max(-low, high), "vmax": max(-low, high), "cmap": "RdBu_r"}
        rms = float(np.sqrt(np.nanmean(error**2)))
        for axes, field, label, span in (
            (panels[3 * row], truth, f"truth: {short_label(variable)} ({units(variable)})", colours),
            (panels[3 * row + 1], forecast, "forecast", colours),
            (
                panels[3 * row + 2],
                error,
                f"forecast - truth (unweighted RMS {rms:.3g})",
                error_colours(error),
            ),
        ):
            draw_map(axes, grid.longitude, grid.latitude, field, label, **span)
            if land is not None:
                axes.contour(grid.longitude, grid.latitude, land, levels=[0.5], colors="k", linewidths=0.6)
    save(figure, target)
