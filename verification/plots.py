"""Plots of a run and of an evaluation: losses, RMSE against lead time, spectra, maps.

Coastlines are the outline of the data's own land-sea mask. Shapes: H latitudes, W longitudes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a cluster has no screen

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from datasets.grid import Grid, latitude_bounds, longitude_bounds
from datasets.variables import split_name
from jobs.durable_files import read_records
from verification.scores import mean_of_midlatitudes
from verification.scores_by_date import Evaluation, Example
from verification.tables import (
    DAY,
    describe_dates,
    headline,
    labels,
    lead_hours,
    one_variable,
    select,
    variable_names,
)
from verification.validation import Scores

MAX_MAPS = 4  # variables; others have none
MAX_COLUMNS = 720  # cells: a panel has fewer pixels, and nine panels of 1024 x 2048 take 1.1 GiB
OUTLIERS = 0.1  # per cent at either end that the range of colours may leave out
# The same in all figures; models have the other colours of matplotlib's cycle, in their order.
COLORS = {
    "truth": "black",
    "climatology": "tab:green",
    "persistence": "tab:gray",
    "damped persistence": "tab:brown",
    "training mean": "tab:olive",
}
OTHER_COLORS = ("tab:blue", "tab:orange", "tab:red", "tab:purple", "tab:pink", "tab:cyan")


# -- figures -------------------------------------------------------------------------------------------


def build_panels(
    count: int, title: str, columns: int = 1, size: tuple[float, float] = (8, 4)
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` panels of a size in inches, in rows of at most `columns`."""
    columns = min(columns, count)
    rows = -(-count // columns)
    inches = (size[0] * columns + 0.6, size[1] * rows + 0.9)
    figure, panels = plt.subplots(rows, columns, figsize=inches, squeeze=False, layout="constrained")
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(title, wrap=True)
    return figure, list(panels.flat[:count])


def save(figure: Figure, target: Path) -> None:
    """Write a figure as PNG, and close it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110, bbox_inches="tight")
    plt.close(figure)


def label_of(scores: xr.Dataset, variable: str) -> str:
    """Return "geopotential at 500 hPa (m2 s-2)"; without brackets if the units are unknown."""
    name, level = split_name(variable)
    text = name.replace("_", " ") + ("" if level is None else f" at {level} hPa")
    units = one_variable(scores, variable).attrs.get("units", "")
    return f"{text} ({units})" if units else text


def plot_lines(
    curves: Mapping[str, Mapping[str, xr.DataArray]], x: str, scale: str, title: str, target: Path,
    legend: Mapping[str, str]
) -> None:  # fmt: skip
    """Draw curves (title of a panel -> forecast -> values along the only dimension), axes with a scale of
    "linear" or "log". legend: label of each forecast.
    """
    models = [name for name in legend if name not in COLORS]
    colors = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(models)} | COLORS
    figure, panels = build_panels(len(curves), title, columns=4, size=(4, 3.2))
    for axes, (heading, of_forecast) in zip(panels, curves.items(), strict=True):
        for name, curve in of_forecast.items():
            marker = "o" if scale == "linear" else None
            axes.plot(curve[curve.dims[0]], curve, color=colors[name], marker=marker, markersize=3)
        axes.set(xlabel=x, xscale=scale, yscale=scale)
        axes.set_title(heading, fontsize=10)
        axes.grid(alpha=0.3)
    drawn = {name for of_forecast in curves.values() for name in of_forecast}
    lines = [Line2D([], [], color=colors[name], label=legend[name]) for name in legend if name in drawn]
    figure.legend(handles=lines, loc="outside lower center", ncols=4)
    save(figure, target)


def plot_rmse(scores: xr.Dataset, names: Sequence[str], title: str, target: Path) -> None:
    """Draw the RMSE of some variables against the lead time. scores: (forecast, ...)."""
    scores, curves = scores.assign_coords(lead_time=(scores["lead_time"] / DAY).values), {}
    legend = dict(zip(scores["forecast"].values.tolist(), labels(scores), strict=True))
    for name in names:
        values = select(scores, "rmse", name)
        of_forecast = {key: values.sel(forecast=key).dropna("lead_time") for key in legend}
        if any(curve.size for curve in of_forecast.values()):
            curves[label_of(scores, name)] = {key: curve for key, curve in of_forecast.items() if curve.size}
    if curves:
        plot_lines(curves, "lead time (days)", "linear", title, target, legend)


def plot_maps(
    example: Example, hours: int, scores: xr.Dataset, grid: Grid, land: np.ndarray | None, target: Path
) -> None:
    """Draw truth, forecast and error of the first variables, from one initial date at a lead in hours.

    scores: with the units of the variables. land (H, W): the mask on the grid.
    """
    date, fields = example
    valid = str(date + np.timedelta64(hours, "h"))[:16]
    title = f"{hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    names = list(fields)[:MAX_MAPS]
    figure, panels = build_panels(3 * len(names), title, columns=3, size=(4.5, 2.4))
    for row, variable in enumerate(names):
        truth, forecast = fields[variable]
        error, colors = forecast - truth, color_range(truth, forecast)
        label = label_of(scores, variable)
        rms = f"forecast - truth (unweighted RMS {np.sqrt(np.nanmean(error**2)):.3g})"
        draw_map(panels[3 * row], grid, truth, f"truth: {label}", land, **colors)
        draw_map(panels[3 * row + 1], grid, forecast, f"forecast: {label}", land, **colors)
        draw_map(panels[3 * row + 2], grid, error, rms, land, **color_range(error, signed=True))
    save(figure, target)


def draw_map(
    axes: Axes, grid: Grid, field: np.ndarray, title: str, land: np.ndarray | None, **colors: Any
) -> None:
    """Draw a field (H, W) on its grid, in degrees, the outline of land if it is known, and a colour bar."""
    # Every n-th cell, because a mean would hide noise.
    every = -(-field.shape[1] // MAX_COLUMNS)
    axis = grid.longitude[::every], grid.latitude[::every]
    mesh = axes.pcolormesh(*axis, field[::every, ::every], shading="nearest", rasterized=True, **colors)
    if land is not None:
        axes.contour(*axis, land[::every, ::every], levels=[0.5], colors="k", linewidths=0.6)
    east, north = longitude_bounds(grid.longitude), latitude_bounds(grid.latitude)
    axes.set(xlim=(east[0], east[-1]), ylim=(north[-1], north[0]))
    axes.set_title(title, fontsize=9)
    axes.figure.colorbar(mesh, ax=axes, shrink=0.9, pad=0.01)


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


# -- of a run and of an evaluation ---------------------------------------------------------------------


def plot_run(folder: Path, scores: Scores, example: Example, grid: Grid, land: np.ndarray | None) -> None:
    """Write the plots of a run into `folder`/plots."""
    target = folder / "plots"
    # Training (line) and validation loss (points) of metrics.jsonl against the step.
    figure, (axes,) = build_panels(1, f"Loss: {folder.name}")
    records = read_records(folder / "metrics.jsonl")
    for key, label, line in (("loss", "training", "-"), ("val/loss", "validation", "o")):
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:
            text = f"{label} ({points[-1][1]:.4f} at the end)"
            axes.plot(*zip(*points, strict=True), line, markersize=4, label=text)
    axes.set(xlabel="step", ylabel="loss (normalised units)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend()
    save(figure, target / "loss.png")
    dates = describe_dates(scores.by_forecast.sel(forecast="model"))
    title = f"Root-mean-square error, validation period: {dates}"
    plot_rmse(scores.by_forecast, scores.variables, title, target / "rmse.png")
    hours = lead_hours(scores.by_forecast)[0]
    plot_maps(example, hours, scores.by_forecast, grid, land, target / "maps.png")


def plot_evaluation(evaluation: Evaluation, land: np.ndarray | None, folder: Path) -> None:
    """Write the plots of an evaluation into a folder. land (H, W): the mask on its grid."""
    scores, first = evaluation.scores, evaluation.scores.isel(forecast=0)
    names = [name for name in variable_names(first) if np.isfinite(select(first, "rmse", name)).any()]
    title = f"Root-mean-square error, {describe(evaluation)}"
    plot_rmse(scores, headline(names), title, folder / "rmse.png")
    if evaluation.example:
        hours = evaluation.example_hours
        plot_maps(evaluation.example, hours, scores, evaluation.grid, land, folder / "maps.png")

    # -- zonal energy, mean over 30 to 60 degrees of both hemispheres, of forecasts and the truth
    spectra, curves = evaluation.spectra, {}
    if not spectra:
        return
    first = next(iter(spectra.values()))
    for name in headline(variable_names(first)):
        of_forecast = {}
        for key, dataset in (spectra | {"truth": first}).items():
            if name in variable_names(dataset):
                energy = one_variable(dataset, name).isel(lead_time=-1, drop=True)
                energy = energy.sel(source="truth" if key == "truth" else "forecast")
                curve = mean_of_midlatitudes(energy).isel(zonal_wavenumber=slice(1, None))
                of_forecast[key] = curve.where(curve > 0)  # an axis of logarithms has no 0
        if any(curve.notnull().any() for curve in of_forecast.values()):
            curves[label_of(first, name)] = of_forecast  # else each row lacks a cell, or no row is there
    title = f"Zonal energy at {lead_hours(first)[-1]} h, {int(first['num_dates'][-1])} initial dates"
    if curves:
        legend = {name: name for name in [*spectra, "truth"]}
        plot_lines(curves, "zonal wavenumber", "log", title, folder / "spectra.png", legend)


def describe(evaluation: Evaluation) -> str:
    """Return the region, period and number of dates by lead, for titles."""
    times, scores = evaluation.by_date["initial_time"].values, evaluation.scores.isel(forecast=0)
    period = f"{str(times[0])[:10]} to {str(times[-1])[:10]}"
    return f"{scores['region'].item(0)}: {describe_dates(scores)}, {period}"
