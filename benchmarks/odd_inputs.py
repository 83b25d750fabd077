"""Random, valid, unusual inputs of attack.py: analyses, forecasts and climatologies as files of any format,
names, units and order, and the fields that they mean, in the units of datasets/.

Shapes: H latitudes, W longitudes.
"""

import pickle
import re
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import xarray as xr

from benchmarks.results_file import ROOT

DRAWN = tomllib.loads((ROOT / "benchmarks/attack.toml").read_text())["oracle"]
VARIABLES, AXES, REGIONS = DRAWN["variables"], DRAWN["axes"], DRAWN["regions"]
UPPER, STATIC = [*list(VARIABLES)[:6], "hgt"], ["land_sea_mask", "geopotential_at_surface"]
SURFACE = [name for name in VARIABLES if name not in (*UPPER, *STATIC)]
FORMATS = ("netcdf3", "netcdf4", "zarr2", "zarr3", "sharded")
HOUR = np.timedelta64(3600, "s")
LEVEL_UNITS = {"hPa": 1, "Pa": 100, "mb": 1, "millibar": 1, "": 1, "kPa": 0.1}
LEAD_UNITS = {"hours": 3600, "days": 86400, "nanoseconds": 1e-9, "minutes": 60}
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
    analyses: Fields  # of data.path, from which persistence starts; the truth where there is no other
    test_period: tuple[Any, Any] | None


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


def other_grid(rng: np.random.Generator, fields: Fields) -> tuple[Array, Array]:
    """Return a coarser or finer grid of the same part of the globe."""
    rows, east = len(fields.latitude), fields.longitude
    spacing = east[1] - east[0]
    if abs(spacing * len(east) - 360) > 1e-6:
        factor = draw(rng, 0.5, 1.5, 2)
        apart = spacing * factor
        north = fields.latitude[0] - draw(rng, 0, apart / 4)
        steps = [apart * np.arange(max(2, int(size / factor))) for size in (rows, len(east))]
        return north - steps[0], draw(rng, 0, 0, -360) + east[0] + apart / 4 + steps[1]
    rows, columns = draw(rng, (4, 5), (3, 6), (12, 16), (11, 15))
    half = draw(rng, 0, 90 / rows)
    east = draw(rng, 0, -180, 10) + np.arange(columns) * 360 / columns
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
            own = np.maximum(own, 0) * (rng.random(shape[:1] + (1,) * (len(shape) - 1)) < 0.9)
            own += 0.001 if "dayofyear" in axes or "hour" in axes else 0
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
    if about := f"at {name[-3:]} hPa" if name.endswith(":100") else VARIABLES[base(name)].get("about"):
        attrs["long_name"] = about  # u100 may be either
    most = np.abs(numbers[~missing]).max(initial=1.0)
    kinds = ["f4", ">f4", "f8", "packed", "packed"]
    kinds += [] if most >= 6e4 or format.startswith("net") else ["f2"]
    kind = "f4" if plain else draw(rng, *kinds)
    kind = "f4" if kind == ">f4" and format in ("zarr3", "sharded") else kind
    if kind == "packed":
        low, high = (f(numbers[~missing], initial=0.0) for f in (np.min, np.max))
        number_type = draw(rng, np.float32, np.float64)
        scale, middle = number_type((high - low) / 60000 or 1), number_type((low + high) / 2)
        fill = np.int16(draw(rng, -32767, -32768, 32767))
        filled = np.nan_to_num(numbers, nan=0.0)
        stored = np.where(missing, fill, np.round((filled - middle) / scale)).astype("i2")
        attrs |= {"scale_factor": scale, "add_offset": middle, draw(rng, "_FillValue", "missing_value"): fill}
        if (unsigned := format.startswith("net") and rng.random() < 0.3) and high > low:
            scale, middle = (high - low) / 65000, low
            stored = np.round((filled - middle) / scale).clip(0, 65000)
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
    attrs = {"units": f"{unit} since {since}", "calendar": calendar}
    return numbers.astype(kind), {name: text for name, text in attrs.items() if text}


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
            text, seconds = draw(rng, *LEAD_UNITS.items())
            values, attrs = values / np.timedelta64(1, "s") / seconds, {"units": text}
            values = values if text == "days" else values.astype("i8" if not format == "netcdf3" else "f8")
        coords[dim[role]] = (dim[role], values, attrs)
    degrees = draw(rng, "f4", "f8")
    degrees = "f8" if plain else degrees  # float32 alone changes scores by 1e-8
    places = {"latitude": (fields.latitude[rows], "north"), "longitude": (labels, "east")}
    for role, (numbers, way) in places.items():
        coords[dim[role]] = (dim[role], numbers.astype(degrees), {"units": f"degrees_{way}"})
    upper = [name for name in fields.values if ":" in name]
    levels = rng.permutation(list(dict.fromkeys(int(n.partition(":")[2]) for n in upper))).tolist()
    way = "axis" if "hgt" in map(base, upper) else "names"  # of which names with levels are not known
    way = draw(rng, "axis", "axis", "axis", way, "scalar" if len(levels) == 1 and way == "names" else "axis")
    if upper and way != "names":
        text, factor = draw(rng, *LEVEL_UNITS.items())
        numbers = (np.array(levels) * factor).astype(draw(rng, "f4", "f8", *["i4"] * (factor >= 1)))
        attrs = {"units": text} if text else {}
        coords[dim["level"]] = (dim["level"], numbers, attrs) if way == "axis" else ((), numbers[0], attrs)
    permuted = rng.permutation([*axes, "level", "latitude", "longitude"]).tolist()
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
    """Add, now and then, a variable on levels that cannot be read, and a dimension of one element."""
    dims = [d for role in ("latitude", "longitude") for d in AXES[role] if d in ds.coords]
    shape = [ds.sizes[d] for d in dims]
    if rng.random() < 0.2:
        single = draw(rng, "number", "height", "expver")
        ds = ds.assign({name: ds[name].expand_dims(single, int(rng.integers(2))) for name in ds.data_vars})
    if rng.random() < 0.2:
        dim = next(each for each in ("lev", "level") if each not in ds.coords)
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
    axes, grid, names = {"time": start + step * HOUR * keep}, draw_grid(rng), draw_names(rng)
    fields = random_fields(rng, names, axes, grid, float(draw(rng, 0, 0.3)))
    for name in some(rng, STATIC, 0):
        fields.static[name] = random_fields(rng, [name], {}, grid, 0).values[name]
    split = draw(rng, "one", "one", "variables", "dates")
    path, fields = write_archive(rng, folder / "data", fields, rng.random() < 0.2, split)
    (folder / "case.pickle").write_bytes(pickle.dumps((path, fields)))


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
            values = fields.values[own[0]]
            values[tuple(int(rng.integers(size)) for size in values.shape)] = np.inf
        ds, forecasts[name] = disguise(rng, fields, plain or infinite, format, False)
        words += ["--forecast", f"{name}={write(rng, ds, folder / f'forecast{i}', format)}"]
    clim, baselines = None, some(rng, ["persistence", "climatology"], 0)
    regions = list(dict.fromkeys(["global", *some(rng, REGIONS, 0, 4)]))
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
    analyses, is_global = truth, abs((grid[1][1] - grid[1][0]) * len(grid[1]) - 360) < 1e-6
    if rng.random() < 0.2:
        where = grid if rng.random() < 0.5 else other_grid(rng, truth)
        own = np.append(np.arange(3), np.setdiff1d(np.arange(3, number), rng.integers(3, number, 3)))
        analyses = random_fields(rng, names, {"time": times[own]}, where, holes)
        words += ["--truth", path]
        path, analyses = write_archive(rng, folder / "analyses", analyses, plain, "one")
    region, boundary = [], 0
    if is_global and analyses is truth and rng.random() < 0.25:
        region = draw(rng, [60.0, -100.0, -60.0, 100.0], [90.0, 0.0, 0.0, 360.0], [45.0, 170.0, -80.0, -40.0])
    if same and not is_global and analyses is truth and rng.random() < 0.3:
        boundary = 1
    regions = [*REGIONS] if rng.random() < 0.2 else rng.permutation(regions).tolist()
    against = [*forecasts][1] if len(forecasts) > 1 else "persistence" if "persistence" in baselines else ""
    if not against and "climatology" in baselines:
        against = "climatology"
    variables = rng.permutation(names).tolist()
    data = {"path": path, "variables": variables, "step_hours": hours}
    data |= {"region": region, "boundary_width": boundary}
    period = None
    if rng.random() < 0.2:  # the common dates but the first
        period = times[core[1]], times[core[-1]]
        data["test_period"] = [str(each) for each in period]
        data["train_period"] = [str(times[0]), str(times[core[1] - 1])]
    config = {"data": data, "model": {"patch_size": [1, 1]}, "validation": {"lead_hours": [hours]}}
    (folder / "run.toml").write_text(tomli_w.dumps(config))
    words += ["--job.config_file", str(folder / "run.toml"), "--job.dump_folder", str(folder / "run")]
    words += [f"--baselines={','.join(baselines)}", f"--regions={','.join(regions)}"]
    regions = sorted(regions, key=lambda name: name != "global")
    about = (variables, step, words, baselines, regions, against, region, boundary)
    case = Case(truth, forecasts, clim, *about, analyses, period)
    (folder / "case.pickle").write_bytes(pickle.dumps(case))
