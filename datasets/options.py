"""Settings of [data] that are written as text: periods, selections, regions, storage options.

Imports only the standard library and TOML, so that the check of a command line takes less than a second.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import tomli

from config import Data
from datasets.channels import Channels
from errors import SECRET_NAME, refuse

COPIES_AHEAD = 2  # batches that are being copied to a GPU, or are there already (training/batches.py)
SELECT, STORAGE_OPTIONS = "data.select", "data.storage_options"
INSTEAD = "the environment (AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or a credentials file"
Region = Sequence[float]  # north, west, south, east in degrees; empty: all


def parse_period(key: str, period: Sequence[str]) -> tuple[datetime, datetime] | None:
    """Return the first and last time of ["2001-01-01", "2007-12-31"], without offset in UTC, None without
    a period. A last date without an hour includes that day. Raises ConfigError naming `key`.
    """
    if not period:
        return None
    if len(period) != 2:
        refuse(key, list(period), 'two dates expected, for example ["2001-01-01", "2007-12-31"]')
    dates = []
    for text in period:
        try:
            date = datetime.fromisoformat(text)
            dates.append(date.astimezone(UTC).replace(tzinfo=None) if date.tzinfo else date)
        except (ValueError, OverflowError):
            refuse(key, text, "not a date; write 2001-12-31 or 2001-12-31T18:00")
    # -- both are included; "2007-12-31" includes its last second
    first, last = dates
    if len(period[1]) <= len("2001-01-01"):
        last += timedelta(days=1, seconds=-1)
    if last < first:
        refuse(key, list(period), "the last date is before the first; exchange them")
    return first, last


def parse_selection(texts: Sequence[str]) -> dict[str, str]:
    """Return {"member": "0"} for ["member=0"]. Raises ConfigError."""
    selection: dict[str, str] = {}
    for text in texts:
        name, equals, label = (part.strip() for part in text.partition("="))
        if not (name and equals and label):
            refuse(SELECT, list(texts), 'name a dimension and one of its labels, for example ["member=0"]')
        if name in selection:
            refuse(SELECT, list(texts), f"{name!r} occurs twice; remove one of them")
        selection[name] = label
    return selection


def check_selection(selection: Mapping[str, str], dims: Mapping[str, int], path: str) -> None:
    """Raise ConfigError for a selected dimension that is not in `dims` (name -> size)."""
    for name in selection:
        if name not in dims:
            choice = ", ".join(dims) or "none"
            refuse(SELECT, name, f"{path!r} has no such dimension to select from; it has: {choice}")


def check_region(key: str, region: Sequence[float]) -> None:
    """Raise ConfigError unless `region` is empty or (north, west, south, east) in degrees."""
    if not region:
        return
    if len(region) != 4:
        refuse(key, list(region), "four numbers expected: north, west, south, east, in degrees")
    north, west, south, east = region
    if not -90 <= south < north <= 90:
        refuse(key, list(region), "north has to be above south, both from -90 to 90")
    if not (-360 <= west <= 360 and -360 <= east <= 360) or west == east:
        refuse(key, list(region), "west and east have to be two longitudes from -360 to 360")


def parse_storage_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return {"anon": True} for ["anon=true"]; secrets are text. Raises ConfigError, which contains none."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            reason = 'write an option of the store and its value, for example ["anon=true"]'
            refuse(STORAGE_OPTIONS, [name] if equals else "...", reason)
        if name in options:
            refuse(STORAGE_OPTIONS, name, "occurs twice; remove one of them")
        if value.strip("\"'") == "***":
            refuse(STORAGE_OPTIONS, f"{name}=***", f"secrets are not saved; give it again, or in {INSTEAD}")
        if re.fullmatch(SECRET_NAME, name, re.IGNORECASE):
            options[name] = value.strip("\"'")
            continue
        if value[0] in "{[":  # it would be saved with any secret inside
            refuse(STORAGE_OPTIONS, name, f"one value expected; give nested ones in {INSTEAD}")
        try:
            parsed = tomli.loads(f"value = {value}")["value"]
        except ValueError:
            parsed = value
        options[name] = parsed if isinstance(parsed, bool | int | float | str) else value
    return options


def check_data(data: Data) -> None:
    """Raise ConfigError for settings of [data] that cannot work with any data."""
    if not data.path:
        refuse("data.path", "", 'name a file, folder, glob or URL, or "simulated"')
    if not data.variables:
        example = '["geopotential:500", "2m_temperature"]'
        refuse("data.variables", [], f"name what is predicted, for example {example}")
    names = Channels.of(data).variables
    if data.forcings_of_target and not data.forcing_variables:
        refuse("data.forcings_of_target", True, "name data.forcing_variables, or set it to false")
    parse_selection(data.select)
    parse_storage_options(data.storage_options)
    for key in ("static_variables", "forcings"):
        listed = list(getattr(data, key))
        if twice := [name for name in listed if listed.count(name) > 1]:
            refuse(f"data.{key}", listed, f"{twice[0]!r} is listed twice; name it once")
    for name in data.static_variables:
        if name in names:
            refuse("data.static_variables", name, "is among the other variables, too; remove one of them")
    check_region("data.region", data.region)
    periods = {
        f"data.{name}_period": getattr(data, f"{name}_period") for name in ("train", "validation", "test")
    }
    # A date in two periods would be trained on and scored.
    spans = [(key, span) for key, period in periods.items() if (span := parse_period(key, period))]
    for (one, (begin, end)), (other, (first, last)) in combinations(spans, 2):
        if begin <= last and first <= end:
            why = f"overlaps {one} = {list(periods[one])}; move one of them"
            refuse(other, list(periods[other]), f"{why} (a last date without an hour includes that day)")
    if bool(data.grid_shape[0]) != bool(data.grid_shape[1]):
        reason = "give both numbers, or [0, 0] for the grid of the data"
        refuse("data.grid_shape", list(data.grid_shape), reason)
