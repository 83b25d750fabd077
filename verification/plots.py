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
from jobs.journal import read_records
from verification.scores_by_date import Evaluation, Example
from verification.spectra import mean_of_midlatitudes
from verification.tables import (
    DAY,
    combine,
    describe_dates,
    headline,
    labels,
    lead_hours,
    one_variable,
    select,
    units_of,
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


# -- for all plots


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


def label_with(variable: str, units: str) -> str:
    """Return "geopotential at 500 hPa (m2 s-2)"; without brackets if the units are unknown."""
    name, level = split_name(variable)
    text = name.replace("_", " ") + ("" if level is None else f" at {level} hPa")
    return f"{text} ({units})" if units else text


def plot_lines(
    curves: Mapping[str, Mapping[str, xr.DataArray]], x: str, titles: Sequence[str], title: str, target: Path,
    legend: Mapping[str, str], **look: Any
) -> None:  # fmt: skip
    """Draw curves (variable -> forecast -> values along the only dimension) in a panel a variable.

    x: name of the axis; titles: of the panels; legend: label of each forecast.
    """
    models = [name for name in legend if name not in COLORS]
    colors = {name: OTHER_COLORS[i % len(OTHER_COLORS)] for i, name in enumerate(models)} | COLORS
    figure, panels = build_panels(len(curves), title, columns=4, size=(4, 3.2))
    for axes, of_forecast, heading in zip(panels, curves.values(), titles, strict=True):
        for name, curve in of_forecast.items():
            axes.plot(curve[curve.dims[0]], curve, color=colors[name], label=legend[name], **look)
        axes.set(xlabel=x)
        axes.set_title(heading, fontsize=10)
        axes.grid(alpha=0.3)
    drawn = {name for of_forecast in curves.values() for name in of_forecast}
    lines = [Line2D([], [], color=colors[name], label=legend[name]) for name in legend if name in drawn]
    figure.legend(handles=lines, loc="outside lower center", ncols=4)
    if look.get("marker") is None:
        for axes in panels:
            axes.set(xscale="log", yscale="log")
    save(figure, target)


def plot_rmse(scores: xr.Dataset, names: Sequence[str], title: str, target: Path) -> None:
    """Draw the RMSE of some variables against the lead time. scores: (forecast, ...)."""
    scores = scores.assign_coords(lead_time=(scores["lead_time"] / DAY).values)
    legend = dict(zip(scores["forecast"].values.tolist(), labels(scores), strict=True))
    curves = {}
    for name in names:
        values = select(scores, "rmse", name)
        of_forecast = {key: values.sel(forecast=key).dropna("lead_time") for key in legend}
        curves[name] = {key: curve for key, curve in of_forecast.items() if curve.size}
    curves = {name: of_forecast for name, of_forecast in curves.items() if of_forecast}
    titles = [label_with(name, units_of(scores, name)) for name in curves]
    if curves:
        plot_lines(curves, "lead time (days)", titles, title, target, legend, marker="o", markersize=3)


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
    title = f"Root-mean-square error, validation period: {dates}"
    combined = combine(scores.by_forecast)
    plot_rmse(combined, scores.variables, title, files["rmse"])
    plot_maps(example, scores.lead_hours[0], combined, grid, land, files["maps"])
    return files


def draw_losses(axes: Axes, records: Sequence[dict[str, Any]]) -> None:
    """Draw training (line) and validation loss (points) of metrics.jsonl against the step."""
    for key, label, line in (("loss", "training", "-"), ("val/loss", "validation", "o")):
        points = [(record["step"], record[key]) for record in records if record.get(key) is not None]
        if points:
            text = f"{label} ({points[-1][1]:.4f} at the end)"
            axes.plot(*zip(*points, strict=True), line, markersize=4, label=text)
    axes.set(xlabel="step", ylabel="loss (normalised units)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    if axes.lines:
        axes.legend()


def plot_maps(
    example: Example, hours: int, scores: xr.Dataset, grid: Grid, land: np.ndarray | None, target: Path
) -> None:
    """Draw truth, forecast and error of the first variables, from one initial date at a lead in hours.

    scores: with the units of the variables.
    """
    date, fields = example
    valid = str(date + np.timedelta64(hours, "h"))[:16]
    title = f"{hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    names = list(fields)[:MAX_MAPS]
    figure, panels = build_panels(3 * len(names), title, columns=3, size=(4.5, 2.4))
    for row, variable in enumerate(names):
        truth, forecast = fields[variable]
        error, colors = forecast - truth, color_range(truth, forecast)
        label = label_with(variable, units_of(scores, variable))
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


# -- of an evaluation


def plot_evaluation(evaluation: Evaluation, land: np.ndarray | None, folder: Path) -> None:
    """Write the plots of an evaluation into a folder. land (H, W): the mask on its grid."""
    scores, first = evaluation.scores, evaluation.scores.isel(forecast=0)
    names = [name for name in variable_names(first) if np.isfinite(select(first, "rmse", name)).any()]
    title = f"Root-mean-square error, {describe(evaluation)}"
    plot_rmse(scores, headline(names), title, folder / "rmse.png")
    if evaluation.spectra:
        plot_spectra(evaluation.spectra, folder / "spectra.png")
    if evaluation.example:
        hours = evaluation.example_hours
        plot_maps(evaluation.example, hours, scores, evaluation.grid, land, folder / "maps.png")


def describe(evaluation: Evaluation) -> str:
    """Return the region, period and number of dates by lead, for titles."""
    times, scores = evaluation.by_date["initial_time"].values, evaluation.scores
    dates = describe_dates(scores["num_dates"].values[0].tolist(), lead_hours(scores))
    return f"{scores['region'].item(0)}: {dates}, {str(times[0])[:10]} to {str(times[-1])[:10]}"


def plot_spectra(spectra: Mapping[str, xr.Dataset], target: Path) -> None:
    """Draw zonal energy, mean over 30 to 60 degrees of both hemispheres, of forecasts and the truth.

    spectra: `Evaluation.spectra` by forecast.
    """
    first, curves = next(iter(spectra.values())), {}
    for name in headline(variable_names(first)):
        sources = {key: (each, "forecast") for key, each in spectra.items() if name in variable_names(each)}
        of_forecast = {}
        for key, (dataset, source) in (sources | {"truth": (first, "truth")}).items():
            energy = one_variable(dataset, name).sel(source=source).isel(lead_time=-1, drop=True)
            curve = mean_of_midlatitudes(energy).isel(zonal_wavenumber=slice(1, None))
            of_forecast[key] = curve.where(curve > 0)  # an axis of logarithms has no 0
        if any(curve.notnull().any() for curve in of_forecast.values()):
            curves[name] = of_forecast  # else each row there lacks a cell, or the grid has no such rows
    if not curves:
        return
    title = f"Zonal energy at {lead_hours(first)[-1]} h, {int(first['num_dates'][-1])} initial dates"
    titles, legend = [label_with(name, units_of(first, name)) for name in curves], [*spectra, "truth"]
    plot_lines(curves, "zonal wavenumber", titles, title, target, dict(zip(legend, legend, strict=True)))
