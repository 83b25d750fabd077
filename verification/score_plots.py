"""Plots of an evaluation: scores against lead time, spectra, maps of bias, reliability of an ensemble."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from datasets.grid import Grid
from datasets.variables import named_by
from verification.details import MIDLATITUDES, mean_over_latitudes
from verification.evaluation import Evaluation
from verification.maps import Land, draw_map, error_colours
from verification.plots import STYLES, build_panels, label_with, save
from verification.report import GRAVITY, energy_units
from verification.score_tables import lead_hours, one_variable, select, units_of, variable_names
from verification.validation_scores import dates_of_leads

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
MAX_PANELS = 7  # and one of the number of dates
TITLES = {"rmse": "Root-mean-square error", "acc": "Anomaly correlation"}
COLOURS = ("C3", "C1", "C4", "C5", "C6", "C8", "C9")
PUBLISHED = Path(__file__).with_name("published.csv")


def headline(names: Sequence[str], most: int = MAX_PANELS, chosen: Sequence[str] = ()) -> list[str]:
    """Return the chosen variables, else at most `most`, the customary ones first."""
    if wanted := named_by(chosen, names):
        return wanted
    first = [name for name in HEADLINE if name in names]
    return (first + [name for name in names if name not in first])[:most]


def style(name: str, number: int) -> dict[str, Any]:
    """Return the look of a curve: a baseline has its own, a forecast the next colour."""
    if name != "model" and name in STYLES:
        return {**STYLES[name], "markersize": 3}
    return {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 3}


def describe(evaluations: Mapping[str, Evaluation]) -> str:
    """Return the period and number of dates by lead, for titles; of other forecasts if they differ."""
    name, first = next(iter(evaluations.items()))
    times = first.by_date["time"].values
    said = {name: counts_of(evaluation) for name, evaluation in evaluations.items()}
    differing = [f"; {other}: {counts}" for other, counts in said.items() if counts != said[name]]
    return f"{said[name]}, {str(times[0])[:10]} to {str(times[-1])[:10]}{''.join(differing)}"


def counts_of(evaluation: Evaluation) -> str:
    scores = evaluation.scores
    return dates_of_leads(scores["num_dates"].values.tolist(), lead_hours(scores))


def counts_at(evaluation: Evaluation, hours: int) -> str:
    """For what shows one lead."""
    return f"{int(evaluation.scores['num_dates'].sel(lead_time=np.timedelta64(hours, 'h')))} initial dates"


def published(evaluation: Evaluation, variable: str, metric: str) -> dict[str, pd.DataFrame]:
    """Return label -> published scores of a variable ("geopotential:500") by lead time, from published.csv.

    Only those that are comparable: of the globe, on a grid of the same spacing, in years that include all
    initial dates.
    """
    if evaluation.bias is None or "global" not in evaluation.scores["region"]:
        return {}
    spacing = float(np.abs(np.diff(evaluation.bias["latitude"].values)).mean())
    years = evaluation.by_date["time"].dt.year.values
    every = pd.read_csv(PUBLISHED, dtype={"year": str})
    first, last = (every["year"].str.split("-").str[end].astype(int) for end in (0, -1))
    same_grid = np.isclose(every["grid"].str.split().str[0].astype(float), spacing, rtol=0.02)
    rows = every[same_grid & (first <= years.min()) & (last >= years.max())]
    rows = rows.query("variable == @variable and metric == @metric")
    labels = rows["forecast"] + ", " + rows["grid"] + ", " + rows["year"]
    return {str(label): own.sort_values("lead_hours") for label, own in rows.groupby(labels, sort=False)}


def plot_by_lead(
    evaluations: Mapping[str, Evaluation],
    metric: str,
    target: Path,
    chosen: Sequence[str] = (),
) -> None:
    """A panel a variable: the metric against the lead time, published scores in grey; the last one shows how
    many dates each lead has.
    """
    first = next(iter(evaluations.values())).scores
    scored = [name for name in variable_names(first) if np.isfinite(select(first, metric, name)).any()]
    names = headline(scored, chosen=chosen)
    figure, panels = build_panels(len(names) + 1, f"{TITLES.get(metric, metric)}, {describe(evaluations)}")
    draw_dates(panels[-1], evaluations)
    for axes, name in zip(panels, names, strict=False):
        for number, (label, evaluation) in enumerate(evaluations.items()):
            if name in variable_names(evaluation.scores) and metric in evaluation.scores["metric"]:
                days = np.array(lead_hours(evaluation.scores)) / 24
                values = select(evaluation.scores, metric, name)
                if np.isfinite(values).any():
                    axes.plot(days, values, label=label, **style(label, number))
        draw_published(axes, published(next(iter(evaluations.values())), name, metric))
        label_axes(axes, name, metric, units_of(first, name))
    handles = {
        text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    save(figure, target)


def draw_published(axes: Axes, scores: Mapping[str, pd.DataFrame]) -> None:
    """Draw published scores in grey, those inside the axes only, which stay as they are."""
    (west, east), (south, north) = axes.get_xlim(), axes.get_ylim()
    for number, (label, rows) in enumerate(scores.items()):
        days = rows["lead_hours"] / 24
        rows = rows[(days >= west) & (days <= east) & (rows["value"] >= south) & (rows["value"] <= north)]
        look: dict[str, Any] = {"color": "0.6", "linestyle": "", "marker": "xv+d1"[number % 5]}
        if len(rows):
            axes.plot(rows["lead_hours"] / 24, rows["value"], label=label, **look)
    axes.set(xlim=(west, east), ylim=(south, north))


def draw_dates(axes: Axes, evaluations: Mapping[str, Evaluation]) -> None:
    for number, (label, evaluation) in enumerate(evaluations.items()):
        days = np.array(lead_hours(evaluation.scores)) / 24
        axes.plot(days, evaluation.scores["num_dates"], label=label, **style(label, number))
    axes.set(title="initial dates with a truth", xlabel="lead time (days)", ylim=(0, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def label_axes(axes: Axes, name: str, metric: str, units: str) -> None:
    """Geopotential gets a second axis in geopotential metres."""
    plain = metric.startswith("acc") or "ratio" in metric
    axes.set(title=name.replace("_", " "), xlabel="lead time (days)", ylabel="" if plain else units)
    axes.grid(alpha=0.3)
    if units == "m2 s-2" and not plain:
        scale = (lambda x: x / GRAVITY, lambda x: x * GRAVITY)
        axes.secondary_yaxis("right", functions=scale).set_ylabel("gpm", fontsize=8)


def plot_spectra(evaluations: Mapping[str, Evaluation], target: Path, chosen: Sequence[str] = ()) -> None:
    """Zonal energy at the longest detailed lead, mean over 30 to 60 degrees of both hemispheres, against the
    truth's. Nothing where no grid goes round the globe.
    """
    found = {name: e.spectra.isel(lead_time=-1) for name, e in evaluations.items() if e.spectra is not None}
    if not found:
        return
    first = next(iter(found.values()))
    names = headline(variable_names(first), 6, chosen)
    hours = int(first["lead_time"] / np.timedelta64(1, "h"))
    dates = counts_at(next(iter(evaluations.values())), hours)
    figure, panels = build_panels(len(names), f"Zonal energy at {hours} h, {dates}")
    for axes, name in zip(panels, names, strict=True):
        for number, (label, spectra) in enumerate(found.items()):
            if name in variable_names(spectra):
                draw_spectrum(axes, spectra, "forecast", name, {**style(label, number), "label": label})
        draw_spectrum(axes, first, "truth", name, {"label": "truth", "color": "k", "linewidth": 1})
        axes.set(title=name.replace("_", " "), xlabel="wavelength (km)", xscale="log", yscale="log")
        axes.set_ylabel(energy_units(first, name), fontsize=8)
        axes.invert_xaxis()
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    save(figure, target)


def draw_spectrum(axes: Axes, spectra: xr.Dataset, source: str, name: str, look: dict[str, Any]) -> None:
    mean = mean_over_latitudes(one_variable(spectra, name).sel(source=source), MIDLATITUDES)
    if (mean.values[1:] > 0).any():  # others cannot be drawn on logarithmic axes
        axes.plot(mean["wavelength"].values[1:] / 1000, mean.values[1:], **{**look, "marker": ""})


def plot_bias(
    name: str,
    evaluation: Evaluation,
    target: Path,
    chosen: Sequence[str] = (),
    land: Land | None = None,
) -> None:
    """Maps of forecast - truth, mean over the dates, at the longest detailed lead."""
    assert evaluation.bias is not None
    bias = evaluation.bias.isel(lead_time=-1)
    hours = int(bias["lead_time"] / np.timedelta64(1, "h"))
    names = headline(variable_names(bias), 6, chosen)
    grid = Grid(bias["latitude"].values, bias["longitude"].values)
    title = f"Bias of {name} (forecast - truth) at {hours} h, {counts_at(evaluation, hours)}"
    figure, panels = build_panels(len(names), title, columns=2, size=(7, 3))
    for axes, variable in zip(panels, names, strict=True):
        field = one_variable(bias, variable)
        label = label_with(variable, units_of(bias, variable))
        draw_map(axes, grid, field.values, label, land, **error_colours(field.values))
    save(figure, target)


def plot_reliability(name: str, evaluation: Evaluation, target: Path, chosen: Sequence[str] = ()) -> None:
    """Spread against RMSE of the ensemble mean over lead time, and the ranks of the truth among the members.
    Nothing for what is no ensemble.
    """
    if evaluation.ranks is None:
        return
    scores, ranks = evaluation.scores, evaluation.ranks.isel(lead_time=-1)
    hours = int(ranks["lead_time"] / np.timedelta64(1, "h"))
    names = headline(variable_names(ranks), 4, chosen)
    title = f"Ensemble {name}: spread and error, ranks at {hours} h, {describe({name: evaluation})}"
    figure, panels = build_panels(2 * len(names), title, columns=len(names), size=(3.4, 2.6))
    days = np.array(lead_hours(scores)) / 24
    for above, below, variable in zip(panels, panels[len(names) :], names, strict=False):
        for metric, line in (("rmse", "-"), ("spread", "--")):
            above.plot(days, select(scores, metric, variable), f"C3{line}", label=metric)
        label_axes(above, variable, "spread", units_of(scores, variable))
        counts = one_variable(ranks, variable)
        below.bar(counts["rank"], counts * counts.sizes["rank"], color="0.6")
        below.axhline(1, color="k", linewidth=0.8)
        below.set(xlabel="members below the truth", ylabel="frequency (1: reliable)")
    panels[0].legend()
    save(figure, target)
