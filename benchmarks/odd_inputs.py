"""Random, valid, unusual sources for attack.py: analyses as files of any format, names, units and order, and
the fields that they mean, in the units of datasets/.

Shapes: H latitudes, W longitudes.
"""

import pickle
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from benchmarks.results_file import ROOT

DRAWN = tomllib.loads((ROOT / "benchmarks/attack.toml").read_text())["drawn"]
VARIABLES, AXES = DRAWN["variables"], DRAWN["axes"]
UPPER, STATIC = [*list(VARIABLES)[:6], "hgt"], ["land_sea_mask", "geopotential_at_surface"]
SURFACE = [name for name in VARIABLES if name not in (*UPPER, *STATIC)]
FORMATS = ("netcdf3", "netcdf4", "zarr2", "zarr3", "sharded")
HOUR = np.timedelta64(3600, "s")
Array = np.ndarray


@dataclass
class Fields:
    """values: name with level -> (T, H, W) float64, NaN where missing; latitudes from north to south,
    longitudes eastwards.
    """

    values: dict[str, Array]
    times: Array
    latitude: Array
    longitude: Array
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


def draw_grid(rng: np.random.Generator) -> tuple[Array, Array]:
    rows, columns = int(rng.integers(5, 10)), int(draw(rng, 6, 8, 9, 12))
    kind = draw(rng, "poles", "cells", "gaussian", "regional", "regional")
    if kind == "regional":
        spacing, north = draw(rng, 2.5, 5.0), draw(rng, 70.0, 40.0, 21.25)
        west = draw(rng, -20.0, 172.5, 340.0)
        return north - spacing * np.arange(rows), west + spacing * np.arange(columns)
    east = draw(rng, 0.0, 0.0, -180.0, 7.5) + np.arange(columns) * 360 / columns
    if kind == "gaussian":
        north = -np.rad2deg(np.arcsin(np.polynomial.legendre.leggauss(rows)[0]))
        return north.astype("f4").astype("f8"), east
    half = 0 if kind == "poles" else 90 / rows
    return np.linspace(90 - half, half - 90, rows), east


def draw_values(rng: np.random.Generator, name: str, shape: tuple[int, ...], holes: float) -> Array:
    mean, deviation = VARIABLES[base(name)]["size"]
    values = (mean + deviation * rng.normal(size=shape)).astype("f4").astype("f8")
    if base(name) == "sea_surface_temperature":
        values[..., 1::3, :3] = np.nan if holes else 280
    elif base(name) == "total_precipitation":
        values = np.maximum(values, 0) * (rng.random(shape[:1] + (1,) * (len(shape) - 1)) < 0.9)
    elif rng.random() < holes:
        values[rng.random(shape) < 0.03] = np.nan
    if rng.random() < holes and len(shape) > 2:
        values[int(rng.integers(shape[0]))] = np.nan
    return values


def encode(rng: np.random.Generator, name: str, values: Array, plain: bool, format: str) -> tuple:
    """Return stored numbers, their attributes, and the values that these numbers mean."""
    units = VARIABLES[base(name)]["units"]
    text = next(iter(units)) if plain else draw(rng, *units)
    factor, offset = units[text]
    numbers, attrs, missing = (values - offset) / factor, {"units": text}, np.isnan(values)
    if about := f"at {name[-3:]} hPa" if name.endswith(":100") else VARIABLES[base(name)].get("about"):
        attrs["long_name"] = about  # u100 may be either
    most = np.abs(numbers[~missing]).max(initial=1.0)
    kinds = ["f4", ">f4", "f8", "packed", "packed"]
    kinds += ["f2"] * int(most < 6e4 and not format.startswith("net"))
    kind = "f4" if plain else draw(rng, *kinds)
    kind = "f4" if kind == ">f4" and format in ("zarr3", "sharded") else kind
    if kind == "packed":
        low, high = (f(numbers[~missing], initial=0.0) for f in (np.min, np.max))
        number_type = draw(rng, np.float32, np.float64)
        scale, middle = number_type((high - low) / 60000 or 1), number_type((low + high) / 2)
        fill = np.int16(draw(rng, -32767, -32768, 32767))
        stored = np.where(missing, fill, np.round((np.nan_to_num(numbers) - middle) / scale)).astype("i2")
        attrs |= {"scale_factor": scale, "add_offset": middle, draw(rng, "_FillValue", "missing_value"): fill}
        if (unsigned := format.startswith("net") and rng.random() < 0.3) and high > low:
            scale, middle = (high - low) / 65000, low
            stored = np.round((np.nan_to_num(numbers) - middle) / scale).clip(0, 65000)
            stored = np.where(missing, 65535, stored).astype("u2")
            attrs |= {"scale_factor": scale, "add_offset": middle}
            attrs |= {"_FillValue": np.int16(-1), "_Unsigned": "true"}
            attrs.pop("missing_value", None)
        decoded = stored * float(scale) + float(middle)
        stored = stored.view("i2") if unsigned else stored
    else:
        fill = np.nan if plain else draw(rng, np.nan, -999.0, -32767.0, 1e20)
        fill = np.nan if kind == "f2" and abs(fill) > 1000 else fill
        stored = np.where(missing, fill, numbers).astype(kind)
        decoded = stored.astype("f8")
        if fill == fill:
            attrs[draw(rng, "_FillValue", "missing_value")] = np.dtype(kind).newbyteorder("=").type(fill)
    return stored, attrs, np.where(missing, np.nan, decoded * factor + offset)


def encode_times(rng: np.random.Generator, times: Array) -> tuple[Array, dict[str, Any]]:
    unit, seconds = draw(rng, ("hours", 3600), ("days", 86400), ("minutes", 60), ("seconds", 1))
    since = draw(rng, "1900-01-01 00:00:00.0", "1850-1-1", "2000-01-01T00:00:00Z", "1970-01-01 06:00")
    plain = re.sub(r"-(\d)\b", r"-0\1", since.rstrip("Z").replace(" ", "T"))
    numbers = (times - np.datetime64(plain, "s")) / np.timedelta64(seconds, "s")
    kind = draw(rng, "f8", "f8" if seconds < 3600 else "f4", "f8" if unit == "days" else "i4")
    kind = "f8" if kind == "i4" and np.abs(numbers).max() > 2**31 - 1 else kind
    calendar = draw(rng, "", "standard", "gregorian", "proleptic_gregorian")
    return numbers.astype(kind), {"units": f"{unit} since {since}"} | (
        {"calendar": calendar} if calendar else {}
    )


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


def disguise(rng: np.random.Generator, fields: Fields, plain: bool, format: str) -> Any:
    """Return the Dataset as a file has it, nothing of it to be encoded, and the fields that it means."""
    axes = ["time"] if fields.values else []
    dim = {role: draw(rng, *AXES[role]) for role in (*axes, "level", "latitude", "longitude")}
    labels, columns = encode_east(rng, fields.longitude)
    rows = draw(rng, slice(None), slice(None, None, -1))
    coords: dict[str, Any] = {}
    if axes:
        order = np.arange(len(fields.times))
        order = rng.permutation(len(order)) if rng.random() < 0.5 else order
        times, attrs = encode_times(rng, fields.times[order])
        if rng.random() < 0.2:  # a date without a value
            times, order = np.append(times, times.dtype.type(-99999)), np.append(order, 0)
            attrs |= {"_FillValue": times[-1]}
        coords[dim["time"]] = (dim["time"], times, attrs)
    degrees = draw(rng, "f4", "f8")
    degrees = "f8" if plain else degrees
    north = fields.latitude[rows].astype(degrees)
    coords[dim["latitude"]] = (dim["latitude"], north, {"units": "degrees_north"})
    coords[dim["longitude"]] = (dim["longitude"], labels.astype(degrees), {"units": "degrees_east"})
    upper = [name for name in fields.values if ":" in name]
    numbers = list(dict.fromkeys(int(name.partition(":")[2]) for name in upper))
    levels = [int(level) for level in rng.permutation(numbers)]
    way = "axis" if "hgt" in map(base, upper) else "names"  # of which names with levels are not known
    way = draw(rng, "axis", "axis", "axis", way, "scalar" if len(levels) == 1 and way == "names" else "axis")
    if upper and way != "names":
        text, factor = draw(rng, ("hPa", 1), ("Pa", 100), ("mb", 1), ("millibar", 1), ("", 1), ("kPa", 0.1))
        kind, attrs = draw(rng, "f4", "f8", *["i4"] * (factor >= 1)), {"units": text} if text else {}
        labels = (np.array(levels) * factor).astype(kind)
        coords[dim["level"]] = (dim["level"], labels, attrs) if way == "axis" else ((), labels[0], attrs)
    permuted = [str(role) for role in rng.permutation([*axes, "level", "latitude", "longitude"])]
    if rng.random() < 0.5:
        permuted = [*axes, "level", "latitude", "longitude"]
    data, meant, fixed = {}, {}, {}
    for name in dict.fromkeys(n if way == "names" else base(n) for n in [*fields.values, *fields.static]):
        stacked = [own for level in levels if (own := f"{name}:{level}") in fields.values]
        is_static, names = name in fields.static, stacked or [name]
        roles = ["level", *([] if is_static else axes), "latitude", "longitude"]
        values = np.stack([(fields.static if is_static else fields.values)[own] for own in names])
        stored, attrs, decoded = encode(rng, name, values, plain, format)
        (fixed if is_static else meant).update(zip(names, decoded, strict=True))
        stored = stored.take(order, 1) if "time" in roles else stored
        stored = stored[..., rows, :][..., columns]
        if not (stacked and way == "axis"):
            stored, roles = stored[0], roles[1:]
        there = [role for role in permuted if role in roles]
        # A name that archives give a variable, or a level of it: u, U, u500, ua_500, T500hPa.
        choices = [choice for choice in VARIABLES[base(name)]["names"] if choice not in data]
        text, level = draw(rng, *choices), name.partition(":")[2]
        if level:
            text = f"{text}{draw(rng, '_{}', '{}hPa' if int(level) < 20 else '{}')}".format(level)
        data[text] = ([dim[r] for r in there], stored.transpose([roles.index(r) for r in there]), attrs)
    return xr.Dataset(data, coords), replace(fields, values=meant, static=fixed)


def write(rng: np.random.Generator, ds: xr.Dataset, path: Path, format: str) -> str:
    if format.startswith("netcdf"):
        path, chunks = path.with_suffix(draw(rng, ".nc", ".nc4" if format == "netcdf4" else ".nc")), {}
        for name in [name for name in ds.data_vars if format == "netcdf4" and rng.random() < 0.3]:
            sizes = tuple(int(rng.integers((size + 1) // 2, size + 1)) for size in ds[name].shape)
            chunks[name] = {"chunksizes": sizes, "zlib": True}
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


def write_archive(rng: np.random.Generator, folder: Path, fields: Fields, plain: bool, split: str) -> Any:
    """Write analyses as one file or several; return the path, and the fields that are read back."""
    names, dates = list(fields.values), np.arange(len(fields.times))
    parts: list[tuple[list[str], Array, list[str]]] = [(names, dates, list(fields.static))]
    if split == "variables":
        groups = list(dict.fromkeys(map(base, names)))
        parts = [([n for n in names if base(n) == group], dates, []) for group in groups]
        parts = [(own, rng.permutation(dates)[: len(dates) - int(rng.integers(2))], s) for own, _, s in parts]
        parts[0] = (parts[0][0], parts[0][1], list(fields.static))
    elif split == "dates":
        middle, overlap = len(dates) // 2, int(rng.integers(3)) * plain
        parts = [(names, dates[: middle + overlap], list(fields.static)), (names, dates[middle:], [])]
    if split != "one" and fields.static and rng.random() < 0.5:
        parts = [(*part[:2], []) for part in parts] + [([], dates[:0], list(fields.static))]
    read = replace(fields, values={n: np.full_like(fields.values[n], np.nan) for n in names}, static={})
    folder.mkdir()
    for number, (own, rows, constant) in enumerate(parts):
        rows = np.sort(rows)
        format = draw(rng, *FORMATS)
        values = {n: fields.values[n][rows] for n in own}
        static = {n: fields.static[n] for n in constant}
        part = replace(fields, values=values, times=fields.times[rows], static=static)
        ds, meant = disguise(rng, part, plain, format)
        path = write(rng, add_unreadable(rng, ds), folder / f"part{number}", format)
        read.static |= meant.static
        for name in own:
            read.values[name][rows] = meant.values[name]
    covered = np.unique(np.concatenate([rows for own, rows, _ in parts if own]))
    read.values = {name: values[covered] for name, values in read.values.items()}
    read.times = fields.times[covered]
    return path if len(parts) == 1 else str(folder), read


def add_unreadable(rng: np.random.Generator, ds: xr.Dataset) -> xr.Dataset:
    """Add, now and then, a variable on levels that cannot be read, and a dimension of one element."""
    dims = [d for role in ("latitude", "longitude") for d in AXES[role] if d in ds.coords]
    shape = [ds.sizes[d] for d in dims]
    if rng.random() < 0.2:
        single = draw(rng, "number", "height", "expver")
        ds = ds.assign({name: ds[name].expand_dims(single, int(rng.integers(2))) for name in ds.data_vars})
    if rng.random() < 0.2:
        dim = "lev" if "lev" not in ds.coords else "level"
        hybrid = [0.99, 0.98], {"long_name": "hybrid level at midpoints"}
        about = draw(rng, hybrid, ([0.4, 0.3], {"units": "hPa"}))
        ds = ds.assign_coords({dim: (dim, *about)})
        ds["o3"] = [dim, *dims], rng.normal(size=(2, *shape)).astype("f4")
    return ds


def generate_source(seed: int, folder: Path) -> None:
    rng = np.random.default_rng([seed, 1])
    number, step = int(rng.integers(4, 12)), int(draw(rng, 1, 6, 12, 24))
    start = np.datetime64(draw(rng, "2020-02-27T00", "1999-12-30T18", "2021-02-26T12"), "s")
    keep = np.sort(rng.choice(number + 3, number, replace=False))
    latitude, longitude = draw_grid(rng)
    shape, levels = (len(latitude), len(longitude)), some(rng, [1000, 850, 500, 250, 100, 50, 10], 1, 3)
    upper, surface = some(rng, UPPER, 0, 3), some(rng, SURFACE, 1, 3)
    names = [f"{name}:{level}" for name in upper for level in levels] + surface
    holes = float(draw(rng, 0, 0.3))
    values = {name: draw_values(rng, name, (number, *shape), holes) for name in names}
    fields = Fields(values, start + step * HOUR * keep, latitude, longitude)
    for name in some(rng, STATIC, 0):
        fields.static[name] = draw_values(rng, name, shape, 0)
    split = draw(rng, "one", "one", "variables", "dates")
    path, fields = write_archive(rng, folder / "data", fields, rng.random() < 0.2, split)
    (folder / "case.pickle").write_bytes(pickle.dumps((path, fields)))
