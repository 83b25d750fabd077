"""Small analyses, forecasts and climatologies for the tests and benchmarks of scores."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from config import Model
from datasets.archive import Archive, open_archive
from models.vit import VisionTransformer
from verification.climatology import Climatology, open_climatology
from verification.matching import ForecastFields
from verification.scores_by_date import Evaluation, evaluate
from verification.stores import open_forecast

UPPER = ("geopotential", "u_component_of_wind", "v_component_of_wind")
SURFACE = ("2m_temperature",)
LEVELS = [500, 850]
START = np.datetime64("2019-12-25", "ns")
HOURS = np.timedelta64(1, "h").astype("timedelta64[ns]")


def grid(num_latitudes: int, num_longitudes: int, poles: bool) -> dict[str, np.ndarray]:
    """Coordinates as WeatherBench2's equiangular grids have them, south to north."""
    edges = np.linspace(-90, 90, num_latitudes + 1)
    latitude = np.linspace(-90, 90, num_latitudes) if poles else (edges[1:] + edges[:-1]) / 2
    return {"latitude": latitude, "longitude": np.arange(num_longitudes) * 360 / num_longitudes}


def analyses(coords: dict[str, np.ndarray], num_times: int, seed: int = 0) -> xr.Dataset:
    """6-hourly analyses (time[, level], latitude, longitude) float32, of size and mean like weather's."""
    rng, shape = np.random.default_rng(seed), (len(coords["latitude"]), len(coords["longitude"]))
    axes = {"time": START + 6 * HOURS * np.arange(num_times), "level": LEVELS, **coords}
    upper = {n: (list(axes), rng.normal(500, 90, (num_times, 2, *shape)).astype("f4")) for n in UPPER}
    dims = ["time", "latitude", "longitude"]
    lower = {n: (dims, rng.normal(280, 9, (num_times, *shape)).astype("f4")) for n in SURFACE}
    return xr.Dataset(upper | lower, axes)


def forecasts(
    truth: xr.Dataset, num_dates: int, lead_hours: list[int], members: int = 0, seed: int = 1
) -> xr.Dataset:
    """Twice a day the truth plus errors that grow: (time, prediction_timedelta[, number][, level], ...)"""
    rng, times = np.random.default_rng(seed), truth.time.values[: 2 * num_dates : 2]
    axes = {"time": times, "prediction_timedelta": np.asarray(lead_hours) * HOURS}
    valid = xr.DataArray(times[:, None] + axes["prediction_timedelta"], axes, list(axes))
    found = truth.rename(time="valid").sel(valid=valid).drop_vars("valid")
    if members:
        found = found.expand_dims(number=np.arange(members), axis=2)
    growth = xr.DataArray(np.sqrt(1 + np.arange(len(lead_hours))), dims="prediction_timedelta")
    for name, field in found.items():
        field = field.transpose("time", "prediction_timedelta", *["number"] * bool(members), ...)
        noise = field.copy(data=rng.normal(0.3, 1, field.shape))
        found[name] = (field + 0.1 * float(truth[name].std()) * growth * noise).astype("f4")
    return found


def climatology(truth: xr.Dataset, seed: int = 2) -> xr.Dataset:
    """(hour, dayofyear[, level], latitude, longitude) float32 near the mean of the truth."""
    rng, found = np.random.default_rng(seed), {}
    for name, field in truth.items():
        shape = (4, 366, *field.shape[1:])
        values = rng.normal(float(field.mean()), 0.3 * float(field.std()), shape).astype("f4")
        found[name] = (("hour", "dayofyear", *field.dims[1:]), values)
    coords = {dim: truth[dim] for dim in ("level", "latitude", "longitude")}
    return xr.Dataset(found, {"hour": [0, 6, 12, 18], "dayofyear": np.arange(1, 367), **coords})


def write(dataset: xr.Dataset, path: Path) -> str:
    dataset.to_zarr(path, zarr_format=2, consolidated=True)
    return str(path)


def plain_forecast(
    run: Path,
    stored_as: tuple[int, str],
    window: Sequence[Sequence[np.ndarray]],
    num_steps: int,
    forcing: Callable[[int], Tensor] | None = None,
) -> np.ndarray:
    """(L, V, H, W) by a model of SMALL_RUN, written out: weights as stored, no module of the rollout.

    stored_as: the checkpoint's step and its "model" or "ema". window: fields of each date, the newest first.
    forcing: (C, H, W) of a step.
    """
    number = len(window[0])
    more = [] if forcing is None else [forcing(0)]
    model = VisionTransformer(
        len(window) * number + len(more), number, (6, 8), Model("vit", (3, 4), 16, 2, 2)
    )
    step, part = stored_as
    stored = {f"{part}.{name}": torch.empty_like(p) for name, p in model.named_parameters()}
    folder = run / f"checkpoints/step-{step:08d}"
    state_dict_loader.load(stored, checkpoint_id=str(folder), no_dist=True)  # type: ignore[arg-type]
    model.load_state_dict({name.removeprefix(f"{part}."): t for name, t in stored.items()})
    moments = np.load(run / "statistics.npz")
    mean, std, change = (torch.tensor(moments[n])[:, None, None] for n in ("mean", "std", "change_std"))
    seen = [((torch.tensor(np.stack(fields)).double() - mean) / std).nan_to_num() for fields in window]
    states = []
    for lead in range(num_steps):
        more = [] if forcing is None else [forcing(lead)]
        patches = F.unfold(torch.cat([*seen, *more])[None].float(), (3, 4), stride=(3, 4)).transpose(1, 2)
        with torch.no_grad():
            output = F.fold(model(patches).transpose(1, 2), (6, 8), (3, 4), stride=(3, 4))[0]
        seen = [seen[0] + change / std * output, *seen[:-1]]
        states.append(seen[0] * std + mean)
    return torch.stack(states).numpy()


class OneForecast(NamedTuple):
    """Scores (metric, region, lead_time[, level]) of one forecast, those of dates (initial_time, lead_time,
    variable, region, score), and spectra.
    """

    scores: xr.Dataset
    by_date: xr.DataArray
    spectra: xr.Dataset | None


def of_one(found: Evaluation, name: str) -> OneForecast:
    """What an evaluation has of one forecast."""
    by_date = found.by_date["statistics"].sel(forecast=name, drop=True)
    return OneForecast(found.scores.sel(forecast=name, drop=True), by_date, found.spectra.get(name))


def evaluate_one(
    forecast: ForecastFields, truth: Archive, climatology: Climatology | None = None, **options: Any
) -> OneForecast:
    """Scores of a single forecast."""
    return of_one(evaluate({"forecast": forecast}, truth, climatology, **options), "forecast")


def score(
    folder: Path, forecast: xr.Dataset, truth: xr.Dataset, means: Any = None, **options: Any
) -> OneForecast:
    """Scores of a forecast with the climatology `means`, or none, read from files in a new folder."""
    new = Path(tempfile.mkdtemp(dir=folder))
    opened = (
        open_forecast(write(forecast, new / "forecast.zarr")),
        open_archive(write(truth, new / "truth.zarr")),
    )
    climatology = None if means is None else open_climatology(write(means, new / "climatology.zarr"))
    return evaluate_one(*opened, climatology, **options)
