"""What `datasets.convert` is asked to read: variables, dates and grid of an archive, by its options."""

import re
import uuid
from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from archives.archive import Archive, open_archive
from archives.dates import parse_period
from archives.grid import Grid, global_grid
from archives.picks import check_used, parse_picks
from archives.regrid import SparseRegridder
from archives.variables import ON_LEVELS, expand_levels, named_by, nearest_name, split_name
from conversion.parts import Source, Window
from errors import ConfigError

MOST_POINTS = 100_000  # of one axis of a grid


def open_source(options: Namespace) -> Source:
    """Opens and checks all that the options name. Raises ConfigError or DataError."""
    picks = parse_picks(options.select)
    archive = open_archive(options.source, picks)
    check_used(picks, archive.extra_dimensions, archive.path)
    variables = chosen_variables(archive, options.variables, options.levels, options.static or [])
    wanted = _wanted_grid(options)
    target = crop(wanted or archive.grid, options.region) if options.region else None
    grid = target.grid if target else wanted or archive.grid
    if options.rows > grid.shape[0]:
        raise ConfigError(
            f"--rows {options.rows}: the grid has {grid.shape[0]} latitudes; take as many or fewer"
        )
    regridder = SparseRegridder(archive.grid, grid, options.method) if wanted else None
    if regridder and not (regridder.area > 0).any():
        raise ConfigError(f"--grid: none of its {grid.shape} points lies where {archive.path!r} has any")
    return Source(archive, variables, grid, None if wanted else target, regridder, uuid.uuid4().hex)


def chosen_variables(
    archive: Archive, names: Sequence[str], levels: Sequence[int], static: Sequence[str]
) -> list[str]:
    """All of the archive's or those named; a name without a level means the levels given, or all."""
    there = [name for name in archive.variables if name not in static]
    if not names:
        found = [name for name in there if not levels or split_name(name)[1] in (None, *levels)]
        missing = [each for each in levels if all(split_name(name)[1] != each for name in found)]
        if missing:
            raise ConfigError(f"--levels {missing[0]}: {archive.path!r} has no variable on it")
        return found
    found = []
    for name in expand_levels(names, levels):
        matching = named_by([name], archive.variables) if name in ON_LEVELS else [name]
        if not matching or matching[0] not in archive.variables:
            hint = nearest_name(name, archive.variables)
            raise ConfigError(f"--variables {name}: {archive.path!r} has no such variable{hint}")
        found += matching
    return list(dict.fromkeys(found))


def chosen_dates(source: Source, period: Sequence[str]) -> np.ndarray:
    """(n,) rows of the archive's dates in the period that have any of the variables. ConfigError: none."""
    archive = source.archive
    chosen = np.any([archive.has([name]) for name in source.variables], axis=0)
    chosen &= dates_in(archive.times, period)
    if not chosen.any():
        raise ConfigError(f"--period {' '.join(period)}: no date of it is in {archive}")
    return np.flatnonzero(chosen)


def dates_in(times: np.ndarray, period: Sequence[str]) -> np.ndarray:
    """(T,) bool: the dates of --period, all without one. ConfigError: it is none."""
    span = parse_period("--period", tuple(period))
    if not span:
        return np.ones(len(times), bool)
    first, last = (np.datetime64(end, "s") for end in span)
    return (times >= first) & (times <= last)


def static_fields(source: Source, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Name -> (H, W) float32 on the source's new grid; None: all that the archive has. Raises DataError."""
    archive = source.archive
    wanted = archive.static_variables if names is None else names
    return {name: source.fit(archive.read_static(name)) for name in wanted}


# -- grids


def _wanted_grid(options: Namespace) -> Grid | None:
    """That of --grid or --grid_like."""
    if options.grid_like:
        return open_archive(options.grid_like).grid
    return parse_grid(options.grid) if options.grid else None


def parse_grid(text: str) -> Grid:
    """ "32x64": cells round the globe; an odd number of rows has one on each pole, as 721x1440 has."""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    rows, columns = (int(part) for part in match.groups()) if match else (0, 0)
    if not (2 <= rows <= MOST_POINTS and 2 <= columns <= MOST_POINTS):
        raise ConfigError(f"--grid {text!r}: latitudes x longitudes expected, as in 121x240")
    if rows % 2:
        return Grid(np.linspace(90, -90, rows), np.arange(columns) * 360 / columns)
    return global_grid((rows, columns))


def crop(grid: Grid, region: Sequence[float]) -> Window:
    """The rows and columns whose points lie in (south, north, west, east). ConfigError: fewer than two."""
    south, north, west, east = region
    if not (-90 <= south < north <= 90) or not np.isfinite(region).all():
        raise ConfigError(f"--region {south:g} {north:g}: south and north, from -90 to 90, expected first")
    rows = np.flatnonzero((grid.latitude >= south - 1e-6) & (grid.latitude <= north + 1e-6))
    away = (grid.longitude - west + 1e-6) % 360 - 1e-6  # degrees east of `west`
    width = 360.0 if east - west >= 360 else (east - west) % 360
    columns = np.flatnonzero(away <= width + 1e-6)
    if len(rows) < 2 or len(columns) < 2:
        shown = " ".join(f"{each:g}" for each in region)
        found = f"{len(rows)} x {len(columns)} points of the grid lie in it"
        raise ConfigError(f"--region {shown}: {found}; two of each are needed")
    columns = columns[np.argsort(away[columns], kind="stable")]
    longitude = grid.longitude[columns]
    longitude = longitude + 360 * np.round((west + away[columns] - longitude) / 360)
    if longitude[-1] >= 360 and longitude[0] >= 180:
        longitude = longitude - 360
    chosen = slice(int(rows[0]), int(rows[-1]) + 1)
    return Window(Grid(grid.latitude[chosen], longitude), chosen, columns)
