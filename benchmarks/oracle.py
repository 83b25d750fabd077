"""Reading and scoring of random, valid, unusual inputs, compared with float64 code from the definitions.

attack.py starts both commands: `sources` compares what datasets/ reads and converts with what a generator
wrote, `scores` what evaluate.py writes with docs/verification.md. Nothing of datasets/ or verification/ is
used to generate or to compute. Shapes: D dates, M members, V variables, H latitudes, W longitudes, R regions.
"""

import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
import xarray as xr

from benchmarks.results_file import ROOT, record
from errors import DataError, one_line_errors

DRAWN = tomllib.loads((ROOT / "benchmarks/attack.toml").read_text())["oracle"]
VARIABLES, AXES = DRAWN["variables"], DRAWN["axes"]
UPPER, STATIC = list(VARIABLES)[:6] + ["hgt"], ["land_sea_mask", "geopotential_at_surface"]
SURFACE = [name for name in VARIABLES if name not in (*UPPER, *STATIC)]
LIMIT, HOUR = 60.0, np.timedelta64(3600, "s")  # seconds of a command
FORMATS = ("netcdf3", "netcdf4", "zarr2", "zarr3", "sharded")
EXACT, ROUNDED = 1e-10, 1e-6  # relative: of float32 fields as they are, and of converted or regridded ones
WRONG = ("wrong", "traceback", "hang")
Array = np.ndarray


@dataclass
class Fields:
    """values: name with level -> (*axes, H, W) float64, NaN where missing; latitudes from north to south,
    longitudes eastwards; plain: float32 in the units of datasets/.
    """

    values: dict[str, Array]
    axes: dict[str, Array]
    latitude: Array
    longitude: Array
    plain: bool = True
    static: dict[str, Array] = field(default_factory=dict)


def base(name: str) -> str:
    return name.partition(":")[0]


def draw(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def some(rng: np.random.Generator, items: Any, least: int = 1, most: int = 99) -> list:
    """Return some of the items in their order."""
    items = [*items]
    number = int(rng.integers(least, min(most, len(items)) + 1))
    return [items[i] for i in sorted(rng.choice(len(items), number, replace=False))]


# -- the generator


def draw_grid(rng: np.random.Generator) -> tuple[Array, Array]:
    rows, columns = int(rng.integers(5, 10)), int(draw(rng, 6, 8, 9, 12))
    kind = draw(rng, "poles", "cells", "gaussian", "regional", "regional")
    if kind == "regional":
        spacing, north, west = (
            draw(rng, 2.5, 5.0),
            draw(rng, 70.0, 40.0, 21.25),
            draw(rng, -20.0, 172.5, 340.0),
        )
        return north - spacing * np.arange(rows), west + spacing * np.arange(columns)
    east = draw(rng, 0.0, 0.0, -180.0, 7.5) + np.arange(columns) * 360 / columns
    if kind == "gaussian":
        north = -np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(rows)[0]))
        return north.astype("f4").astype("f8"), east
    half = 0 if kind == "poles" else 90 / rows
    return np.linspace(90 - half, half - 90, rows), east


def random_fields(rng: np.random.Generator, names: list[str], axes: dict, grid: Any, holes: float) -> Fields:
    shape = (*map(len, axes.values()), *map(len, grid))
    values = {}
    for name in names:
        mean, deviation = VARIABLES[base(name)]["size"]
        own = (mean + deviation * rng.normal(size=shape)).astype("f4").astype("f8")
        if base(name) == "sea_surface_temperature":
            own[..., 1::3, :3] = np.nan if holes else 280
        elif base(name) == "total_precipitation":
            own = np.maximum(own, 0) * (rng.random((shape[0], *[1] * (len(shape) - 1))) < 0.9)
        elif rng.random() < holes:
            own[rng.random(shape) < 0.03] = np.nan
        if rng.random() < holes and len(shape) > 2:
            own[int(rng.integers(shape[0]))] = np.nan
        values[name] = own
    return Fields(values, dict(axes), *grid)


def encode(rng: np.random.Generator, name: str, values: Array, plain: bool, format: str) -> tuple:
    """Return stored numbers, their attributes, and the values that these numbers mean."""
    units = VARIABLES[base(name)]["units"]
    text = next(iter(units)) if plain else draw(rng, *units)
    factor, offset = units[text]
    numbers, attrs, missing = (values - offset) / factor, {"units": text}, np.isnan(values)
    most = np.abs(numbers[~missing]).max(initial=1.0)
    kinds = ["f4", ">f4", "f8", "packed", "packed"] + ["f2"] * int(
        most < 6e4 and not format.startswith("net")
    )
    kind = "f4" if plain else draw(rng, *kinds)
    kind = "f4" if kind == ">f4" and format in ("zarr3", "sharded") else kind
    if kind == "packed":
        low, high = (f(numbers[~missing], initial=0.0) for f in (np.min, np.max))
        number_type = draw(rng, np.float32, np.float64)
        scale, middle = number_type((high - low) / 60000 or 1), number_type((low + high) / 2)
        fill = np.int16(draw(rng, -32767, -32768, 32767))
        stored = np.where(missing, fill, np.round((values_or_0(numbers) - middle) / scale)).astype("i2")
        attrs |= {"scale_factor": scale, "add_offset": middle, draw(rng, "_FillValue", "missing_value"): fill}
        decoded = stored * float(scale) + float(middle)
    else:
        fill = np.nan if plain else draw(rng, np.nan, -999.0, -32767.0, 1e20)
        fill = np.nan if kind == "f2" and abs(fill) > 1000 else fill
        stored = np.where(missing, fill, numbers).astype(kind)
        decoded = stored.astype("f8")
        if fill == fill:
            attrs[draw(rng, "_FillValue", "missing_value")] = np.dtype(kind).newbyteorder("=").type(fill)
    return stored, attrs, np.where(missing, np.nan, decoded * factor + offset)


def values_or_0(values: Array) -> Array:
    return np.nan_to_num(values, nan=0.0)


def encode_times(rng: np.random.Generator, times: Array) -> tuple[Array, dict[str, Any]]:
    unit, seconds = draw(rng, ("hours", 3600), ("days", 86400), ("minutes", 60), ("seconds", 1))
    since = draw(rng, "1900-01-01 00:00:00.0", "1850-1-1", "2000-01-01T00:00:00Z", "1970-01-01 06:00")
    plain = re.sub(r"-(\d)\b", r"-0\1", since.rstrip("Z").replace(" ", "T"))
    numbers = (times - np.datetime64(plain, "s")) / np.timedelta64(seconds, "s")
    kind = draw(rng, "f8", "f8" if seconds < 3600 else "f4", "f8" if unit == "days" else "i4")
    kind = "f8" if kind == "i4" and np.abs(numbers).max() > 2**31 - 1 else kind
    calendar = draw(
        rng, {}, {"calendar": "standard"}, {"calendar": "gregorian"}, {"calendar": "proleptic_gregorian"}
    )
    return numbers.astype(kind), {"units": f"{unit} since {since}"} | calendar


def encode_levels(rng: np.random.Generator, levels: list[int]) -> tuple[Array, dict[str, str]]:
    text, factor = draw(rng, ("hPa", 1), ("Pa", 100), ("mb", 1), ("millibar", 1), ("", 1), ("kPa", 0.1))
    kind = draw(rng, "f4", "f8", *["i4"] * (factor >= 1))
    return (np.array(levels) * factor).astype(kind), {"units": text} if text else {}


def encode_east(rng: np.random.Generator, longitude: Array) -> tuple[Array, Array]:
    """Return longitudes as a file has them, and which columns they are."""
    columns, spacing = np.arange(len(longitude)), longitude[1] - longitude[0]
    if abs(spacing * len(longitude) - 360) > 1e-6:
        labels = longitude + draw(rng, 0, 0, 360 if longitude[0] < 0 else -360)
        return draw(rng, labels, labels % 360), columns
    start = draw(rng, 0.0, -180.0, longitude[int(rng.integers(len(longitude)))])
    labels = (longitude - start + 1e-9) % 360 - 1e-9 + start
    columns = np.argsort(labels)
    labels = labels[columns]
    if rng.random() < 0.2:
        columns, labels = np.append(columns, columns[0]), np.append(labels, labels[0] + 360)
    return labels, columns


def disguise(rng: np.random.Generator, fields: Fields, plain: bool, format: str, shuffle: bool) -> Any:
    """Return the Dataset as a file has it, nothing of it to be encoded, and the fields that it means."""
    dim = {role: draw(rng, *AXES["initial" if role == "time" and "lead" in fields.axes else role])
           for role in (*fields.axes, "level", "latitude", "longitude")}  # fmt: skip
    axes, order = dict(fields.axes), {r: np.arange(len(a)) for r, a in fields.axes.items()}
    labels, columns = encode_east(rng, fields.longitude)
    rows = draw(rng, slice(None), slice(None, None, -1))
    coords: dict[str, Any] = {}
    for role, values in axes.items():
        attrs: dict[str, Any] = {}
        if role in ("hour", "dayofyear", "number") or (role == "time" and shuffle):
            order[role] = rng.permutation(len(values)) if rng.random() < 0.5 else order[role]
        values = values[order[role]]
        if role == "time":
            values, attrs = encode_times(rng, values)
            if shuffle and rng.random() < 0.2:  # a date without a value
                values, order[role] = np.append(values, values.dtype.type(-99999)), np.append(order[role], 0)
                attrs |= {"_FillValue": values[-1]}
        elif role == "lead":
            text, seconds = draw(
                rng, ("hours", 3600), ("days", 86400), ("nanoseconds", 1e-9), ("minutes", 60)
            )
            values, attrs = values / np.timedelta64(1, "s") / seconds, {"units": text}
            values = values if text == "days" else values.astype("i8" if not format == "netcdf3" else "f8")
        coords[dim[role]] = (dim[role], values, attrs)
    degrees = draw(rng, "f4", "f8")
    coords[dim["latitude"]] = (
        dim["latitude"],
        fields.latitude[rows].astype(degrees),
        {"units": "degrees_north"},
    )
    coords[dim["longitude"]] = (dim["longitude"], labels.astype(degrees), {"units": "degrees_east"})
    upper = [name for name in fields.values if ":" in name]
    levels = [
        int(each) for each in rng.permutation(list(dict.fromkeys(int(n.partition(":")[2]) for n in upper)))
    ]
    way = "axis" if "hgt" in map(base, upper) else "names"  # of which names with levels are not known
    way = draw(rng, "axis", "axis", "axis", way, "scalar" if len(levels) == 1 and way == "names" else "axis")
    if upper and way != "names":
        numbers, attrs = encode_levels(rng, levels)
        coords[dim["level"]] = (dim["level"], numbers, attrs) if way == "axis" else ((), numbers[0], attrs)
    permuted = [str(each) for each in rng.permutation([*axes, "level", "latitude", "longitude"])]
    if rng.random() < 0.5:
        permuted = [*axes, "level", "latitude", "longitude"]
    data, meant, fixed = {}, {}, {}
    for name in dict.fromkeys(n if way == "names" else base(n) for n in [*fields.values, *fields.static]):
        stacked = [each for level in levels if (each := f"{name}:{level}") in fields.values]
        parts = stacked or [name]
        own = {**fields.values, **fields.static}
        roles = ["level", *([] if name in fields.static else axes), "latitude", "longitude"]
        values = np.stack([own[part] for part in parts])
        stored, attrs, decoded = encode(rng, name, values, plain, format)
        for part, each in zip(parts, decoded, strict=True):
            (fixed if name in fields.static else meant)[part] = each
        for role in [r for r in roles if r in order]:
            stored = stored.take(order[role], roles.index(role))
        stored = stored[..., rows, :][..., columns]
        if not (stacked and way == "axis"):
            stored, roles = stored[0], roles[1:]
        there = [role for role in permuted if role in roles]
        stored = stored.transpose([roles.index(role) for role in there])
        data[file_name(rng, name, list(data))] = ([dim[role] for role in there], stored, attrs)
    return xr.Dataset(data, coords), replace(fields, values=meant, static=fixed, plain=plain)


def file_name(rng: np.random.Generator, name: str, others: list[str]) -> str:
    """Return a name that archives give a variable, or a level of it: u, U, u500, ua_500, T500hPa."""
    level = name.partition(":")[2]
    choices = [each for each in VARIABLES[base(name)]["names"] if each not in others]
    if not level:
        return draw(rng, *choices)
    text = draw(rng, *choices)
    return f"{text}{draw(rng, '_{}', '{}hPa' if int(level) < 20 else '{}')}".format(level)


def write(rng: np.random.Generator, ds: xr.Dataset, path: Path, format: str) -> str:
    if format.startswith("netcdf"):
        names = {name: str(name) for name in ds.data_vars}
        path = path.with_suffix(draw(rng, ".nc", ".nc4" if format == "netcdf4" else ".nc"))
        chunks = {n: {"chunksizes": tuple(int(rng.integers((s + 1) // 2, s + 1)) for s in ds[n].shape), "zlib": True}
                  for n in names if format == "netcdf4" and rng.random() < 0.3}  # fmt: skip
        ds.to_netcdf(path, engine="scipy" if format == "netcdf3" else "h5netcdf", encoding=chunks)
        return str(path)
    encoding: dict[str, Any] = {}
    for name in ds.data_vars:
        chunks = [int(rng.integers((size + 1) // 2, size + 1)) for size in ds[name].shape]
        encoding[str(name)] = {"chunks": tuple(chunks)}
        if format == "sharded":
            encoding[str(name)]["shards"] = tuple(c * int(rng.integers(1, 3)) for c in chunks)
    version: Any = 2 if format == "zarr2" else 3
    path = path.with_suffix(".zarr")
    ds.to_zarr(path, zarr_format=version, encoding=encoding, consolidated=bool(rng.integers(2)))
    return str(path)


def draw_names(rng: np.random.Generator, most: int = 99) -> list[str]:
    levels = some(rng, [1000, 850, 500, 250, 100, 50, 10], 1, 3)
    upper, surface = some(rng, UPPER, 0 if most > 9 else 1, 3), some(rng, SURFACE, 1, 3)
    return [f"{name}:{level}" for name in upper for level in levels] + surface


def write_archive(rng: np.random.Generator, folder: Path, fields: Fields, plain: bool, split: str) -> Any:
    """Write analyses as one file or several; return the path, and the fields that are read back."""
    names, dates = list(fields.values), np.arange(len(fields.axes["time"]))
    parts: list[tuple[list[str], Array, list[str]]] = [(names, dates, list(fields.static))]
    if split == "variables":
        groups = list(dict.fromkeys(map(base, names)))
        parts = [([n for n in names if base(n) == each], dates, []) for each in groups]
        parts = [(own, rng.permutation(dates)[: len(dates) - int(rng.integers(2))], s) for own, _, s in parts]
        parts[0] = (parts[0][0], parts[0][1], list(fields.static))
    elif split == "dates":
        middle, overlap = len(dates) // 2, int(rng.integers(3)) * plain
        parts = [(names, dates[: middle + overlap], list(fields.static)), (names, dates[middle:], [])]
    if split != "one" and fields.static and rng.random() < 0.5:
        parts = [(*each[:2], []) for each in parts] + [([], dates[:0], list(fields.static))]
    found = {n: np.full((len(dates), *fields.values[n].shape[1:]), np.nan) for n in names}
    static: dict[str, Array] = {}
    folder.mkdir()
    for number, (own, rows, constant) in enumerate(parts):
        rows = np.sort(rows)
        format = draw(rng, *FORMATS)
        part = replace(fields, values={n: fields.values[n][rows] for n in own},
                       axes={"time": fields.axes["time"][rows]} if own else {},
                       static={n: fields.static[n] for n in constant})  # fmt: skip
        ds, meant = disguise(rng, part, plain, format, True)
        path = write(rng, add_unreadable(rng, ds), folder / f"part{number}", format)
        static |= meant.static
        for name in own:
            found[name][rows] = meant.values[name]
    covered = np.unique(np.concatenate([rows for own, rows, _ in parts if own]))
    read = replace(fields, values={n: v[covered] for n, v in found.items()}, static=static, plain=plain)
    read.axes = {"time": fields.axes["time"][covered]}
    return path if len(parts) == 1 else str(folder), read


def add_unreadable(rng: np.random.Generator, ds: xr.Dataset) -> xr.Dataset:
    """Add, now and then, a variable on levels that are no pressures, and winds of which attributes say all."""
    dims = [d for role in ("latitude", "longitude") for d in AXES[role] if d in ds.coords]
    shape = [ds.sizes[d] for d in dims]
    if rng.random() < 0.2:
        dim = next(each for each in ("lev", "level") if each not in ds.coords)
        about = draw(
            rng, ([0.99, 0.98], {"long_name": "hybrid level at midpoints"}), ([0.4, 1], {"units": "hPa"})
        )
        ds = ds.assign_coords({dim: (dim, *about)})
        ds["o3"] = [dim, *dims], rng.normal(size=(2, *shape)).astype("f4")
    return ds


def generate_source(seed: int, folder: Path) -> None:
    rng = np.random.default_rng([seed, 1])
    number, step = int(rng.integers(4, 12)), int(draw(rng, 1, 6, 12, 24))
    start = np.datetime64(draw(rng, "2020-02-27T00", "1999-12-30T18", "2021-02-26T12"), "s")
    keep = np.sort(rng.choice(number + 3, number, replace=False))
    axes, grid, names = {"time": start + step * HOUR * keep}, draw_grid(rng), draw_names(rng)
    fields = random_fields(rng, names, axes, grid, float(draw(rng, 0, 0.3)))
    for name in some(rng, STATIC, 0):
        fields.static[name] = random_fields(rng, [name], {}, grid, 0).values[name]
    split = draw(rng, "one", "one", "variables", "dates")
    path, fields = write_archive(rng, folder / "data", fields, rng.random() < 0.2, split)
    (folder / "case.pickle").write_bytes(pickle.dumps((path, fields)))


# -- reading


def compare_archive(path: str, fields: Fields, dtype: str = "") -> list[str]:
    """Return what differs. dtype: of a store that was converted, with the error that it documents."""
    from datasets.archive import open_archive

    archive, wrong, times = open_archive(path), [], fields.axes["time"]
    if refused := {*map(base, fields.values)} & archive.unreadable.keys():
        raise DataError("; ".join(archive.unreadable[name] for name in refused))
    for what, ours, theirs in (
        ("variables", sorted(fields.values), sorted(set(archive.variables) - {"ozone_mass_mixing_ratio"})),
        ("static", sorted(fields.static), sorted(archive.static_variables)),
        ("dates", times.astype("M8[s]").tolist(), archive.times.tolist()),
        ("grid", (len(fields.latitude), len(fields.longitude)), archive.grid.shape),
    ):
        wrong += [f"{what}: {theirs}, not {ours}"] if ours != theirs else []
    if wrong:
        return wrong
    turn = np.abs((archive.grid.longitude[:, None] - fields.longitude + 180) % 360 - 180)
    columns = turn.argmin(axis=1)
    if max(turn.min(axis=1).max(), np.abs(archive.grid.latitude - fields.latitude).max()) > 1e-4:
        return [f"places: {archive.grid.latitude}, {archive.grid.longitude}"]
    for name in fields.values:
        theirs = np.stack([archive.read(i, [name])[0] for i in range(len(times))])
        wrong += compare_values(
            name, fields.values[name][..., columns], theirs, rounding_of(path, name, dtype)
        )
    for name, ours in fields.static.items():
        wrong += compare_values(name, ours[..., columns], archive.read_static(name), (0.0, 0.0, 0.0))
    return wrong


def rounding_of(path: str, name: str, dtype: str) -> tuple[float, float, float]:
    """Return an error for each unit of distance from an offset, the offset, and another error."""
    if dtype != "float16":
        return 0.0, 0.0, 0.0
    attrs = xr.open_zarr(path, decode_cf=False, consolidated=False)[name.replace(":", "_")].attrs
    return 2.0**-11, attrs["add_offset"], 2.0**-25 * attrs["scale_factor"]


def compare_values(name: str, ours: Array, theirs: Array, rounding: tuple[float, float, float]) -> list[str]:
    if (missing := np.isnan(ours) != np.isnan(theirs)).any():
        return [f"{name}: {missing.sum()} cells are missing in one, the first {np.argwhere(missing)[0]}"]
    relative, offset, absolute = rounding
    room = ROUNDED * np.abs(ours) + 1e-7 * VARIABLES[base(name)]["size"][1]
    room += relative * np.abs(ours - offset) + absolute
    off = np.nan_to_num(np.abs(ours - theirs) - room) > 0
    if not off.any():
        return []
    first = tuple(np.argwhere(off)[0])
    return [f"{name}: {off.sum()} of {off.size} values, the first {theirs[first]:.9g}, not {ours[first]:.9g}"]


def read_back(folder: Path) -> int:
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    with one_line_errors():
        return report(compare_archive(path, fields))
    return 0


def convert(words: list[str], ended_by: int | None = None) -> int:
    """Convert; ended_by: number of the durable write before which the process is killed."""
    from datasets import convert as module

    whole, count = module.write_durably, iter(range(10**6))

    def durable(*args: Any) -> None:
        if next(count) == ended_by:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(*args)

    module.write_durably = durable
    with one_line_errors():
        return module.main(words)
    return 0


def compare_converted(folder: Path, target: str, dtype: str) -> int:
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    with one_line_errors():
        return report(compare_archive(target, fields, dtype))
    return 0


def report(wrong: list[str]) -> int:
    print("\n".join(wrong))
    return 3 * bool(wrong)


def source(seed: int, folder: Path) -> tuple[str, str]:
    """Return the verdict on one source, and why."""
    ask(generate_source, seed, folder)
    answer = judge(*forked(LIMIT, read_back, folder))
    if answer[0] != "right":
        return answer
    path, fields = pickle.loads((folder / "case.pickle").read_bytes())
    rng, target, dtype = (
        np.random.default_rng([seed, 2]),
        str(folder / "store"),
        ("float16", "float32")[seed % 2],
    )
    times = fields.axes["time"]
    words = [path, target, "--dtype", dtype]
    first = [*words, "--period", str(times[0]), str(times[len(times) // 2])]
    for run in ([first, int(rng.integers(4))], [first, None], [words, None]):
        answer = judge(*forked(LIMIT, convert, *run))
        if answer[0] != "right" and not (run[1] is not None and "signal 9" in answer[1]):
            return answer[0], f"convert: {answer[1]}"
    verdict, why = judge(*forked(LIMIT, compare_converted, folder, target, dtype))
    return verdict, f"converted to {dtype}: {why}" if why else ""


# -- scoring

# WeatherBench2's: south, north, west, east of boxes, limits included.
REGIONS = {
    "global": [(-90, 90, 0, 360)],
    "tropics": [(-20, 20, 0, 360)],
    "extra-tropics": [(-90, -20, 0, 360), (20, 90, 0, 360)],
    "northern-hemisphere": [(20, 90, 0, 360)],
    "southern-hemisphere": [(-90, -20, 0, 360)],
    "europe": [(35, 75, 347.5, 360), (35, 75, 0, 42.5)],
    "north-america": [(25, 60, 240, 285)],
    "north-atlantic": [(25, 65, 290, 350)],
    "north-pacific": [(25, 60, 145, 230)],
    "east-asia": [(25, 60, 102.5, 150)],
    "ausnz": [(-45, -12.5, 120, 175)],
    "arctic": [(60, 90, 0, 360)],
    "antarctic": [(-90, -60, 0, 360)],
}
WINDS = {"wind_vector": "u_component_of_wind", "10m_wind_vector": "10m_u_component_of_wind"}
POWER = {"mse": 2} | dict.fromkeys(("rmse", "rmse_sqrt_before_time_avg", "mae", "bias", "crps", "spread"), 1)
POWER |= dict.fromkeys(("forecast_activity", "truth_activity"), 1)


def row_edges(latitude: Array) -> Array:
    """Return bounds half-way between rows; a side whose last row is within a spacing of the pole ends there."""
    ends = []
    for edge, inner in ((latitude[0], latitude[1]), (latitude[-1], latitude[-2])):
        spacing = edge - inner
        pole = np.copysign(90.0, spacing)
        ends.append(pole if abs(pole - edge) < abs(spacing) + 1e-5 else edge + spacing / 2)
    return np.concatenate([ends[:1], (latitude[1:] + latitude[:-1]) / 2, ends[1:]])


def column_edges(longitude: Array) -> Array:
    half = (longitude[1] - longitude[0]) / 2
    return np.append(longitude - half, longitude[-1] + half)


def cell_size(fields: Fields) -> float:
    return float(-np.diff(row_edges(fields.latitude)).mean() * np.diff(column_edges(fields.longitude)).mean())


def overlaps(target: Array, source: Array) -> Array:
    low, high = np.maximum.outer(target[:-1], source[:-1]), np.minimum.outer(target[1:], source[1:])
    return np.maximum(high - low, 0)


def regrid(values: Array, source: Fields, target: Fields) -> Array:
    """Return first-order conservative means; a cell that is not wholly on the source's grid has none."""
    heights = [np.sin(np.deg2rad(row_edges(each.latitude)))[::-1] for each in (target, source)]
    rows = overlaps(*heights)[::-1, ::-1]
    east, west = (column_edges(each.longitude) for each in (target, source))
    columns = sum(overlaps(east, west + turn) for turn in (-720, -360, 0, 360, 720))
    area = np.outer(np.diff(heights[0])[::-1], np.diff(east))
    whole = np.outer(rows.sum(1), columns.sum(1)) > 0.999 * area
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        finite = np.where(np.isfinite(values), values, 0.0)
        mean = (rows @ finite @ columns.T) / (rows @ there.astype(float) @ columns.T)
        mean = np.where(rows @ np.isinf(values).astype(float) @ columns.T > 0, np.inf, mean)
    return np.where(whole, mean, np.nan)


def on_grid(fields: Fields, target: Fields) -> Fields:
    same = [
        np.array_equal(getattr(fields, each), getattr(target, each)) for each in ("latitude", "longitude")
    ]
    if all(same):
        return fields
    values = {name: regrid(each, fields, target) for name, each in fields.values.items()}
    return replace(fields, values=values, latitude=target.latitude, longitude=target.longitude)


def crop(fields: Fields, region: list[float]) -> Fields:
    if not region:
        return fields
    north, west, south, east = region
    rows = (fields.latitude <= north) & (fields.latitude >= south)
    offset = (fields.longitude - west + 1e-9) % 360 - 1e-9
    columns = np.argsort(offset)[
        : int((offset <= (360 if east - west == 360 else (east - west) % 360)).sum())
    ]
    values = {name: each[..., rows, :][..., columns] for name, each in fields.values.items()}
    return replace(fields, values=values, latitude=fields.latitude[rows], longitude=(west + offset)[columns])


def region_weights(fields: Fields, names: list[str]) -> dict[str, Array]:
    """Return area weights (H, W) inside of each region that has a cell."""
    area = -np.diff(np.sin(np.deg2rad(row_edges(fields.latitude))))
    north, east, found = fields.latitude[:, None], fields.longitude % 360, {}
    for name in REGIONS if "all" in names else names:
        inside = [(north >= a - 1e-4) & (north <= b + 1e-4) & (east >= c - 1e-4) & (east <= d + 1e-4)
                  for a, b, c, d in REGIONS[name]]  # fmt: skip
        found[name] = area[:, None] * np.any(inside, axis=0)
    return {name: each for name, each in found.items() if each.any()}


def pick(values: Array, labels: Array, wanted: Array) -> Array:
    """Return the values at labels of their first axis, NaN where there is none."""
    there = np.isin(wanted, labels)
    found = np.full((len(wanted), *values.shape[1:]), np.nan)
    order = np.argsort(labels)
    found[there] = values[order][np.searchsorted(labels[order], wanted[there])]
    return found


def climatology_at(fields: Fields, name: str, times: Array) -> Array:
    """Return (D, H, W), NaN for hours and days that it lacks."""
    stamps = pd.DatetimeIndex(times)
    labels = {"hour": np.asarray(stamps.hour), "dayofyear": np.asarray(stamps.dayofyear)}
    key, there = [], np.ones(len(times), bool)
    for axis, own in fields.axes.items():
        position = {int(label): i for i, label in enumerate(own)}
        rows = np.array([position.get(int(label), -1) for label in labels[axis]])
        there &= rows >= 0
        key.append(rows)
    return np.where(there[:, None, None], fields.values[name][tuple(key)], np.nan)


def statistics(
    state: Array, truth: Array, clim: Array | None, mask: Array, weights: Array
) -> dict[str, Array]:
    """Return area means (D, R) of one variable and lead: state (D[, M], H, W), others (D, H, W)."""

    def mean(x: Array, where: Array) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            total, area, broken = (
                np.einsum("dhw,rhw->dr", each, weights)
                for each in (
                    np.where(where & np.isfinite(x), x, 0.0),
                    where.astype(float),
                    where & ~np.isfinite(x),
                )
            )
            return np.where(broken > 0, np.inf, total) / area

    members = state.shape[1] if state.ndim == 4 else 1
    with np.errstate(invalid="ignore"):
        middle = state.mean(axis=1) if members > 1 else state.reshape(truth.shape)
        error = middle - truth
        found = {"mse": mean(error**2, mask), "mae": mean(abs(error), mask), "bias": mean(error, mask)}
        if clim is not None:
            both, ours, theirs = mask & np.isfinite(clim), middle - clim, truth - clim
            found |= {"covariance": mean(ours * theirs, both), "ours": mean(ours**2, both)}
            found |= {"theirs": mean(theirs**2, both)}
        if members > 1:
            apart = sum(abs(state[:, m] - state[:, n]) for m in range(members) for n in range(members))
            crps = abs(state - truth[:, None]).mean(axis=1) - apart / (2 * members * (members - 1))
            found |= {"crps": mean(crps, mask), "variance": mean(state.var(axis=1, ddof=1), mask)}
    return found


def mean_of(values: Array) -> Array:
    """Return the mean over dates that have a value: infinite ones make it infinite."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(there, values, 0.0).sum(axis=0) / there.sum(axis=0)


def final(by_date: dict[str, Array], members: int) -> dict[str, Array]:
    """Return scores (R,) from the statistics (D, R)."""
    with np.errstate(invalid="ignore", divide="ignore"):
        mse = mean_of(by_date["mse"])
        scores = {"mse": mse, "rmse": np.sqrt(mse)}
        scores["rmse_sqrt_before_time_avg"] = mean_of(np.sqrt(by_date["mse"]))
        scores |= {name: mean_of(by_date[name]) for name in ("mae", "bias", "crps") if name in by_date}
        if "ours" in by_date:
            ours, theirs = by_date["ours"], by_date["theirs"]
            scores["acc"] = mean_of(by_date["covariance"] / np.sqrt(ours * theirs))
            ours, theirs = mean_of(ours), mean_of(theirs)
            scores["acc_ratio_of_means"] = mean_of(by_date["covariance"]) / np.sqrt(ours * theirs)
            scores |= {"forecast_activity": np.sqrt(ours), "truth_activity": np.sqrt(theirs)}
        if "variance" in by_date:
            variance = mean_of(by_date["variance"])
            scores |= {"spread": np.sqrt(variance), "spread_skill_ratio": np.sqrt(variance / mse)}
            scores["unbiased_spread_skill_ratio"] = np.sqrt(variance / (mse - variance / members))
    broken = ~np.isfinite(mse) & ~np.isnan(by_date["mse"]).all(axis=0)
    if broken.any():
        scores.pop("truth_activity", None)
    return {name: np.where(broken, np.nan, each) for name, each in scores.items()}


@dataclass
class Case:
    """One evaluation. forecasts: the second and later ones may lack variables."""

    truth: Fields
    forecasts: dict[str, Fields]
    climatology: Fields | None
    variables: list[str]
    step: np.timedelta64
    words: list[str]
    baselines: list[str]
    regions: list[str]
    against: str
    region: list[float]
    boundary: int


def baselines_of(case: Case, truth: Fields, dates: Array, leads: Array) -> dict[str, Fields]:
    there = [
        bool(np.isin(dates + lead, truth.axes["time"]).any()) and lead % case.step == 0 * HOUR
        for lead in leads
    ]
    axes, found = {"time": dates, "lead": leads[there]}, {}
    if "persistence" in case.baselines:
        today = {n: pick(v, truth.axes["time"], dates) for n, v in truth.values.items()}
        values = {n: np.repeat(v[:, None], sum(there), axis=1) for n, v in today.items()}
        found["persistence"] = replace(truth, values=values, axes=axes)
    clim = case.climatology
    if "climatology" in case.baselines and clim is not None:
        valid = (dates[:, None] + axes["lead"]).ravel()
        name = next(iter(clim.values))
        ones = replace(clim, values={name: np.ones_like(clim.values[name])})
        if not np.isnan(climatology_at(ones, name, valid)).any():
            shape = (len(dates), sum(there), len(clim.latitude), len(clim.longitude))
            values = {n: climatology_at(clim, n, valid).reshape(shape) for n in clim.values}
            found["climatology"] = replace(clim, values=values, axes=axes)
    return found


def expected(case: Case) -> tuple[dict[tuple[str, str, str, int], Any], list[str], Any, bool]:
    """Return forecast, metric, variable and lead in hours -> values of the regions; the regions; the rows of the
    scorecard, variable and lead in hours -> per cent; True where nothing is rounded.
    """
    truth, first = crop(case.truth, case.region), next(iter(case.forecasts.values()))
    names = [n for n in case.variables if n in first.values and n in truth.values]
    dates, leads = (sorted(set.intersection(*({*f.axes[axis].tolist()} for f in case.forecasts.values())))
                    for axis in ("time", "lead"))  # fmt: skip
    dates, leads = np.array(dates, "M8[s]"), np.array([lead for lead in leads if lead], "m8[s]")
    leads = leads[leads > 0 * HOUR]
    compared = case.forecasts | baselines_of(case, truth, dates, leads)
    target = truth
    for each in case.forecasts.values():
        target = each if cell_size(each) > cell_size(target) * 1.000001 else target
    used = [*compared.values(), truth, *([case.climatology] if case.climatology else [])]
    exact = all(each.plain and on_grid(each, target) is each for each in used)
    compared = {name: on_grid(each, target) for name, each in compared.items()}
    clim = case.climatology and on_grid(case.climatology, target)
    regions, truth = region_weights(target, case.regions), on_grid(truth, target)
    weights, found, by_date = np.stack([*regions.values()]), {}, {}
    inside, width = np.zeros(weights.shape[1:], bool), case.boundary
    inside[width : len(inside) - width, width : inside.shape[1] - width] = True
    for lead in leads:
        hours = int(lead / HOUR)
        there = {name: f for name, f in compared.items() if lead in f.axes["lead"]}
        for name in names:
            own = {n: pick(f.values[name].swapaxes(0, 1)[[*f.axes["lead"]].index(lead)], f.axes["time"], dates)
                   for n, f in there.items() if name in f.values}  # fmt: skip
            analysis = pick(truth.values[name], truth.axes["time"], dates + lead)
            whole = mask = np.isfinite(analysis) & inside
            for state in own.values():
                mask = mask & ~np.isnan(state.reshape(len(dates), -1, *inside.shape)).any(axis=1)
            means = climatology_at(clim, name, dates + lead) if clim and name in clim.values else None
            means = analysis * np.nan if clim and means is None else means
            for n, state in own.items():
                statistic = by_date[n, name, hours] = statistics(state, analysis, means, mask, weights)
                scores = final(statistic, state.shape[1] if state.ndim == 4 else 1)
                areas = [np.einsum("dhw,rhw->dr", each.astype(float), weights) for each in (mask, whole)]
                with np.errstate(invalid="ignore", divide="ignore"):
                    part = np.where(areas[0] > 0, areas[0] / areas[1], np.nan)
                scores |= {"num_dates": (areas[0] > 0).sum(axis=0), "common_area": mean_of(part)}
                found |= {(n, metric, name, hours): each for metric, each in scores.items()}
        for n, (vector, component) in product(there, WINDS.items()):
            for name in [each for each in names if base(each) == component]:
                key = n, name.replace("u_comp", "v_comp"), hours
                if key in by_date and (n, name, hours) in by_date:
                    mse = by_date[n, name, hours]["mse"] + by_date[key]["mse"]
                    whole_name = name.replace(component, vector)
                    by_date[n, whole_name, hours] = {"mse": mse}
                    scores = final({"mse": mse, "mae": mse, "bias": mse}, 1)
                    for metric in ("mse", "rmse", "rmse_sqrt_before_time_avg"):
                        found[n, metric, whole_name, hours] = scores[metric]
    return found, [*regions], scorecard(case, compared, by_date), exact


def scorecard(case: Case, compared: dict[str, Fields], by_date: dict) -> dict[tuple[str, int], float]:
    """Return per cent by variable and lead in hours, of the first forecast relative to another."""
    first, second = next(iter(compared)), case.against
    found = {}
    for (name, variable, hours), own in by_date.items():
        if name == first and (second, variable, hours) in by_date:
            ours, theirs = own["mse"][:, 0], by_date[second, variable, hours]["mse"][:, 0]
            both = ~np.isnan(ours) & ~np.isnan(theirs)
            with np.errstate(invalid="ignore", divide="ignore"):
                rmse = [np.sqrt(each[both].sum() / both.sum()) for each in (ours, theirs)]
                found[variable, hours] = 100 * (rmse[0] - rmse[1]) / rmse[1]
    return {key: value for key, value in found.items() if np.isfinite(value)}


def other_grid(rng: np.random.Generator, fields: Fields) -> tuple[Array, Array]:
    """Return a coarser or finer grid of the same part of the globe."""
    rows, east = len(fields.latitude), fields.longitude
    spacing = east[1] - east[0]
    if abs(spacing * len(east) - 360) > 1e-6:
        factor = draw(rng, 0.5, 1.5, 2)
        apart = spacing * factor
        north = fields.latitude[0] - draw(rng, 0, apart / 4)
        return (north - apart * np.arange(max(2, int(rows / factor))),
                draw(rng, 0, 0, -360) + east[0] + apart / 4 + apart * np.arange(max(2, int(len(east) / factor))))  # fmt: skip
    rows, columns = draw(rng, (4, 5), (3, 6), (12, 16), (11, 15))
    half = draw(rng, 0, 90 / rows)
    return np.linspace(90 - half, half - 90, rows), draw(rng, 0, -180, 10) + np.arange(
        columns
    ) * 360 / columns


def generate_scores(seed: int, folder: Path) -> None:
    rng = np.random.default_rng([seed, 3])
    number, hours = int(rng.integers(11, 20)), int(draw(rng, 6, 6, 12, 24))
    step = hours * HOUR
    start = np.datetime64(draw(rng, "2020-02-25T00", "2020-12-28T12", "2019-12-29T18", "2021-02-26T06"), "s")
    times, holes, plain = start + step * np.arange(number), float(draw(rng, 0, 0.3)), rng.random() < 0.5
    kept = np.append(np.arange(3), np.setdiff1d(np.arange(3, number), rng.integers(3, number, 3)))
    grid, names = draw_grid(rng), draw_names(rng, 4)
    split = draw(rng, "one", "one", "variables", "dates")
    truth = random_fields(rng, names, {"time": times[kept]}, grid, holes)
    path, truth = write_archive(rng, folder / "truth", truth, plain, split)
    core, core_leads = some(rng, range(3, number - 2), 3, 6), some(rng, [1, 2, 4], 1, 3)
    forecasts, words, same = {}, [], rng.random() < 0.6
    for i in range(int(rng.integers(1, 4))):
        rows = sorted({*core, *some(rng, range(-3, number + 3), 1, 8)})
        more = some(rng, [0, 0.5, 3, number + 3], 0)
        leads = np.array(sorted({*core_leads, *more})) * hours * 3600
        axes = {"time": start + step * np.array(rows), "lead": leads.astype("m8[s]")}
        if members := int(draw(rng, 0, 0, 1, 2, 5)):
            axes["number"] = np.arange(members)
        lacking = draw(rng, "", "", base(str(draw(rng, *names)))) if len({*map(base, names)}) > 1 else ""
        own = [n for n in rng.permutation(names).tolist() if base(n) != lacking]
        where = grid if same or rng.random() < 0.5 else other_grid(rng, truth)
        fields, format = random_fields(rng, own, axes, where, holes), draw(rng, *FORMATS)
        name = draw(rng, f"model {i}", f"f{i}", f"HRES-{i}")
        if infinite := rng.random() < 0.1:
            fields.values[own[0]][tuple(int(rng.integers(size)) for size in fields.values[own[0]].shape)] = (
                np.inf
            )
        ds, forecasts[name] = disguise(rng, fields, plain or infinite, format, False)
        words += ["--forecast", f"{name}={write(rng, ds, folder / f'forecast{i}', format)}"]
    clim, baselines, regions = (
        None,
        some(rng, ["persistence", "climatology"], 0),
        ["global", *some(rng, REGIONS, 0, 4)],
    )
    if rng.random() < 0.7:
        hours_of_day = some(rng, [0, 6, 12, 18], 1) if rng.random() < 0.3 else [0, 6, 12, 18]
        days = np.arange(1, draw(rng, 366, 367, 367))
        days = days if rng.random() < 0.8 else days[np.abs(days - int(draw(rng, 1, 60, 366))) < 40]
        axes = {"hour": np.array(hours_of_day), "dayofyear": days}
        axes = axes if rng.random() < 0.8 else {draw(rng, *axes): axes["hour"]}
        axes = {axis: days if axis == "dayofyear" else labels for axis, labels in axes.items()}
        own = names if rng.random() < 0.7 else some(rng, names)
        own = [n for n in names if base(n) in {*map(base, own)}]
        where, format = grid if rng.random() < 0.7 else other_grid(rng, truth), draw(rng, *FORMATS)
        ds, clim = disguise(rng, random_fields(rng, own, axes, where, 0), plain, format, False)
        words += ["--climatology", write(rng, ds, folder / "climatology", format)]
    baselines = [each for each in baselines if clim or each != "climatology"]
    region, boundary = [], 0
    if (is_global := abs((grid[1][1] - grid[1][0]) * len(grid[1]) - 360) < 1e-6) and rng.random() < 0.25:
        region = draw(rng, [60.0, -100.0, -60.0, 100.0], [90.0, 0.0, 0.0, 360.0], [45.0, 170.0, -80.0, -40.0])
    if same and not is_global and rng.random() < 0.3:
        boundary = 1
    regions = (
        ["all"]
        if rng.random() < 0.2
        else [str(each) for each in rng.permutation(list(dict.fromkeys(regions)))]
    )
    against = [*forecasts][1] if len(forecasts) > 1 else "persistence" if "persistence" in baselines else ""
    if len(forecasts) > 1 and rng.random() < 0.4:
        against = [*forecasts][-1]
        words += ["--against", against]
    if not against and "climatology" in baselines:
        against = "climatology"
    variables = rng.permutation(names).tolist()
    data = {
        "path": path,
        "variables": variables,
        "step_hours": hours,
        "region": region,
        "boundary_width": boundary,
    }
    (folder / "run.toml").write_text(
        tomli_w.dumps({"data": data, "model": {"patch_size": [1, 1]}, "validation": {"lead_hours": [hours]}})
    )
    words += ["--job.config_file", str(folder / "run.toml"), "--job.dump_folder", str(folder / "run")]
    words += [f"--baselines={','.join(baselines)}", f"--regions={','.join(regions)}"]
    regions = [*REGIONS] if "all" in regions else sorted(regions, key=lambda name: name != "global")
    case = Case(truth, forecasts, clim, variables, step, words, baselines, regions, against, region, boundary)
    (folder / "case.pickle").write_bytes(pickle.dumps(case))


def evaluate_case(folder: Path) -> None:
    import evaluate

    case = pickle.loads((folder / "case.pickle").read_bytes())
    evaluate.plot_evaluation = lambda *_: None  # seconds a case, and no numbers
    sys.modules["verification.scorecard"].plot_scorecard = lambda *_: None  # type: ignore[attr-defined]
    sys.argv = ["evaluate.py", *case.words]
    evaluate.main()


def compare_scores(folder: Path) -> int:
    case: Case = pickle.loads((folder / "case.pickle").read_bytes())
    ours, regions, card, exact = expected(case)
    with xr.open_dataset(folder / "run/evaluation/scores.nc", engine="h5netcdf") as ds:
        theirs, wrong = ds.load(), []
    if [*theirs.region.values] != regions:
        return report([f"regions: {[*theirs.region.values]}, not {regions}"])
    worst: dict[str, tuple[float, str]] = {}
    for (forecast, metric, variable, hours), values in ours.items():
        name, _, level = variable.partition(":")
        at: dict[str, Any] = {
            "forecast": forecast,
            "metric": metric,
            "lead_time": hours * HOUR.astype("m8[ns]"),
        }
        try:
            found = theirs[name].sel(at | ({"level": int(level)} if level else {})).values
        except KeyError:
            found = np.full(len(regions), np.nan)
        found = np.nan_to_num(found) if metric == "num_dates" else found
        mean, size = VARIABLES[
            base(variable).replace("wind_vector", "u_component_of_wind").replace("10m_u", "u")
        ]["size"]
        power = POWER.get(metric, 0)
        rounding = EXACT if exact else ROUNDED + 5e-7 * mean / size  # float32 of large means
        room = rounding * (np.abs(values) + size**power)
        room = room * (100 if metric.startswith("unbiased") else 1)  # a difference of alike numbers
        off = np.where(
            np.isnan(values) | np.isnan(found),
            np.isnan(values) != np.isnan(found),
            np.abs(values - found) > room,
        )
        if off.any():
            r = int(off.argmax())
            by = np.nan_to_num(abs(found[r] / values[r] - 1), nan=np.inf)
            text = f"{metric} of {forecast!r}, {variable} at {hours} h, {regions[r]}: {found[r]:.9g}, not {values[r]:.9g}"
            worst[metric] = max(worst.get(metric, (-1.0, "")), (by, text))
    wrong = [text for _, text in worst.values()]
    extra = sum(int(each.sel(metric="rmse").notnull().sum()) for each in theirs.values())
    mine = sum(np.isfinite(v).sum() for (_, metric, _, _), v in ours.items() if metric == "rmse")
    wrong += [f"{extra} RMSEs, not {mine}"] if extra != mine else []
    path = folder / "run/evaluation/scorecard.csv"
    rows = pd.read_csv(path).itertuples() if path.exists() else []
    percent = {(row.variable, row.lead_hours): row.percent for row in rows}
    if case.against and percent.keys() != card.keys():
        wrong.append(f"scorecard: rows {sorted(percent.keys() ^ card.keys())} are in one of both")
    off = {
        key: value
        for key, value in percent.items()
        if abs(value - card.get(key, value)) > 2e-4 + (1e-4 - exact * 1e-4) * (100 + abs(value))
    }
    wrong += [f"scorecard: {key}: {value}, not {card[key]:.4f}" for key, value in off.items()][:2]
    return report(wrong)


def score(seed: int, folder: Path) -> tuple[str, str]:
    """Return the verdict on one evaluation, and why."""
    ask(generate_scores, seed, folder)
    answer = judge(*forked(LIMIT, evaluate_case, folder))
    return answer if answer[0] != "right" else judge(*forked(LIMIT, compare_scores, folder))


# -- commands in processes of their own


def forked(limit: float, function: Callable[..., int | None], *args: Any) -> tuple[int | None, str]:
    """Return the exit code of a function in a fork of this process, None if it hangs, and what it printed."""
    sys.stdout.flush()
    with tempfile.TemporaryFile("w+") as output:
        if not (pid := os.fork()):
            os.setsid()
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            code: Any = 1
            try:
                code = function(*args) or 0
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        end, status = time.monotonic() + limit, (0, 0)
        while not (status := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
            time.sleep(0.01)
        if not status[0]:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status[1]) if status[0] else None, output.read()


def ask(function: Callable[..., int | None], *args: Any) -> str:
    code, text = forked(LIMIT, function, *args)
    assert code == 0, text
    return text


def judge(code: int | None, text: str) -> tuple[str, str]:
    if code is None:
        return "hang", ""
    if "Traceback (most recent" in text or code < 0:
        return "traceback", text.strip()[-900:] + f" signal {-code}" * (code < 0)
    if code == 2:
        return "refused", [line for line in text.splitlines() if line.startswith("rossby:")][-1]
    if code == 3:
        return "wrong", "; ".join(text.splitlines()[:4])[:600]
    return ("right", "") if code == 0 else ("traceback", f"exit code {code}: {text[-300:]}")


def run(kind: str, one: Callable[[int, Path], tuple[str, str]], options: Namespace) -> int:
    for name in ("evaluate", "datasets.convert"):  # forks have them
        import_module(name)
    began, counts, wrong, messages = time.monotonic(), Counter(), [], Counter()
    seeds = [options.seed] if options.seed >= 0 else range(options.first, options.first + options.seeds)
    for seed in seeds:
        folder = Path(tempfile.mkdtemp(prefix=f"rossby-{kind}-{seed}-"))
        try:
            verdict, why = one(seed, folder)
        except AssertionError as error:
            verdict, why = "traceback", f"generator: {error}"
        counts[verdict] += 1
        if verdict in WRONG:
            wrong.append(f"seed {seed}: {verdict}: {why}")
            print(f"{wrong[-1]}; kept: {folder}", flush=True)
            continue
        shutil.rmtree(folder)
        if verdict == "refused":
            messages[re.sub(r"'/tmp\S*'|[\d.:-]+", "#", why)] += 1
            print(f"seed {seed}: {why}", flush=True)
    for text, number in messages.most_common():
        print(f"refused {number} x: {text}")
    row = {"kind": kind, "cases": len(seeds), "first": min(seeds), "counts": counts, "wrong": wrong}
    record("attack", [row | {"seconds": time.monotonic() - began}])
    print(f"\n{pd.Series(counts, name=kind).to_string()}\n{time.monotonic() - began:.0f} s")
    return int(bool(wrong))


def scores(options: Namespace) -> int:
    return run("scores", score, options)


def sources(options: Namespace) -> int:
    return run("sources", source, options)
