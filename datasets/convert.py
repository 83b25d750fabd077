"""Any archive as a training store: Zarr 3, a date a chunk, many chunks an object, float16 or float32.

    .venv/bin/python -m datasets.convert SOURCE TARGET
    .venv/bin/python -m datasets.convert era5/ era5.zarr --variables geopotential 2m_temperature --levels 500
    .venv/bin/python -m datasets.convert SOURCE --check        a table of what is wrong with a source

SOURCE is what data.path takes: Zarr, NetCDF, HDF5, GRIB; a file, folder, glob or URL. TARGET is a local
folder. Killed at any moment, the same command goes on, to the same bytes. Run again with a source that has
later dates (or another source with them) it appends those. A half-made store is refused by whoever reads it.

Memory: a worker takes at most about 3.5 GiB (2 GiB of shards, 3 blocks of a quarter, the one that is packed);
what it takes here is printed at the start. docs/data.md says more. Exit codes: 0, 1 --check found something,
2 bad input.
"""

import sys
from argparse import ArgumentParser, Namespace

from command_line import OneLineParser
from errors import ConfigError, end_when_interrupted, one_line_errors


def parser() -> ArgumentParser:
    known = OneLineParser("datasets.convert", __doc__)
    add = known.add_argument
    add("source", metavar="SOURCE", help="what data.path takes: file, folder, glob or URL")
    add("target", metavar="TARGET", nargs="?", help="a folder, new or to be continued")
    add("--check", action="store_true", help="reads SOURCE, and lists what is wrong with it")
    add("--variables", nargs="+", default=[], metavar="NAME", help="all by default")
    add("--levels", nargs="+", type=int, default=[], metavar="HPA", help="of variables named without one")
    add("--static", nargs="*", default=None, metavar="NAME", help="constant fields; all by default")
    add("--period", nargs=2, default=[], metavar=("FIRST", "LAST"), help="dates, both included")
    add(
        "--region",
        nargs=4,
        type=float,
        default=[],
        metavar=("S", "N", "W", "E"),
        help="degrees; W may be < 0",
    )
    add("--grid", default="", metavar="HxW", help="regrid: 121x240 has rows on the poles, 32x64 has none")
    add("--grid_like", default="", metavar="STORE", help="regrid to the grid of another archive")
    add("--method", choices=("conservative", "bilinear"), default="conservative", help="of regridding")
    add(
        "--dtype", choices=("float16", "float32"), default="float16", help="float16: half the bytes (default)"
    )
    add("--rows", type=int, default=0, metavar="N", help="latitudes in a chunk; default: all")
    add("--workers", type=int, default=1, metavar="N", help="processes of this machine (default 1)")
    add("--scheduler", default="", metavar="tcp://HOST:PORT", help="of dask.distributed, instead")
    add("--select", nargs="+", default=[], metavar="DIM=LABEL", help="as data.select: member=0")
    return known


def parse(argv: list[str]) -> Namespace:
    """Raises ConfigError."""
    options = parser().parse_args(argv)
    if options.check == bool(options.target):
        what = "--check reads a source and writes nothing" if options.check else "TARGET is missing"
        raise ConfigError(f"convert: {what}: name SOURCE and TARGET, or SOURCE and --check")
    if options.grid and options.grid_like:
        raise ConfigError("--grid and --grid_like name two grids: keep one of them")
    if "://" in (options.target or ""):
        raise ConfigError(
            f"TARGET {options.target!r}: a local folder expected; copy the store when it is done"
        )
    for name, least in (("workers", 1), ("rows", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: at least {least}")
    return options


def main(argv: list[str]) -> int:
    """The exit code. Raises ConfigError, DataError, RunFailed."""
    options = parse(argv)
    if options.check:  # imported here: torch takes seconds, and a misspelt option is to be said before
        from conversion.check_source import check_source

        return check_source(options)
    from conversion.run import convert

    convert(options)
    return 0


if __name__ == "__main__":
    end_when_interrupted()
    with one_line_errors():
        sys.exit(main(sys.argv[1:]))
