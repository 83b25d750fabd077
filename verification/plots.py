"""The plots of a run: loss, error against lead time, maps of one date; and what all plots have in common."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datasets.grid import Grid
from datasets.variables import short_label
from jobs.journal import read_records
from verification.details import circumference, zonal_energy_spectrum
from verification.maps import Land, draw_map, error_colours, field_colours
from verification.score_tables import squared, times_metres
from verification.validation import Example
from verification.validation_scores import Scores, dates_of_leads

STYLES = {
    "model": {"color": "C3", "marker": "o", "linewidth": 2},
    "persistence": {"color": "C0", "marker": "s", "linestyle": "--"},
    "damped persistence": {"color": "C2", "marker": "^", "linestyle": "--"},
    "climatology": {"color": "0.4", "linestyle": ":"},
    "training mean": {"color": "0.6", "linestyle": "-."},
}
MAX_MAPS = 4


def build_panels(
    count: int, title: str, columns: int = 4, size: tuple[float, float] = (3.6, 2.9)
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels of a size in inches, in rows of at most `columns`."""
    columns = min(columns, count)
    rows = -(-count // columns)
    whole = (size[0] * columns + 0.6, size[1] * rows + 0.9)
    figure, panels = plt.subplots(rows, columns, figsize=whole, squeeze=False, layout="constrained")
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(title, wrap=True)
    return figure, list(panels.flat[:count])


def label_with(variable: str, units: str) -> str:
    """ "t2m (K)"; without brackets if the units are unknown."""
    return f"{short_label(variable)} ({units})" if units else short_label(variable)


def save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def plot_run(
    folder: Path,
    scores: Scores,
    example: Example,
    grid: Grid,
    land: np.ndarray | None,
    chosen: Sequence[str] = (),
) -> dict[str, Path]:
    """Name -> file of each plot, in `folder`/plots; `example` is what is mapped: see `plot_maps`. chosen:
    which of its variables, the first ones where none is named.
    """
    date, fields = example
    mapped = {name: fields[name] for name in chosen or list(fields)[:MAX_MAPS]}
    names = ("loss", "rmse", "maps", *(["spectra"] if grid.periodic else []))
    files = {name: folder / f"plots/{name}.png" for name in names}
    plot_loss(folder / "metrics.jsonl", files["loss"])
    plot_rmse(scores, files["rmse"])
    plot_maps(date, mapped, scores, grid, land, files["maps"])
    if grid.periodic:
        plot_zonal_energy(date, mapped, scores, grid, files["spectra"])
    return files


def plot_loss(metrics_file: Path, target: Path) -> None:
    """Training and validation loss against the step, from metrics.jsonl."""
    records = read_records(metrics_file)
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
    """RMSE against lead time, a panel a variable, of model and baselines."""
    dates = dates_of_leads(scores.num_dates, scores.lead_hours)
    title = f"Root-mean-square error, validation period: {dates}"
    figure, panels = build_panels(len(scores.variables), title)
    for v, (axes, variable) in enumerate(zip(panels, scores.variables, strict=True)):
        for name, table in scores.rmse.items():
            axes.plot(scores.lead_hours, table[:, v].tolist(), label=name, **STYLES.get(name, {}))
        axes.set(title=variable.replace("_", " "), xlabel="lead time (h)", xticks=scores.lead_hours)
        axes.set_ylabel(f"RMSE ({scores.units[v]})" if scores.units[v] else "RMSE")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    save(figure, target)


def plot_zonal_energy(
    date: np.datetime64,
    fields: dict[str, tuple[np.ndarray, np.ndarray]],
    scores: Scores,
    grid: Grid,
    target: Path,
) -> None:
    """Plot spectra of truth and forecast, mean over rows between 30 and 60 degrees of both hemispheres
    that lack no value; fields as in `plot_maps`.
    """
    hours, length = scores.lead_hours[0], torch.from_numpy(circumference(grid.latitude))
    units = dict(zip(scores.variables, scores.units, strict=True))
    north = np.abs(grid.latitude)
    rows = (north >= 30) & (north <= 60) if ((north >= 30) & (north <= 60)).any() else north < 90
    title = f"Zonal energy of a {hours} h forecast from {str(date)[:16]} UTC"
    figure, panels = build_panels(len(fields), title)
    for axes, (variable, pair) in zip(panels, fields.items(), strict=True):
        for field, label, look in zip(pair, ("truth", "forecast"), ("k-", "C3-"), strict=True):
            energy = zonal_energy_spectrum(torch.from_numpy(np.asarray(field)), length).numpy()[rows]
            whole = energy[np.isfinite(energy).all(axis=1)]
            if len(whole):
                axes.plot(np.arange(1, whole.shape[1]), whole.mean(axis=0)[1:], look, label=label)
        axes.set(title=variable.replace("_", " "), xlabel="zonal wavenumber", xscale="log", yscale="log")
        axes.set_ylabel(times_metres(squared(units[variable])), fontsize=8)
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    save(figure, target)


def plot_maps(
    date: np.datetime64,
    fields: dict[str, tuple[np.ndarray, np.ndarray]],
    scores: Scores,
    grid: Grid,
    land: np.ndarray | None,
    target: Path,
) -> None:
    """Truth, forecast and error from one initial date; fields: variable -> (truth, forecast), each (H, W)."""
    lead_hours, own_land = scores.lead_hours[0], None if land is None else Land(grid, land)
    valid = str(date + np.timedelta64(lead_hours, "h"))[:16]
    title = f"{lead_hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    figure, panels = build_panels(3 * len(fields), title, columns=3, size=(4.5, 2.4))
    units = dict(zip(scores.variables, scores.units, strict=True))
    for row, (variable, (truth, forecast)) in enumerate(fields.items()):
        error, colours = forecast - truth, field_colours(truth, forecast)
        label = label_with(variable, units[variable])
        rms = float(np.sqrt(np.nanmean(error**2)))
        for axes, field, what, span in (
            (panels[3 * row], truth, f"truth: {label}", colours),
            (panels[3 * row + 1], forecast, f"forecast: {label}", colours),
            (
                panels[3 * row + 2],
                error,
                f"forecast - truth (unweighted RMS {rms:.3g})",
                error_colours(error),
            ),
        ):
            draw_map(axes, grid, field, what, own_land, **span)
    save(figure, target)
