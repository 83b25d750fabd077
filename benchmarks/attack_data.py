"""Archives that are damaged, mislabelled or odd, in every format: one line, a warning, or read as it is."""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from numcodecs import LZ4, Blosc, Zlib, Zstd

from benchmarks.attack_case import Case, Right, either, refused, runs, warned
from benchmarks.attack_stage import Stage
from tests.started_jobs import losses
from tests.test_identity import NAMES, waves

KIND = "data"
U, V = NAMES
CODECS = {"blosc": Blosc(), "zlib": Zlib(), "zstd": Zstd(checksum=True), "lz4": LZ4(), "raw": None}
FORMATS = ("zarr2", "zarr3", "netcdf4", "netcdf3")
NUMBER = 80  # of dates
Make = Callable[[Path], Path]  # a folder that is there -> the path of the data in it


def write(ds: xr.Dataset, format: str, folder: Path, compressor: Any = "") -> Path:
    """A chunk a date."""
    if format.startswith("netcdf"):
        path = folder / "data.nc"
        ds.to_netcdf(path, engine="scipy" if format == "netcdf3" else "h5netcdf")
        return path
    path = folder / "data.zarr"
    chunks = {name: {"chunks": (1, *ds[name].shape[1:])} for name in ds.data_vars if ds[name].ndim > 2}
    own = {} if compressor == "" else {"compressors": compressor}
    encoding: Any = {name: each | own for name, each in chunks.items()}
    ds.to_zarr(
        path, zarr_format=2 if format == "zarr2" else 3, encoding=encoding, consolidated=format == "zarr2"
    )
    return path


def chunk(path: Path, date: int) -> Path:
    v2 = path / U / f"{date}.0.0"
    return v2 if v2.exists() else path / U / f"c/{date}/0/0"


def date_of(date: int) -> str:
    return str(waves().time.values[date])[:19]


def cases(stage: Stage, rng: random.Random) -> Iterator[Case]:
    for name, make, right in (*chunks(rng), *values(rng), *coordinates(), *files(), *layouts()):
        yield case(stage, name, make, right)
    yield from reordered(stage)


def case(stage: Stage, name: str, make: Make, right: Right, *more: str) -> Case:
    """A fresh training of a few steps on the data."""
    folder = stage.fresh(f"data {name}"[:80])
    run, at = folder / "run", folder / "data"
    short = ["--training.steps", "3", "--checkpoint.enable=false", "--checkpoint.keep_best="]
    command = ["train", *stage.options(run, *short, "--data.path", str(at), *more)]

    def prepare() -> None:
        (folder / "made").mkdir(parents=True)
        made = make(folder / "made")
        at.symlink_to(made) if made.exists() else None

    return Case(KIND, name, command, right, prepare=prepare)


Odd = tuple[str, Make, Right]


def chunks(rng: random.Random) -> Iterator[Odd]:
    """Cut short or gone, at dates that are drawn."""
    kinds = [("zarr2", codec) for codec in CODECS] + [("zarr3", "")]
    for format, codec in kinds:
        compressor = CODECS.get(codec, "")
        for how, keep in (("half", 0.5), ("empty", 0.0), ("all but one byte", -1)):
            date = rng.randrange(1, 45)
            make = partial(cut, format, compressor, date, keep)
            right = refused(U, date_of(date))
            yield f"{format} {codec}: the chunk of date {date}, {how}", make, right
        date = rng.randrange(1, 45)
        make = partial(cut, format, compressor, date, None)
        said = f"{date_of(date)}, (is|are) not in the store|, 1 left out for fields without a value"
        yield f"{format} {codec}: no chunk of date {date}", make, warned(said)


def cut(format: str, compressor: Any, date: int, keep: float | None, folder: Path) -> Path:
    path = write(waves(), format, folder, compressor)
    damaged = chunk(path, date)
    content = damaged.read_bytes()
    damaged.unlink()
    for name in (".zmetadata", f"{U}/.zarray") if keep is None and format == "zarr2" else ():
        text = (path / name).read_text()  # as other programs write it: what is missing reads as zeros
        (path / name).write_text(text.replace('"fill_value": "NaN"', '"fill_value": 0.0'))
    if keep is not None:
        damaged.write_bytes(content[: int(keep * len(content)) if keep >= 0 else -1])
    return path


def changed(format: str, change: Callable[[xr.Dataset], xr.Dataset], folder: Path) -> Path:
    return write(change(waves()), format, folder)


def values(rng: random.Random) -> Iterator[Odd]:
    """That are no weather."""
    for fill in (9.96921e36, 1e30, 1e20, -9999.0, -32767.0):
        for format in (rng.choice(FORMATS[:2]), rng.choice(FORMATS[2:])):
            date = rng.randrange(1, 45)
            make = partial(changed, format, partial(put, fill, date))
            yield (
                f"{format}: {fill:g} that nothing declares, date {date}",
                make,
                refused("_FillValue", date_of(date)),
            )
    for format in FORMATS:
        infinite = partial(changed, format, partial(put, np.inf, rng.randrange(1, 45)))
        yield f"{format}: infinities", infinite, warned(f"{U}: 2 values infinite")
        empty = partial(changed, format, lambda ds: ds.assign({U: ds[U] * np.nan}))
        yield f"{format}: a variable without any value", empty, refused(U)
        constant = partial(changed, format, lambda ds: ds.assign({U: ds[U] * 0 + 3}))
        yield f"{format}: a variable that never changes", constant, either(refused(U), warned(U))
        wrong = partial(changed, format, lambda ds: ds.assign({U: ds[U] * 100}))
        yield f"{format}: other units", wrong, warned(f"{U}: .*outside -120 to 120 m s-1")


def put(value: float, date: int, ds: xr.Dataset) -> xr.Dataset:
    ds[U][date, 2, :2] = value
    return ds


def coordinates() -> Iterator[Odd]:
    """Times and places that mean something else, or nothing."""
    hours = np.arange(NUMBER) * 6.0
    times = {
        "in fortnights": ({"units": "fortnights since 2020-01-01"}, hours, refused("time")),
        "without units": ({}, hours, refused("time")),
        "since nonsense": ({"units": "hours since the flood"}, hours, refused("time")),
        "in 360 days": (
            {"units": "hours since 2020-01-01", "calendar": "360_day"},
            hours,
            refused("360_day"),
        ),
        "without leap years": (
            {"units": "hours since 2020-01-01", "calendar": "noleap"},
            hours,
            refused("noleap"),
        ),
        "not a number": ({"units": "hours since 2020-01-01"}, hours * np.nan, refused()),
        "all the same": ({"units": "hours since 2020-01-01"}, hours * 0, refused()),
        "offset by two hours": ({"units": "hours since 2020-01-01 02:00 +02:00"}, hours, runs()),
        "beyond all dates": ({"units": "hours since 2020-01-01"}, hours + 1e14, refused()),
    }
    for name, (attrs, numbers, right) in times.items():
        yield f"zarr2: times {name}", partial(changed, "zarr2", partial(with_times, numbers, attrs)), right
        yield (
            f"netcdf4: times {name}",
            partial(changed, "netcdf4", partial(with_times, numbers, attrs)),
            right,
        )
    north, east = waves().latitude.values, waves().longitude.values
    places = {
        "latitudes in no order": ({"latitude": north[[0, 2, 1, 3, 5, 4]]}, refused("latitude")),
        "latitudes repeated": ({"latitude": north[[0, 1, 1, 3, 4, 5]]}, refused("latitude")),
        "latitudes beyond the pole": ({"latitude": north * 1.5}, refused("latitude")),
        "latitudes that are no numbers": ({"latitude": north * np.nan}, refused("latitude")),
        "longitudes in no order": ({"longitude": east[[0, 3, 1, 2, 4, 5, 6, 7]]}, refused("longitude")),
        "longitudes infinite": ({"longitude": east + np.inf}, refused("longitude")),
        "radians": (
            {
                "latitude": ("latitude", np.deg2rad(north), {"units": "radians"}),
                "longitude": np.deg2rad(east),
            },
            refused("radians"),
        ),
    }
    for name, (axes, right) in places.items():
        yield f"zarr3: {name}", partial(changed, "zarr3", partial(with_places, axes)), right
        yield f"netcdf3: {name}", partial(changed, "netcdf3", partial(with_places, axes)), right


def with_places(axes: dict[str, Any], ds: xr.Dataset) -> xr.Dataset:
    return ds.assign_coords(axes)


def with_times(numbers: np.ndarray, attrs: dict[str, str], ds: xr.Dataset) -> xr.Dataset:
    return ds.assign_coords(time=("time", numbers, attrs))


def files() -> Iterator[Odd]:
    """That are cut short, empty, or something else."""

    def short(format: str, keep: float, folder: Path) -> Path:
        path = write(waves(), format, folder)
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        return path

    for format in FORMATS[2:]:
        for keep in (0.0, 0.001, 0.5, 0.99):
            yield f"{format}: {keep:.1%} of the file", partial(short, format, keep), refused()

    def without(format: str, name: str, content: bytes | None, folder: Path) -> Path:
        path = write(waves(), format, folder)
        (path / name).unlink() if content is None else (path / name).write_bytes(content)
        return path

    right = runs()
    for format, name, gone in (
        ("zarr2", ".zmetadata", right),
        ("zarr2", f"{U}/.zarray", either(right, refused(U))),
        ("zarr2", ".zgroup", either(right, refused())),
        ("zarr3", "zarr.json", refused()),
        ("zarr3", f"{U}/zarr.json", refused(U)),
        ("zarr3", "time/zarr.json", refused("time")),
    ):
        yield f"{format}: no {name}", partial(without, format, name, None), gone
        yield (
            f"{format}: {name} of nonsense",
            partial(without, format, name, b"{nonsense"),
            either(gone, refused()),
        )

    def text(folder: Path) -> Path:
        (folder / "data.nc").write_text("time,latitude\n")
        return folder / "data.nc"

    yield "a text", text, refused()
    yield "a folder with a text", lambda folder: text(folder).parent, refused()
    yield "nothing", lambda folder: folder / "nowhere", refused()
    yield "a folder without data", lambda folder: folder, refused()


def layouts() -> Iterator[Odd]:
    """Dimensions that are not those of analyses, and too few dates."""
    changes: dict[str, tuple[Callable[[xr.Dataset], xr.Dataset], Right]] = {
        "members": (lambda ds: ds.expand_dims(member=[0, 1], axis=1), refused("data.select")),
        "one member": (lambda ds: ds.expand_dims(member=[0], axis=1), runs()),
        "no longitudes": (lambda ds: ds.isel(longitude=0, drop=True), refused("longitude")),
        "no dates": (lambda ds: ds.isel(time=0, drop=True), refused()),
        "one date": (lambda ds: ds.isel(time=[0]), refused("two dates")),
        "two dates": (lambda ds: ds.isel(time=[0, 50]), refused()),
        "one point": (lambda ds: ds.isel(latitude=[2], longitude=[3]), refused()),
        "one row": (lambda ds: ds.isel(latitude=[2]), refused()),
        "levels of 850.5 hPa": (lambda ds: ds.expand_dims(level=[850.5], axis=1), refused("whole hPa")),
        "texts for numbers": (lambda ds: ds.assign({U: ds[U].astype("U4")}), refused(U)),
        "dates for numbers": (
            lambda ds: ds.assign({U: ds[U].astype("i8").astype("M8[ns]").drop_attrs()}),
            refused(U),
        ),
        "other names": (lambda ds: ds.rename({U: "x"}), refused(U)),
        "gaps": (lambda ds: ds.isel(time=[i for i in range(80) if i % 7]), runs()),
        "daily": (lambda ds: ds.isel(time=slice(0, None, 4)), refused("hours")),
        "whole numbers": (lambda ds: ds.assign({U: (ds[U] * 10).astype("i2")}), runs()),
    }
    for name, (change, right) in changes.items():
        for format in ("zarr2", "netcdf4"):
            if (name, format) != ("texts for numbers", "netcdf4"):
                yield f"{format}: {name}", partial(changed, format, change), right


def reordered(stage: Stage) -> Iterator[Case]:
    """The same fields in another order: the same losses."""
    orders = {
        "as they are": np.arange(NUMBER),
        "descending times": np.arange(NUMBER)[::-1],
        "times in no order": np.random.default_rng(0).permutation(NUMBER),
        "times repeated": np.r_[np.arange(NUMBER), 3, 50],
    }
    found: dict[str, dict[int, float]] = {}
    flips = {
        "ascending latitudes": {"latitude": slice(None, None, -1)},
        "westwards": {"longitude": slice(None, None, -1)},
    }
    for format in ("zarr2", "netcdf4"):
        for name, change in (orders | flips).items():
            select = change if isinstance(change, dict) else {"time": change}
            make = partial(changed, format, lambda ds, select=select: ds.isel(select))
            made = case(stage, f"{format}: {name}", make, runs())
            run = Path(made.command[made.command.index("--job.dump_folder") + 1])  # type: ignore[index, union-attr]
            made.right = runs(partial(same_losses, found, run))
            yield made


def same_losses(found: dict[str, dict[int, float]], run: Path) -> str:
    """As the first of them, but for the last digits, whichever it is."""
    ours = losses(run)
    first = found.setdefault("first", ours)
    shutil.rmtree(run)
    close = all(abs(ours[step] / first[step] - 1) < 1e-4 for step in first)
    return "" if close and ours.keys() == first.keys() else f"losses {ours}, not {first}"
