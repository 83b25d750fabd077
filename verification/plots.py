"""Plots of a run and of an evaluation: losses, scores against lead time, spectra, maps.

Coastlines are the outline of the data's own land-sea mask. Shapes: H latitudes, W longitudes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from datasets.grid import Grid, latitude_bounds, longitude_bounds
from datasets.variables import short_label
from jobs.journal import read_records
from verification.evaluation import Evaluation
from verification.score_tables import (
    DAY,
    combine,
    describe_dates,
    headline,
    lead_hours,
    one_variable,
    select,
    units_of,
    variable_names,
)
from verification.spectra import mean_of_midlatitudes
from verification.validation import Example, Scores

# Variables that are drawn first; others follow.
MAX_MAPS = 4
MAX_COLUMNS = 720  # cells: a panel has fewer pixels, and nine panels of 1024 x 2048 take 1.1 GiB
OUTLIERS = 0.1  # per cent at either end that the range of colours may leave out
TITLES = {"rmse": "Root-mean-square error", "acc": "Anomaly correlation"}


# -- for all plots


def build_panels(
    count: int, title: str, columns: int = 1, size: tuple[float, float] = (8, 4)
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels of a size in inches, in rows of at most `columns`."""
    rows = -(-count // columns)
    whole = (size[0] * columns + 0.6, size[1] * rows + 0.9)
    figure, panels = plt.subplots(rows, columns, figsize=whole, squeeze=False, layout="constrained")
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(title, wrap=True)
    return figure, list(panels.flat[:count])


def save(figure: Figure, target: Path) -> None:
    """Write a figure as PNG, and close it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, bbox_inches="tight")
    plt.close(figure)


def label_with(variable: str, units: str) -> str:
    """Return "t2m (K)"; without brackets if the units are unknown."""
    return f"{short_label(variable)} ({units})" if units else short_label(variable)


def plot_lines(
    lines: Mapping[str, xr.DataArray], units: Sequence[str], title: str, target: Path, x: str, **look: Any
) -> None:
    """Draw curves (forecast, x) of each variable, in a panel each. units: of each variable."""
    names, every = pd.Index(list(lines), name="variable"), lines.values()
    whole = xr.concat([each.reset_coords(drop=True) for each in every], names, join="outer")
    panels = whole.plot.line(
        x=x, hue="forecast", col="variable", col_wrap=min(4, len(names)), sharey=False, **look
    )
    for axes, name, own in zip(panels.axs.flat, names, units, strict=False):
        axes.set(title=label_with(name, own), ylabel="")
        axes.grid(alpha=0.3)
    panels.fig.suptitle(title, y=1, va="bottom")
    save(panels.fig, target)


def plot_by_lead(
    scores: Mapping[str, xr.Dataset], metric: str, names: Sequence[str], title: str, target: Path
) -> None:
    """Draw a metric of some variables against the lead time. scores: by forecast."""
    whole = combine(scores)
    days = {"lead_time (days)": ("lead_time", (whole["lead_time"] / DAY).values)}
    whole = whole.assign_coords(days).swap_dims(lead_time="lead_time (days)")
    lines = {name: select(whole, metric, name) for name in names}
    units = [units_of(whole, name, metric) for name in names]
    plot_lines(lines, units, title, target, "lead_time (days)", marker="o", markersize=3)


# -- of a run


def plot_run(
    folder: Path, scores: Scores, example: Example, grid: Grid, land: np.ndarray | None
) -> dict[str, Path]:
    """Write the plots of a run into `folder`/plots; return the file of each by name."""
    files = {name: folder / f"plots/{name}.png" for name in ("loss", "rmse", "maps")}
    figure, (axes,) = build_panels(1, f"Loss: {folder.name}")
    draw_losses(axes, read_records(folder / "metrics.jsonl"))
    save(figure, files["loss"])
    dates = describe_dates(scores.num_dates, scores.lead_hours)
    title = f"{TITLES['rmse']}, validation period: {dates}"
    plot_by_lead(scores.by_forecast, "rmse", scores.variables, title, files["rmse"])
    plot_maps(example, scores, grid, land, files["maps"])
    return files


def draw_losses(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Draw training (line) and validation loss (points) of metrics.jsonl against the step."""
    for key, label, line in (("loss", "training", "-"), ("val/loss", "validation", "o")):
        points = [(each["step"], each[key]) for each in records if each.get(key) is not None]
        if points:
            text = f"{label} ({points[-1][1]:.4f} at the end)"
            axes.plot(*zip(*points, strict=True), line, markersize=4, label=text)
    axes.set(xlabel="step", ylabel="loss (normalised units)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()


def plot_maps(example: Example, scores: Scores, grid: Grid, land: np.ndarray | None, target: Path) -> None:
    """Draw truth, forecast and error of the first variables, from one initial date."""
    (date, fields), hours = example, scores.lead_hours[0]
    valid = str(date + np.timedelta64(hours, "h"))[:16]
    title = f"{hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    names = list(fields)[:MAX_MAPS]
    figure, panels = build_panels(3 * len(names), title, columns=3, size=(4.5, 2.4))
    for row, variable in enumerate(names):
        truth, forecast = fields[variable]
        error, colors = forecast - truth, color_range(truth, forecast)
        label = label_with(variable, units_of(scores.by_forecast["model"], variable))
        rms = f"forecast - truth (unweighted RMS {np.sqrt(np.nanmean(error**2)):.3g})"
        draw_map(panels[3 * row], grid, truth, f"truth: {label}", land, **colors)
        draw_map(panels[3 * row + 1], grid, forecast, f"forecast: {label}", land, **colors)
        draw_map(panels[3 * row + 2], grid, error, rms, land, **color_range(error, signed=True))
    save(figure, target)


def draw_map(
    axes: Axes, grid: Grid, field: np.ndarray, title: str, land: np.ndarray | None, **colors: Any
) -> None:
    """Draw a field (H, W) on its grid, in degrees, the outline of land if it is known, and a colour bar."""
    mesh = axes.pcolormesh(*thin(grid, field), shading="nearest", rasterized=True, **colors)
    if land is not None:
        axes.contour(*thin(grid, land), levels=[0.5], colors="k", linewidths=0.6)
    east, north = longitude_bounds(grid.longitude), latitude_bounds(grid.latitude)
    axes.set(xlim=(east[0], east[-1]), ylim=(north[-1], north[0]))
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01)


def thin(grid: Grid, field: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return longitudes, latitudes and values of every n-th cell, because a mean would hide noise."""
    every = -(-field.shape[1] // MAX_COLUMNS)
    return grid.longitude[::every], grid.latitude[::every], field[::every, ::every]


def color_range(*fields: np.ndarray, signed: bool = False) -> dict[str, Any]:
    """Return a common colour range for fields, centred on 0 if they are `signed` (errors) or have both signs
    (winds).
    """
    values = np.concatenate([field[np.isfinite(field)] for field in fields])
    low, high = np.percentile(values, [OUTLIERS, 100 - OUTLIERS]) if len(values) else (-1.0, 1.0)
    bound = max(-low, high)
    if signed or min(-low, high) > 0.1 * bound:
        return {"vmin": -(bound or 1.0), "vmax": bound or 1.0, "cmap": "RdBu_r"}
    return {"vmin": low, "vmax": high, "cmap": "viridis"}


# -- of an evaluation


def plot_evaluation(evaluations: Mapping[str, Evaluation], folder: Path) -> None:
    """Write the plots of an evaluation into a folder."""
    scores = {name: evaluation.scores for name, evaluation in evaluations.items()}
    first = next(iter(evaluations.values()))
    for metric, title in TITLES.items():
        if metric in first.scores["metric"]:
            every = variable_names(first.scores)
            names = [each for each in every if np.isfinite(select(first.scores, metric, each)).any()]
            if names:
                whole = f"{title}, {describe(first)}"
                plot_by_lead(scores, metric, headline(names), whole, folder / f"{metric}.png")
    if spectra := {name: each.spectra for name, each in evaluations.items() if each.spectra is not None}:
        plot_spectra(spectra, folder / "spectra.png")


def describe(evaluation: Evaluation) -> str:
    """Return the region, period and number of dates by lead, for titles."""
    times, scores = evaluation.by_date["time"].values, evaluation.scores
    dates = describe_dates(scores["num_dates"].values.tolist(), lead_hours(scores))
    region = evaluation.by_date["region"].item(0)
    return f"{region}: {dates}, {str(times[0])[:10]} to {str(times[-1])[:10]}"


def plot_spectra(spectra: Mapping[str, xr.Dataset], target: Path) -> None:
    """Draw zonal energy, mean over 30 to 60 degrees of both hemispheres, of forecasts and the truth.

    spectra: `Evaluation.spectra` by forecast.
    """
    first, lines = next(iter(spectra.values())), {}
    for name in headline(variable_names(first)):
        of_variable = {each: one for each, one in spectra.items() if name in variable_names(one)}
        own = {each: one_variable(one, name).sel(source="forecast") for each, one in of_variable.items()}
        own["truth"] = one_variable(first, name).sel(source="truth")
        means = [mean_of_midlatitudes(each.isel(lead_time=-1, drop=True)) for each in own.values()]
        # No index of pandas: xarray cannot align its strings where a forecast lacks a variable.
        index = xr.DataArray(list(own), dims="forecast", name="forecast")
        mean = xr.concat(means, index).isel(zonal_wavenumber=slice(1, None))
        if (mean > 0).any():  # else each row there lacks a cell, or the grid has no such rows
            lines[name] = mean.where(mean > 0)
    if not lines:
        return
    dates, units = int(first["num_dates"][-1]), [units_of(first, name) for name in lines]
    title = f"Zonal energy at {lead_hours(first)[-1]} h, {dates} initial dates"
    plot_lines(lines, units, title, target, "zonal_wavenumber", xscale="log", yscale="log")
