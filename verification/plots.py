"""The plots of a run: loss, error against lead time, and maps of one date."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datasets.grid import Grid
from datasets.variables import short_label, units
from verification.validation import Scores

STYLES = {
    "model": {"color": "C3", "marker": "o", "linewidth": 2},
    "persistence": {"color": "C0", "marker": "s", "linestyle": "--"},
    "damped persistence": {"color": "C2", "marker": "^", "linestyle": "--"},
    "climatology": {"color": "0.4", "linestyle": ":"},
}
MAX_MAPS = 4


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
    axes.set(
        xlabel="step",
        ylabel="loss (normalised units)",
        yscale="log",
        title=f"Loss: {target.parent.parent.name}",
    )
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    _save(figure, target)


def plot_rmse(scores: Scores, target: Path) -> None:
    """RMSE against lead time, a panel a variable, beside the baselines."""
    count = len(scores.variables)
    columns = min(4, count)
    rows = -(-count // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(3.6 * columns, 3 * rows), squeeze=False, layout="constrained"
    )
    for v, panel in enumerate(panels.flat):
        panel.set_visible(v < count)
        if v < count:
            for name, table in scores.rmse.items():
                panel.plot(scores.lead_hours, table[:, v].tolist(), label=name, **STYLES.get(name, {}))
            panel.set(
                title=scores.variables[v].replace("_", " "), xlabel="lead time (h)", xticks=scores.lead_hours
            )
            panel.set_ylabel(f"RMSE ({units(scores.variables[v])})")
            panel.set_ylim(bottom=0)
            panel.grid(alpha=0.3)
    panels[0, 0].legend(fontsize=8)
    figure.suptitle(f"Root-mean-square error over {scores.num_dates} initial dates of the validation period")
    _save(figure, target)


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
    figure, panels = plt.subplots(
        len(chosen), 3, figsize=(14, 2.5 * len(chosen) + 0.6), squeeze=False, layout="constrained"
    )
    for row, (variable, (truth, forecast)) in zip(panels, chosen, strict=True):
        low, high = np.nanmin(truth), np.nanmax(truth)
        error = forecast - truth
        bound = np.nanpercentile(np.abs(error), 99.5)
        span = {"vmin": low, "vmax": high, "cmap": "viridis"}
        if low < 0 < high:  # winds: 0 in the middle
            span = {"vmin": -max(-low, high), "vmax": max(-low, high), "cmap": "RdBu_r"}
        label = f"{short_label(variable)} ({units(variable)})"
        _map(row[0], grid, truth, land, f"truth: {label}", span)
        _map(row[1], grid, forecast, land, "forecast", span)
        spread = {"vmin": -bound, "vmax": bound, "cmap": "PuOr_r"}
        rms = float(np.sqrt(np.nanmean(error**2)))
        _map(row[2], grid, error, land, f"forecast - truth (unweighted RMS {rms:.3g})", spread)
    valid = str(date + np.timedelta64(lead_hours, "h"))[:16]
    figure.suptitle(f"{lead_hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC")
    _save(figure, target)


def _map(axes: Axes, grid: Grid, field: np.ndarray, land: np.ndarray | None, title: str, span: dict) -> None:
    mesh = axes.pcolormesh(grid.longitude, grid.latitude, field, shading="nearest", rasterized=True, **span)
    if land is not None:
        axes.contour(grid.longitude, grid.latitude, land, levels=[0.5], colors="k", linewidths=0.6)
    axes.set_title(title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.set(xlabel="", ylabel="")
    axes.xaxis.set_major_formatter("{x:g}°E")
    axes.yaxis.set_major_formatter("{x:g}°N")
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01).ax.tick_params(labelsize=7)


def _save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
