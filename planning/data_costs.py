"""From nothing to training on ERA5: bytes, requests, times and dollars, from planning/data_inputs.toml.

.venv/bin/python -m planning.data_costs                          # a row for each of four data sets
.venv/bin/python -m planning.data_costs --inputs my_prices.toml  # keys that it has instead of ours
"""

import math
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import own_options, split_options, text_table
from errors import ConfigError, one_line_errors

INPUTS = Path(__file__).with_name("data_inputs.toml")
OPTIONS = own_options(inputs="")
FLOAT32 = 4
LEGEND = """\
read: {ratio} of the decoded bytes, as stored; egress: what that costs the owner of the bucket, and no reader
of gs://weatherbench2; kept: the fields that a run uses, stored alike, and what that costs in a bucket"""


@dataclass(frozen=True)
class DataSet:
    """Some dates of a store, and what stays of them."""

    grid: tuple[int, int]
    arrays: int
    upper: int
    levels: int
    dates: int
    chunk_dates: int
    kept: int
    kept_grid: tuple[int, int] = (0, 0)

    @property
    def decoded(self) -> int:
        """Bytes of all levels: they lie in one chunk, and are read together."""
        return bytes_of(self.grid, self.upper * self.levels + self.arrays - self.upper, self.dates)

    @property
    def kept_bytes(self) -> int:
        return bytes_of(self.kept_grid if any(self.kept_grid) else self.grid, self.kept, self.dates)

    @property
    def requests(self) -> int:
        """One an array and chunk."""
        return self.arrays * math.ceil(self.dates / self.chunk_dates)


def bytes_of(grid: Sequence[int], fields: int, dates: int) -> int:
    """As float32."""
    return FLOAT32 * math.prod(grid) * fields * dates


def load_inputs(path: str = "") -> dict[str, Any]:
    """Those of the project, and over them, key by key, those of a file. ConfigError: it is none, or has keys
    that mean nothing.
    """
    inputs = tomllib.loads(INPUTS.read_text())
    if not path:
        return inputs
    try:
        own = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--inputs {path}: {error}; give a file like {INPUTS.name}") from None
    for section, keys in own.items():
        known = inputs.get(section, {})
        if not isinstance(keys, dict) or not known:
            raise ConfigError(f"--inputs {path}: {section}: no such section; there are {', '.join(inputs)}")
        for key, value in keys.items():
            _check(f"--inputs {path}: {section}.{key}", section, key, value, known)
        inputs[section] = known | keys
    return inputs


def _check(where: str, section: str, key: str, value: Any, known: Mapping[str, Any]) -> None:
    if section == "data":
        try:
            DataSet(**value)
        except TypeError as error:
            raise ConfigError(
                f"{where}: {str(error).partition(' ')[2]}; give the keys of the others"
            ) from None
    elif section != "rates" and key not in known:
        raise ConfigError(f"{where}: no such key; there are {', '.join(known)}")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{where} = {value!r}: give a positive number")


def table(inputs: Mapping[str, Any]) -> str:
    """A row a data set."""
    rates, prices, ratio = inputs["rates"], inputs["prices"], inputs["reading"]["compression"]
    heads = ["data", "decoded", "read", "requests", *rates, "egress $", "kept", "$ a month"]
    rows: list[list[object]] = [heads]
    for name, keys in inputs["data"].items():
        data = DataSet(**keys)
        read, kept = ratio * data.decoded, ratio * data.kept_bytes
        dollars = prices["egress"] * read / 1e9 + prices["requests"] * data.requests
        times = [shown_time(read / rate) for rate in rates.values()]
        row = [name, shown_size(data.decoded), shown_size(read), f"{data.requests:,}", *times]
        rows.append([*row, f"{dollars:,.2f}", shown_size(kept), f"{prices['month'] * kept / 1e9:,.2f}"])
    columns = " ".join(["<38", ">10", ">10", ">10", *[">12"] * len(rates), ">11", ">10", ">10"])
    return f"{text_table(columns, rows)}\n\n{LEGEND.format(ratio=ratio)}"


def shown_size(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale or unit == "MB":
            return f"{size / scale:,.1f} {unit}"
    raise AssertionError


def shown_time(seconds: float) -> str:
    for unit, scale in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * scale:
            return f"{seconds / scale:,.1f} {unit}"
    return f"{seconds:,.1f} s"


def main() -> None:
    with one_line_errors():
        options, rest = split_options(sys.argv[1:], OPTIONS)
        if {"--help", "-h"} & set(rest):
            print(__doc__)
            return
        if rest:
            raise ConfigError(f"{rest[0]}: not an option; there is --inputs FILE")
        print(table(load_inputs(options.inputs)))


if __name__ == "__main__":
    main()
