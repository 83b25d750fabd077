"""The Zarr of a forecast in WeatherBench2's schema, written while the model computes, and what is in it.

    forecast.zarr/                   (time, prediction_timedelta[, number][, level], latitude, longitude)
        geopotential/0.3.0.0.0       a chunk: one variable of one date (and member) at one lead, all levels
        .finished/20200201T060000-000     a date and member with all leads written; in it what is wrong

A chunk gets its name when it is whole, so that xarray can open the store at any time: what is not written yet
is NaN. Zarr 2 with consolidated metadata. Shapes: B states, V variables, H latitudes, W longitudes.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import xarray as xr
import zarr
from numcodecs import Blosc
from torch import Tensor

from datasets.grid import Grid
from datasets.variables import split_name, units
from errors import ConfigError

FINISHED = ".finished"
ATTRIBUTE = "rossby"  # of the store: what it is a forecast of
COMPRESSOR = Blosc(cname="lz4", clevel=5, shuffle=Blosc.SHUFFLE)  # WeatherBench2's
NUM_THREADS = 8  # a rank's that compress and write; numcodecs lets go of the interpreter meanwhile
LEADS_IN_FLIGHT = 2  # of this rank, on the device or being written: more would only fill memory


@dataclass(frozen=True, eq=False)
class ForecastPlan:
    """What a store holds. leads: hours after the initial date."""

    variables: Sequence[str]
    grid: Grid
    dates: np.ndarray  # (n,) datetime64[s], initial dates, ascending
    leads: Sequence[int]
    num_members: int = 1

    @property
    def arrays(self) -> dict[str, list[tuple[int, int | None]]]:
        """Name of an array -> (channel, level in hPa) of each of its fields."""
        arrays: dict[str, list[tuple[int, int | None]]] = {}
        for channel, variable in enumerate(self.variables):
            name, level = split_name(variable)
            arrays.setdefault(name, []).append((channel, level))
        return arrays

    @property
    def levels(self) -> list[int]:
        """All levels of all variables, ascending: arrays share them, as in WeatherBench2."""
        found = [level for fields in self.arrays.values() for _, level in fields]
        return sorted({level for level in found if level is not None})

    def coordinates(self) -> xr.Dataset:
        ensemble = {"number": np.arange(self.num_members)} if self.num_members > 1 else {}
        coords = {
            "time": self.dates.astype("datetime64[ns]"),
            "prediction_timedelta": np.asarray(self.leads).astype("timedelta64[h]").astype("timedelta64[ns]"),
            **ensemble,
            **({"level": ("level", self.levels, {"units": "hPa"})} if self.levels else {}),
            "latitude": ("latitude", self.grid.latitude, {"units": "degrees_north"}),
            "longitude": ("longitude", self.grid.longitude, {"units": "degrees_east"}),
        }
        return xr.Dataset(coords=coords)


class ForecastStore:
    """A store on disk. Rank 0 makes it; then every rank writes chunks of its own."""

    def __init__(self, path: Path, plan: ForecastPlan) -> None:
        self.path, self.plan, self.finished_folder = path, plan, path / FINISHED
        self.arrays: dict[str, zarr.Array] = {}

    def create(self, about: dict[str, Any]) -> None:
        """Makes the store, or takes the one that is there. ConfigError: that is another forecast's."""
        if self.path.exists():
            self._check_same(about)
            self.finished_folder.mkdir(exist_ok=True)
            for leftover in self.path.glob("*/*.partial"):  # zarr's, of a run that was killed
                leftover.unlink()
            return
        unfinished = self.path.with_name(self.path.name + ".incomplete")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        coordinates = self.plan.coordinates().assign_attrs({ATTRIBUTE: json.dumps(about)})
        hours = {"units": "hours since 1970-01-01", "dtype": "int64"} if self._whole_hours() else {}
        coordinates.to_zarr(unfinished, zarr_format=2, consolidated=False, encoding={"time": hours})
        for name, fields in self.plan.arrays.items():
            self._create_array(unfinished, name, on_levels=fields[0][1] is not None)
        zarr.consolidate_metadata(str(unfinished), zarr_format=2)
        (unfinished / FINISHED).mkdir()
        os.replace(unfinished, self.path)

    def _whole_hours(self) -> bool:
        return bool((self.plan.dates.astype(np.int64) % 3600 == 0).all())

    def _create_array(self, path: Path, name: str, on_levels: bool) -> None:
        plan = self.plan
        sizes = {"time": len(plan.dates), "prediction_timedelta": len(plan.leads)}
        sizes |= {"number": plan.num_members} if plan.num_members > 1 else {}
        whole = {"level": len(plan.levels)} if on_levels else {}
        whole |= {"latitude": plan.grid.shape[0], "longitude": plan.grid.shape[1]}
        zarr.create_array(
            str(path),
            name=name,
            shape=(*sizes.values(), *whole.values()),
            chunks=(*[1] * len(sizes), *whole.values()),
            dtype="float32",
            compressors=COMPRESSOR,
            fill_value=np.nan,
            zarr_format=2,
            attributes={"_ARRAY_DIMENSIONS": [*sizes, *whole], "units": units(name)},
        )

    def _check_same(self, about: dict[str, Any]) -> None:
        """A store is gone on with only where every byte of it would be the same."""
        fix = "remove it, or name another forecast.path"
        try:
            stored = json.loads((self.path / ".zattrs").read_text())[ATTRIBUTE]
        except (OSError, ValueError, KeyError):
            raise ConfigError(
                f"forecast.path = '{self.path}': is there and no forecast of ours; {fix}"
            ) from None
        theirs, ours = json.loads(stored), json.loads(json.dumps(about))
        other = [key for key in ours if theirs.get(key) != ours[key]]
        if other:
            shown = f"{other[0]} is {_short(theirs.get(other[0]))} there and {_short(ours[other[0]])} here"
            raise ConfigError(f"forecast.path = '{self.path}': holds another forecast: {shown}; {fix}")

    # -- what is finished ----------------------------------------------------------------------------

    def _mark(self, date: int, member: int) -> Path:
        stamp = str(self.plan.dates[date].astype("datetime64[s]")).replace("-", "").replace(":", "")
        return self.finished_folder / f"{stamp}-{member:03d}"

    def finished(self) -> dict[tuple[int, int], str]:
        """(date, member) -> "" or what is wrong with it, of all whose leads are all written."""
        pairs = [(date, m) for date in range(len(self.plan.dates)) for m in range(self.plan.num_members)]
        marks = {path.name: path for path in self.finished_folder.iterdir()}
        found = {pair: marks.get(self._mark(*pair).name) for pair in pairs}
        return {pair: path.read_text() for pair, path in found.items() if path}

    def finish(self, date: int, member: int, problem: str = "") -> None:
        """All leads of this date and member are written."""
        mark = self._mark(date, member)
        unfinished = mark.with_name(mark.name + ".partial")
        unfinished.write_text(problem)
        os.replace(unfinished, mark)

    # -- chunks --------------------------------------------------------------------------------------

    def write_chunks(self, name: str, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """One array at the lead numbered `lead`; fields (B, V, H, W) of B pairs (date, member)."""
        placed = self.plan.arrays[name]
        channels = [channel for channel, _ in placed]
        first, end = channels[0], channels[0] + len(channels)
        together = channels == list(range(first, end))  # a slice is a view: no copy
        values = fields[:, slice(first, end) if together else channels].cpu().numpy()
        if name not in self.arrays:
            self.arrays[name] = cast(
                zarr.Array, zarr.open_array(str(self.path), path=name, mode="r+", zarr_format=2)
            )
        levels = [level for _, level in placed]
        for (date, member), value in zip(pairs, values, strict=True):
            place = (date, lead, member) if self.plan.num_members > 1 else (date, lead)
            self.arrays[name][place] = value[0] if levels[0] is None else self._on_all_levels(value, levels)

    def _on_all_levels(self, value: np.ndarray, levels: Sequence[int | None]) -> np.ndarray:
        """(its levels, H, W) -> (all levels, H, W), NaN where the array has none."""
        if list(levels) == self.plan.levels:
            return value
        whole = np.full((len(self.plan.levels), *value.shape[1:]), np.nan, np.float32)
        whole[[self.plan.levels.index(cast(int, level)) for level in levels]] = value
        return whole


class ForecastWriter:
    """Takes fields from the device and writes them in threads, an array each, while the model goes on."""

    def __init__(self, store: ForecastStore) -> None:
        self.store, self.pool = store, ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="forecast-writer")
        self.in_flight: deque[list[Future]] = deque()  # of each lead that is not known to be written

    def write(self, pairs: Sequence[tuple[int, int]], lead: int, fields: Tensor) -> None:
        """fields (B, V, H, W) at a lead, of B pairs (date, member); nothing may change them afterwards.

        Waits while LEADS_IN_FLIGHT are being written. OSError of an earlier lead.
        """
        self.wait(LEADS_IN_FLIGHT - 1)
        submit, names = self.pool.submit, self.store.plan.arrays
        self.in_flight.append([submit(self.store.write_chunks, n, pairs, lead, fields) for n in names])

    def wait(self, at_most: int = 0) -> None:
        """Until no more than so many leads are in flight. OSError: one could not be written."""
        while len(self.in_flight) > at_most:
            for future in self.in_flight.popleft():
                future.result()

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 60 else f"{text[:40]} ... {text[-15:]}"
