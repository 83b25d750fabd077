"""Plots of a run and of an evaluation: losses, scores against lead time, spectra, maps, reliability."""

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
from matplotlib.ticker import MaxNLocator

from datasets.grid import Grid
from datasets.variables import named_by, short_label
from jobs.journal import read_records
from verification.details import mean_over_latitudes
from verification.evaluation import Evaluation
from verification.maps import Land, draw_map, error_colors, field_colors
from verification.report import DAY, GRAVITY
from verification.score_tables import (
    describe_dates,
    lead_hours,
    one_variable,
    select,
    units_of,
    variable_names,
)
from verification.validation import Example, Scores

STYLES = {
    "persistence": {"color": "C0", "marker": "s", "linestyle": "--"},
    "damped persistence": {"color": "C2", "marker": "^", "linestyle": "--"},
    "climatology": {"color": "0.4", "linestyle": ":"},
    "training mean": {"color": "0.6", "linestyle": "-."},
}
COLORS = ("C3", "C1", "C4", "C5", "C6", "C8", "C9")  # of forecasts that are no baselines
# Variables that are drawn first; others follow.
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
MAX_MAPS = 4
TITLES = {"rmse": "Root-mean-square error", "acc": "Anomaly correlation"}
PUBLISHED = Path(__file__).with_name("published.csv")


# -- what all plots have in common


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


def save(figure: Figure, target: Path) -> None:
    """Write a figure as PNG, and close it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def label_with(variable: str, units: str) -> str:
    """Return "t2m (K)"; without brackets if the units are unknown."""
    return f"{short_label(variable)} ({units})" if units else short_label(variable)


def headline(names: Sequence[str], most: int = MAX_PANELS, chosen: Sequence[str] = ()) -> list[str]:
    """Return the chosen variables, else at most `most`, the customary ones first."""
    first = [name for name in HEADLINE if name in names]
    return named_by(chosen, names) or list(dict.fromkeys([*first, *names]))[:most]


def style(name: str, number: int) -> dict[str, Any]:
    """Return the look of a curve: a baseline has its own, a forecast the next colour."""
    own = STYLES.get(name, {"color": COLORS[number % len(COLORS)], "marker": "o"})
    return {"label": name, "markersize": 3, **own}


# -- of a run


def plot_run(
    folder: Path,
    scores: Scores,
    example: Example,
    grid: Grid,
    land: np.ndarray | None,
    chosen: Sequence[str] = (),
) -> dict[str, Path]:
    """Write the plots of a run into `folder`/plots; return the file of each by name.

    chosen: the variables of maps, the first ones where none is named.
    """
    date, every = example
    fields = {name: every[name] for name in chosen or list(every)[:MAX_MAPS]}
    files = {name: folder / f"plots/{name}.png" for name in ("loss", "rmse", "maps")}
    figure, (axes,) = build_panels(1, f"Loss: {folder.name}", size=(8, 4))
    draw_losses(axes, {"": read_records(folder / "metrics.jsonl")})
    save(figure, files["loss"])
    dates = describe_dates(scores.num_dates, scores.lead_hours)
    title = f"{TITLES['rmse']}, validation period: {dates}"
    plot_by_lead(scores.by_forecast, "rmse", scores.variables, title, files["rmse"])
    plot_maps(date, fields, scores, grid, land, files["maps"])
    return files


def draw_losses(axes: Axes, records_of: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Draw training (lines) and validation loss (points) against the step; lines of metrics.jsonl by run."""
    for number, (run, records) in enumerate(records_of.items()):
        for key, label, line in (("loss", "training", "-"), ("val/loss", "validation", "o")):
            points = [(r["step"], r[key]) for r in records if r.get(key) is not None]
            if points:
                text = f"{run} {label} ({points[-1][1]:.4f} at the end)".strip()
                color = f"C{2 * number + (line == 'o')}"
                axes.plot(*zip(*points, strict=True), line, markersize=4, color=color, label=text)
    axes.set(xlabel="step", ylabel="loss (normalised units)", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8)


def plot_maps(
    date: np.datetime64,
    fields: dict[str, tuple[np.ndarray, np.ndarray]],
    scores: Scores,
    grid: Grid,
    land: np.ndarray | None,
    target: Path,
) -> None:
    """Draw truth, forecast and error from one initial date; fields: variable -> (truth, forecast), (H, W)."""
    hours, own_land = scores.lead_hours[0], None if land is None else Land(grid, land)
    valid = str(date + np.timedelta64(hours, "h"))[:16]
    title = f"{hours} h forecast for {valid} UTC, from the analysis of {str(date)[:16]} UTC"
    figure, panels = build_panels(3 * len(fields), title, columns=3, size=(4.5, 2.4))
    for row, (variable, (truth, forecast)) in enumerate(fields.items()):
        error, colors = forecast - truth, field_colors(truth, forecast)
        label = label_with(variable, units_of(scores.by_forecast["model"], variable))
        rms = f"forecast - truth (unweighted RMS {np.sqrt(np.nanmean(error**2)):.3g})"
        draw_map(panels[3 * row], grid, truth, f"truth: {label}", own_land, **colors)
        draw_map(panels[3 * row + 1], grid, forecast, f"forecast: {label}", own_land, **colors)
        draw_map(panels[3 * row + 2], grid, error, rms, own_land, **error_colors(error))
    save(figure, target)


# -- scores against lead time


def plot_by_lead(
    scores: Mapping[str, xr.Dataset],
    metric: str,
    names: Sequence[str],
    title: str,
    target: Path,
    compared: Evaluation | None = None,
) -> None:
    """Draw a metric against the lead time, a panel a variable, and the number of dates in the last panel.

    scores: by forecast. compared: the evaluation whose published scores are drawn in grey.
    """
    first = next(iter(scores.values()))
    figure, panels = build_panels(len(names) + 1, title)
    for number, (label, dataset) in enumerate(scores.items()):
        draw_by_lead(panels[-1], dataset["num_dates"], label, number)
        for axes, name in zip(panels, names, strict=False):
            if name in variable_names(dataset) and metric in dataset["metric"]:
                draw_by_lead(axes, select(dataset, metric, name), label, number)
    for axes, name in zip(panels, names, strict=False):
        draw_published(axes, published(compared, name, metric) if compared else {})
        label_axes(axes, name, metric, units_of(first, name))
    panels[-1].set(title="initial dates with a truth", xlabel="lead time (days)", ylim=(0, None))
    panels[-1].yaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].grid(alpha=0.3)
    legends = [axes.get_legend_handles_labels() for axes in panels]
    handles = {text: line for lines, texts in legends for line, text in zip(lines, texts, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, fontsize=8)
    save(figure, target)


def draw_by_lead(axes: Axes, scores: xr.DataArray, label: str, number: int) -> None:
    """Draw a curve (L,), unless it has no finite value and would be an empty entry of the legend."""
    if np.isfinite(scores).any():
        axes.plot(scores["lead_time"] / DAY, scores, **style(label, number))


def label_axes(axes: Axes, name: str, metric: str, units: str) -> None:
    """Set title and labels; geopotential gets a second axis in geopotential metres."""
    axes.set(title=name.replace("_", " "), xlabel="lead time (days)")
    axes.grid(alpha=0.3)
    if metric == "acc":
        return
    axes.set(ylabel=units, ylim=(0, None))
    if units == "m2 s-2":
        scale = (lambda x: x / GRAVITY, lambda x: x * GRAVITY)
        axes.secondary_yaxis("right", functions=scale).set_ylabel("gpm", fontsize=8)


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


def draw_published(axes: Axes, scores: Mapping[str, pd.DataFrame]) -> None:
    """Draw published scores in grey, those inside the axes only, which stay as they are."""
    (west, east), (south, north) = axes.get_xlim(), axes.get_ylim()
    for marker, (label, rows) in zip("xv+d1" * len(scores), scores.items(), strict=False):
        inside = (rows["lead_hours"] / 24).between(west, east) & rows["value"].between(south, north)
        if inside.any():
            days, values = rows["lead_hours"][inside] / 24, rows["value"][inside]
            axes.plot(days, values, label=label, color="0.6", linestyle="", marker=marker)
    axes.set(xlim=(west, east), ylim=(south, north))


# -- of an evaluation


def plot_evaluation(
    evaluations: Mapping[str, Evaluation], folder: Path, chosen: Sequence[str], land: Land | None
) -> None:
    """Write the plots of an evaluation into a folder; of bias and reliability only the first forecast's.

    chosen: variables, those of HEADLINE where none is named.
    """
    scores = {name: evaluation.scores for name, evaluation in evaluations.items()}
    name, first = next(iter(evaluations.items()))
    for metric, title in TITLES.items():
        if metric in first.scores["metric"]:
            every = variable_names(first.scores)
            scored = [each for each in every if np.isfinite(select(first.scores, metric, each)).any()]
            names, title = headline(scored, chosen=chosen), f"{title}, {describe(evaluations)}"
            plot_by_lead(scores, metric, names, title, folder / f"{metric}.png", first)
    if spectra := {name: each.spectra for name, each in evaluations.items() if each.spectra is not None}:
        example = next(iter(spectra.values()))
        names = headline(variable_names(example), 6, chosen)
        plot_spectra(spectra, f"Zonal energy {at_last(example)}", folder / "spectra.png", names)
    plot_bias(name, first, folder / "bias.png", chosen, land)
    if first.ranks is not None:
        plot_reliability(name, first, folder / "reliability.png", chosen)


def describe(evaluations: Mapping[str, Evaluation]) -> str:
    """Return the period and number of dates by lead, for titles; of other forecasts if they differ."""
    name, first = next(iter(evaluations.items()))
    times = first.by_date["time"].values
    dates = {
        name: describe_dates(each.scores["num_dates"].values.tolist(), lead_hours(each.scores))
        for name, each in evaluations.items()
    }
    differing = [f"; {other}: {each}" for other, each in dates.items() if each != dates[name]]
    where = "" if (region := first.by_date["region"].item(0)) == "global" else f"{region}: "
    return f"{where}{dates[name]}, {str(times[0])[:10]} to {str(times[-1])[:10]}{''.join(differing)}"


def at_last(details: xr.Dataset) -> str:
    """Return the longest lead of maps, spectra or ranks and its number of initial dates, for titles."""
    return f"at {lead_hours(details)[-1]} h, {int(details['num_dates'][-1])} initial dates"


def plot_spectra(spectra: Mapping[str, xr.Dataset], title: str, target: Path, names: Sequence[str]) -> None:
    """Draw zonal energy at the longest lead, mean over 30 to 60 degrees of both hemispheres, and the truth's.

    spectra: `Evaluation.spectra` by forecast.
    """
    at_end = {name: each.isel(lead_time=-1) for name, each in spectra.items()}
    first = next(iter(at_end.values()))
    figure, panels = build_panels(len(names), title)
    for axes, name in zip(panels, names, strict=True):
        draw_spectrum(axes, first, "truth", name, {"label": "truth", "color": "k", "linewidth": 1})
        for number, (label, each) in enumerate(at_end.items()):
            if name in variable_names(each):
                draw_spectrum(axes, each, "forecast", name, style(label, number))
        axes.set(title=name.replace("_", " "), xlabel="wavelength (km)", xscale="log", yscale="log")
        axes.set_ylabel(units_of(first, name), fontsize=8)
        axes.invert_xaxis()
        axes.grid(alpha=0.3, which="both")
    panels[0].legend(fontsize=8)
    save(figure, target)


def draw_spectrum(axes: Axes, spectra: xr.Dataset, source: str, name: str, look: dict[str, Any]) -> None:
    mean = mean_over_latitudes(one_variable(spectra, name).sel(source=source))
    if (mean.values[1:] > 0).any():  # others cannot be drawn on logarithmic axes
        axes.plot(mean["wavelength"].values[1:] / 1000, mean.values[1:], **{**look, "marker": ""})


def plot_bias(
    name: str, evaluation: Evaluation, target: Path, chosen: Sequence[str], land: Land | None
) -> None:
    """Draw maps of forecast - truth, mean over the dates, at the longest detailed lead."""
    assert evaluation.bias is not None
    bias = evaluation.bias.isel(lead_time=-1)
    names = headline(variable_names(bias), 6, chosen)
    grid = Grid(bias["latitude"].values, bias["longitude"].values)
    title = f"Bias of {name} (forecast - truth) {at_last(evaluation.bias)}"
    figure, panels = build_panels(len(names), title, columns=2, size=(7, 3))
    for axes, variable in zip(panels, names, strict=True):
        field = one_variable(bias, variable).values
        draw_map(
            axes, grid, field, label_with(variable, units_of(bias, variable)), land, **error_colors(field)
        )
    save(figure, target)


def plot_reliability(name: str, evaluation: Evaluation, target: Path, chosen: Sequence[str]) -> None:
    """Draw spread and RMSE of the ensemble mean over lead time, and the ranks of the truth."""
    assert evaluation.ranks is not None
    scores, ranks = evaluation.scores, evaluation.ranks.isel(lead_time=-1)
    names = headline(variable_names(ranks), 4, chosen)
    title = f"Ensemble {name}: spread and error, {describe({name: evaluation})}"
    figure, panels = build_panels(2 * len(names), title, columns=len(names), size=(3.4, 2.6))
    days = scores["lead_time"] / DAY
    for above, below, variable in zip(panels, panels[len(names) :], names, strict=False):
        for metric, line in (("rmse", "-"), ("spread", "--")):
            above.plot(days, select(scores, metric, variable), f"C3{line}", label=metric)
        label_axes(above, variable, "spread", units_of(scores, variable))
        counts = one_variable(ranks, variable)
        below.bar(counts["rank"], counts * counts.sizes["rank"], color="0.6")
        below.axhline(1, color="k", linewidth=0.8)
        below.set(xlabel="members below the truth", ylabel="frequency (1: reliable)")
        below.set_title(at_last(evaluation.ranks), fontsize=8)
    panels[0].legend()
    save(figure, target)
