"""Plots of an evaluation: scores against lead time, spectra, maps of bias, reliability of an ensemble."""

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

from datasets.variables import short_label, split_name
from verification.evaluation import Evaluation
from verification.plots import STYLES
from verification.published import published
from verification.report import GRAVITY, lead_hours, select, units_of, variable_names
from verification.spectra import mean_over_latitudes

# Drawn where they are there, in this order; others follow.
HEADLINE = (
    "geopotential:500",
    "temperature:850",
    "2m_temperature",
    "mean_sea_level_pressure",
    "10m_u_component_of_wind",
    "10m_v_component_of_wind",
    "wind_vector:850",
    "specific_humidity:700",
)
MAX_PANELS = 8
MIDLATITUDES = ((-60.0, -30.0), (30.0, 60.0))
COLOURS = ("C3", "C1", "C4", "C5", "C6", "C8", "C9")


def headline(names: Sequence[str], most: int = MAX_PANELS) -> list[str]:
    """At most so many variables, the customary ones first."""
    first = [name for name in HEADLINE if name in names]
    return (first + [name for name in names if name not in first])[:most]


def style(name: str, place: int) -> dict[str, Any]:
    """Of a baseline its own, as in the plots of a run; of a forecast the next colour."""
    if name != "model" and name in STYLES:
        return STYLES[name]
    return {"color": COLOURS[place % len(COLOURS)], "marker": "o", "markersize": 3}


def describe(evaluations: Mapping[str, Evaluation]) -> str:
    """Whose dates, how many: for titles."""
    times = next(iter(evaluations.values())).by_date["time"].values
    days = f"{str(times[0])[:10]} to {str(times[-1])[:10]}"
    return f"{len(times)} initial dates, {days}"


def plot_by_lead(
    evaluations: Mapping[str, Evaluation], metric: str, target: Path, with_published: bool = False
) -> None:
    """A panel a variable: the metric against the lead time, published scores in grey."""
    first = next(iter(evaluations.values())).scores
    names = [n for n in headline(variable_names(first)) if np.isfinite(select(first, metric, n)).any()]
    figure, panels = build_panels(len(names), describe(evaluations), metric)
    for axes, name in zip(panels, names, strict=True):
        for place, (label, evaluation) in enumerate(evaluations.items()):
            if name in variable_names(evaluation.scores) and metric in evaluation.scores["metric"]:
                days = np.array(lead_hours(evaluation.scores)) / 24
                axes.plot(days, select(evaluation.scores, metric, name), label=label, **style(label, place))
        for number, (label, scores) in enumerate(published(name, metric).items() if with_published else ()):
            points = [(s.lead_hours / 24, s.value) for s in scores]
            marker = "xv+d1"[number % 5]
            axes.plot(*zip(*points, strict=True), color="0.6", linestyle="", marker=marker, label=label)
        label_axes(axes, name, metric, units_of(first, name))
    handles = {
        text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    save(figure, target)


def build_panels(count: int, dates: str, what: str) -> tuple[Figure, list[Axes]]:
    columns = min(4, count)
    rows = -(-count // columns)
    size = (3.6 * columns + 0.6, 2.9 * rows + 0.9)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes in panels.flat[count:]:
        axes.set_visible(False)
    figure.suptitle(f"{what.upper().replace('_', ' ')}, {dates}")
    return figure, list(panels.flat[:count])


def label_axes(axes: Axes, name: str, metric: str, units: str) -> None:
    """Geopotential gets a second axis in geopotential metres."""
    plain = metric.startswith("acc") or "ratio" in metric
    axes.set(title=name.replace("_", " "), xlabel="lead time (days)", ylabel="" if plain else units)
    axes.grid(alpha=0.3)
    if units == "m2 s-2" and not plain:
        scale = (lambda x: x / GRAVITY, lambda x: x * GRAVITY)
        axes.secondary_yaxis("right", functions=scale).set_ylabel("gpm", fontsize=8)


def plot_spectra(evaluations: Mapping[str, Evaluation], target: Path) -> bool:
    """Zonal energy at the longest detailed lead, mean over 30 to 60 degrees of both hemispheres, against the
    truth's. False where no grid goes round the globe.
    """
    found = {name: e.spectra for name, e in evaluations.items() if e.spectra is not None}
    if not found:
        return False
    first = next(iter(found.values()))
    names = headline(variable_names(first.isel(source=0)), 6)
    hours = lead_hours(first)[-1]
    figure, panels = build_panels(len(names), describe(evaluations), f"zonal energy at {hours} h")
    for axes, name in zip(panels, names, strict=True):
        for place, (label, spectra) in enumerate(found.items()):
            if name in variable_names(spectra.isel(source=0)):
                draw_spectrum(axes, spectra, "forecast", name, {"label": label, **style(label, place)})
        draw_spectrum(axes, first, "truth", name, {"label": "truth", "color": "k", "linewidth": 1})
        axes.set(title=name.replace("_", " "), xlabel="wavelength (km)", xscale="log", yscale="log")
        axes.set_ylabel(f"({units_of(first, name)})^2 m", fontsize=8)
        axes.invert_xaxis()
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    save(figure, target)
    return True


def draw_spectrum(axes: Axes, spectra: xr.Dataset, source: str, name: str, look: dict[str, Any]) -> None:
    base, level = split_name(name)
    spectrum = spectra[base].sel(source=source).isel(lead_time=-1)
    spectrum = spectrum if level is None else spectrum.sel(level=int(level))
    mean = mean_over_latitudes(spectrum, MIDLATITUDES)
    wavelength, energy = mean["wavelength"].values[1:] / 1000, mean.values[1:]
    axes.plot(wavelength, energy, **{**look, "marker": ""})


def plot_bias(name: str, evaluation: Evaluation, target: Path) -> None:
    """Maps of forecast - truth, mean over the dates, at the longest detailed lead."""
    maps = evaluation.maps
    assert maps is not None
    names, hours = headline(variable_names(maps.isel(lead_time=-1)), 6), lead_hours(maps)[-1]
    columns = min(2, len(names))
    rows = -(-len(names) // columns)
    size = (7 * columns, 3 * rows + 0.7)
    figure, panels = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axes, variable in zip(panels.flat, names, strict=False):
        base, level = split_name(variable)
        field = maps[base].sel(metric="bias").isel(lead_time=-1)
        field = field if level is None else field.sel(level=int(level))
        bound = float(np.nanpercentile(np.abs(field), 99.5)) or 1.0
        span = {"vmin": -bound, "vmax": bound, "cmap": "PuOr_r", "shading": "nearest", "rasterized": True}
        mesh = axes.pcolormesh(field["longitude"], field["latitude"], field, **span)
        axes.set_title(f"{short_label(variable)} ({units_of(maps, variable)})", fontsize=10)
        axes.xaxis.set_major_formatter("{x:g}°E")
        axes.yaxis.set_major_formatter("{x:g}°N")
        figure.colorbar(mesh, ax=axes, shrink=0.9)
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    figure.suptitle(f"Bias of {name} (forecast - truth) at {hours} h, {describe({name: evaluation})}")
    save(figure, target)


def plot_reliability(name: str, evaluation: Evaluation, target: Path) -> bool:
    """Spread against RMSE of the ensemble mean over lead time, and the ranks of the truth among the members.
    False for what is no ensemble.
    """
    if evaluation.ranks is None:
        return False
    names = headline(variable_names(evaluation.ranks.isel(lead_time=-1)), 4)
    size = (3.4 * len(names) + 0.6, 6)
    figure, panels = plt.subplots(2, len(names), figsize=size, squeeze=False, layout="constrained")
    days = np.array(lead_hours(evaluation.scores)) / 24
    for (above, below), variable in zip(panels.T, names, strict=True):
        for metric, line in (("rmse", "-"), ("spread", "--")):
            above.plot(days, select(evaluation.scores, metric, variable), f"C3{line}", label=metric)
        label_axes(above, variable, "spread", units_of(evaluation.scores, variable))
        base, level = split_name(variable)
        ranks = evaluation.ranks[base].isel(lead_time=-1)
        ranks = ranks if level is None else ranks.sel(level=int(level))
        below.bar(ranks["rank"], ranks * ranks.sizes["rank"], color="0.6")
        below.axhline(1, color="k", linewidth=0.8)
        below.set(xlabel="members below the truth", ylabel="frequency (1: reliable)")
    panels[0, 0].legend()
    hours = lead_hours(evaluation.ranks)[-1]
    title = f"Ensemble {name}: spread and error, ranks at {hours} h, {describe({name: evaluation})}"
    figure.suptitle(title)
    save(figure, target)
    return True


def save(figure: Figure, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)
