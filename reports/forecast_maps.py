"""The first forecast of a run beside what came: maps of a few leads, and all leads as a moving picture."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.pyplot import close
from PIL import Image

from command_line import load_config
from datasets.grid import Grid
from datasets.selection import Selection, open_without_periods
from errors import DataError
from reports.figures import embedded
from reports.run import Run
from verification.forecast_layouts import StoredForecast, open_forecast
from verification.maps import Land, draw_map, error_colours, field_colours, thinned
from verification.plots import build_panels, label_with
from verification.score_plots import headline

STILLS = (24, 120, 240)  # hours
PAUSE, LAST = 200, 1500  # milliseconds that a frame is seen, and the last one
DPI = 90


@dataclass(frozen=True)
class Shown:
    """One variable of one forecast and its truth, (L, H, W) each, at `leads` (L,) from `date` on."""

    name: str
    units: str
    date: np.datetime64
    leads: np.ndarray
    grid: Grid
    land: Land | None
    forecast: np.ndarray
    truth: np.ndarray

    def title(self, number: int) -> str:
        hours = int(self.leads[number] / np.timedelta64(1, "h"))
        valid = str(self.date + self.leads[number])[:16].replace("T", " ")
        return f"{label_with(self.name, self.units)}, {hours / 24:g} days ahead, {valid} UTC"


def first_forecast(run: Run) -> Shown:
    """Of an ensemble its first member. ConfigError or DataError: there is none, or no truth for it."""
    store = run.folder / "forecast.zarr"
    if not store.exists():
        raise DataError("no forecast.zarr in the folder; forecast.py writes one")
    config = load_config(["--job.config_file", str(run.folder / "config.toml")])
    selection, forecast = open_without_periods(config.data, (1, 1)), open_forecast(str(store))
    truth = selection.archive
    if forecast.grid.shape != truth.grid.shape:
        raise DataError(f"the forecasts are on {forecast.grid.shape} points, {config.data.path!r} on others")
    common = [name for name in forecast.variables if name in truth.variables]
    name = headline(common, 1, config.validation.plot_variables)[0]
    leads = np.flatnonzero(forecast.leads > np.timedelta64(0, "s"))
    for date, time in enumerate(forecast.times):
        valid = time + forecast.leads[leads]
        if np.isin(valid, truth.times).all():
            return shown(name, forecast, selection, date, leads)
    raise DataError(f"{config.data.path!r} has no truth at every lead of any forecast")


def shown(name: str, forecast: StoredForecast, selection: Selection, date: int, leads: np.ndarray) -> Shown:
    truth, own = selection.archive, selection.land()
    time, ahead = forecast.times[date], forecast.leads[leads]
    fields = forecast.read_block(slice(date, date + 1), slice(leads[0], leads[-1] + 1), [name])[0]
    if forecast.num_members:
        fields = fields[:, 0]
    came = np.stack([truth.read(truth.index(time + lead), [name])[0] for lead in ahead])
    land = None if own is None else Land(truth.grid, own)
    return Shown(name, truth.units(name), time, ahead, truth.grid, land, fields[:, 0], came)


def stills(case: Shown) -> str:
    """Forecast, truth and error at some leads."""
    hours = (case.leads / np.timedelta64(1, "h")).astype(int)
    numbers = [int(np.flatnonzero(hours == lead)[0]) for lead in STILLS if lead in hours] or [len(hours) - 1]
    figure, panels = build_panels(3 * len(numbers), "", columns=3, size=(4.5, 2.4))
    colours = field_colours(case.truth)
    for row, number in enumerate(numbers):
        forecast, truth = case.forecast[number], case.truth[number]
        error = forecast - truth
        draw_map(panels[3 * row], case.grid, forecast, f"forecast, {hours[number]} h", case.land, **colours)
        draw_map(panels[3 * row + 1], case.grid, truth, "truth", case.land, **colours)
        root = float(np.sqrt(np.nanmean(error**2)))
        title = f"forecast - truth (unweighted RMS {root:.3g})"
        draw_map(panels[3 * row + 2], case.grid, error, title, case.land, **error_colours(error))
    return picture(figure)


def film(case: Shown) -> str:
    """Forecast and truth side by side, lead by lead."""
    figure, panels = build_panels(2, case.title(0), columns=2, size=(5.0, 2.8))
    colours = field_colours(case.truth)
    for axes, fields, what in zip(panels, (case.forecast, case.truth), ("forecast", "truth"), strict=True):
        draw_map(axes, case.grid, fields[0], what, case.land, **colours)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # which every frame would ask again
    frames = [*frames_of(case, figure, [axes.collections[0] for axes in panels])]
    close(figure)
    buffer, pauses = io.BytesIO(), [PAUSE] * (len(frames) - 1) + [LAST]
    more = {"append_images": frames[1:], "save_all": True, "duration": pauses, "loop": 0}
    frames[0].save(buffer, "WEBP", quality=70, **more)
    return embedded(buffer.getvalue(), "webp")


def frames_of(case: Shown, figure: Figure, meshes: list[Any]) -> Iterator[Image.Image]:
    for number in range(len(case.leads)):
        for mesh, fields in zip(meshes, (case.forecast, case.truth), strict=True):
            mesh.set_array(thinned(case.grid, fields[number])[2])
        figure.suptitle(case.title(number))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        yield Image.open(buffer).convert("RGB")


def picture(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    close(figure)
    return embedded(buffer.getvalue(), "png")
