"""Options of evaluate.py: checks, and the forecasts, variables and regions that they name."""

import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from datasets.archive import Archive
from datasets.grid import Grid
from datasets.remote import Access
from errors import ConfigError
from verification.evaluation import plain_name
from verification.forecast_layouts import StoredForecast, open_forecast
from verification.matching import ForecastFields
from verification.scores import REGIONS, regions_on
from verification.stores import NOT_COMPUTED

logger = logging.getLogger("rossby")
BASELINES = ("persistence", "damped_persistence", "climatology")


def check_options(options: Namespace) -> None:
    """Convert options that are lists as text to lists. Raises ConfigError."""
    for key, valid in (("baselines", BASELINES), ("regions", tuple(REGIONS))):
        names = [name for name in dict.fromkeys(getattr(options, key).split(",")) if name]
        setattr(options, key, names)
        for name in names:
            if name not in valid:
                raise ConfigError(f"--{key} {name!r}: valid: {', '.join(valid)}")


def open_forecasts(
    texts: list[str], folder: Path, picks: dict[str, str], access: Access
) -> dict[str, StoredForecast]:
    """Return the forecasts by name. Raises ConfigError if a path does not exist or a name occurs twice."""
    found: dict[str, StoredForecast] = {}
    for text in texts or [f"model={folder / 'forecast.zarr'}"]:
        name, _, path = text.rpartition("=")
        name = name or Path(path).name.removesuffix(".zarr").removesuffix(".nc")
        if "://" not in path and not Path(path).exists():
            raise ConfigError(f"--forecast {path!r}: does not exist; run forecast.py, or name another")
        if plain_name(name) in map(plain_name, (*BASELINES, *found)):
            reason = "its files would have the names of a baseline's or another one's; rename it, NAME=PATH"
            raise ConfigError(f"--forecast {name!r}: {reason}")
        stored = found[name] = open_forecast(path, picks, access)
        if stored.status is not None and (left := int((stored.status == NOT_COMPUTED).any(1).sum())):
            reason = f"the forecasts from {left} of its {len(stored.times)} initial dates are not finished"
            logger.warning("--forecast %r: %s, not scored; start forecast.py again", path, reason)
    return found


def common_variables(forecasts: Mapping[str, ForecastFields], truth: Archive, wanted: list[str]) -> list[str]:
    """Return the configured variables in both the first forecast and the truth. Raises ConfigError if there
    are none, or another forecast has none of them.
    """
    first, *further = forecasts.items()
    names = [name for name in wanted if name in first[1].variables and name in truth.variables]
    if not names:
        reason = f"the forecast has {', '.join(first[1].variables)}; name some of them that the truth has"
        raise ConfigError(f"data.variables = {wanted}: {reason}")
    for name, forecast in further:
        if not {*names} & {*forecast.variables}:
            reason = f"it has none of the variables that {first[0]!r} has, {', '.join(names)}"
            raise ConfigError(f"--forecast {name!r}: {reason}; score it alone")
    return names


def choose_regions(wanted: Sequence[str], grid: Grid) -> list[str]:
    """Return the regions with points on the grid, the globe first, because tables use the first region.

    Logs the others. Raises ConfigError if no region is left.
    """
    on_grid = regions_on(grid)
    found = [name for name in wanted if name in on_grid]
    if not found:
        reason = f"no point of this grid is in it; there are {', '.join(on_grid)}"
        raise ConfigError(f"--regions {','.join(wanted)}: {reason}")
    if outside := [name for name in wanted if name not in found]:
        logger.info("--regions: left out, as no point of this grid is in it: %s", ", ".join(outside))
    return sorted(found, key=lambda name: name != "global")


def scorecard_reference(names: Sequence[str], num_given: int) -> str:
    """Return the reference forecast of the scorecard: the second forecast, or the hardest baseline; "" if
    there is none.
    """
    candidates = [*names[1:num_given], "damped persistence", "persistence", "climatology"]
    return next((name for name in candidates if name in names), "")
