"""What adds up over the dates of a period: the moments of variables, and what in them is no weather.

Every date's share is the same number whoever reads it, and shares are added in float64: so the sums of any
number of ranks, threads or attempts agree to its rounding. Shapes: V variables, H latitudes, W longitudes,
n dates.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from datasets.plausibility import Findings, refuse_fill, unlikely

ROUNDING = 1e-7  # of float32: what varies less is one number


class Share(NamedTuple):
    """Of one variable at one date: weight, first and second moment around the shift, the cells without a
    value, and what is unlikely in it.
    """

    moments: np.ndarray  # (3,)
    missing: int
    unlikely: dict[str, int]


@dataclass
class Sums:
    """Over the dates `looked` at; a date on which a variable has no value at all counts in none of them."""

    variables: list[str]
    # (V,) what squares are taken around: 5e4 m2 s-2 squared would eat seven of the sixteen digits.
    shift: np.ndarray
    total: np.ndarray  # (V, H, W) float64, of values
    count: np.ndarray  # (V, H, W) or, while no cell is missing, (V, 1, 1)
    # a row for each date, in the order in which they were read
    looked: list[np.datetime64] = field(default_factory=list)
    missing: list[np.ndarray] = field(default_factory=list)  # (V,) cells without a value
    state: list[np.ndarray] = field(default_factory=list)  # (V, 3) moments
    change: list[np.ndarray] = field(default_factory=list)  # (V, 3), over a model step
    found: Findings = field(default_factory=dict)

    @classmethod
    def around(cls, variables: Sequence[str], shift: np.ndarray, shape: tuple[int, int]) -> Self:
        """Over no date yet; shift (V,) is near the means, shape (H, W)."""
        num = len(variables)
        return cls(list(variables), shift, np.zeros((num, *shape)), np.zeros((num, 1, 1), np.int64))

    def add(self, date: np.datetime64, now: np.ndarray, before: np.ndarray | None, rows: np.ndarray) -> None:
        """Fields (V, H, W) of a date, and those of a model step earlier where they are there; rows (H,)."""
        shares = shares_of(date, self.variables, now, self.shift, rows)
        missing = np.array([one.missing for one in shares])
        empty = (missing == now[0].size).any()
        changed = np.zeros((len(now), 3))
        if before is not None and not empty:
            changed = np.array(list(_pool().map(moments_of_change, now, before, [rows] * len(now))))
        self.looked.append(date)
        self.missing.append(missing)
        self.state.append(np.array([one.moments for one in shares]) * (not empty))
        self.change.append(changed)
        for name, one in zip(self.variables, shares, strict=True):
            self.find({(name, what): (n, date) for what, n in one.unlikely.items()})
        if not empty:
            self.count = self.count + (np.isfinite(now) if missing.any() else 1)
            list(_pool().map(_add_valid, self.total, now))

    def find(self, found: Findings) -> None:
        """Adds what was found elsewhere."""
        for key, (count, date) in found.items():
            before, first = self.found.get(key, (0, date))
            self.found[key] = before + count, min(first, date)

    def merge(self, other: Self) -> None:
        """Adds those over other dates."""
        self.total, self.count = self.total + other.total, self.count + other.count
        self.with_rows({name: getattr(other, name) for name in TABLES}).find(other.found)

    def with_rows(self, tables: Mapping[str, Iterable[Any]]) -> Self:
        """These sums, with the rows of other dates; their fields are another's affair."""
        for name in TABLES:
            getattr(self, name).extend(tables[name])
        return self

    def table(self, name: str) -> np.ndarray:
        """Rows of all dates, in their order."""
        order = np.argsort(np.array(self.looked, "datetime64[s]"))
        return np.array(getattr(self, name))[order]

    @property
    def empty_dates(self) -> np.ndarray:
        """Those on which a variable has no value at all."""
        return self.table("looked")[(self.table("missing") == self.total[0].size).any(axis=1)]

    def moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(V,) each: mean, standard deviation, and that of the change over a model step."""
        mean, std = _mean_and_std(self.table("state").sum(axis=0))
        return self.shift + mean, std, _mean_and_std(self.table("change").sum(axis=0))[1]

    def constant(self) -> np.ndarray:
        """(V,) bool: which are one number everywhere."""
        weight, first, second = self.table("state").sum(axis=0).T
        return second / weight - (first / weight) ** 2 <= (ROUNDING * self.shift) ** 2

    def mean_field(self) -> np.ndarray:
        """(V, H, W) float32: the mean over the dates, the variable's where a cell never has a value."""
        mean = self.moments()[0][:, None, None]
        with np.errstate(invalid="ignore"):
            return np.where(self.count > 0, self.total / self.count, mean).astype(np.float32)

    def arrays(self) -> dict[str, np.ndarray]:
        """As numbers for a file, without pickles."""
        found = [[*key, n, str(date)] for key, (n, date) in self.found.items()]
        tables = {name: np.array(getattr(self, name)) for name in TABLES}
        texts = {"variables": np.array(json.dumps(self.variables)), "found": np.array(json.dumps(found))}
        return {"shift": self.shift, "total": self.total, "count": self.count} | tables | texts

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Self:
        """The inverse. KeyError, ValueError: they are something else's."""
        found = json.loads(str(arrays["found"]))
        tables = {name: list(arrays[name]) for name in TABLES}
        fields: dict[str, Any] = {name: arrays[name] for name in ("shift", "total", "count")}
        findings = {(name, what): (n, np.datetime64(date)) for name, what, n, date in found}
        return cls(json.loads(str(arrays["variables"])), **fields, found=findings).with_rows(tables)


TABLES = ("looked", "missing", "state", "change")


def shares_of(
    date: np.datetime64, variables: Sequence[str], fields: np.ndarray, shift: np.ndarray, rows: np.ndarray
) -> list[Share]:
    """Of all variables at a date, fields (V, H, W). DataError: a fill value that nobody declared."""
    num = len(variables)
    return list(_pool().map(share, [date] * num, variables, fields, shift, [rows] * num))


def share(date: np.datetime64, name: str, values: np.ndarray, shift: float, rows: np.ndarray) -> Share:
    """Of a variable's field (H, W), weights of its rows (H,). DataError: a fill value nobody declared."""
    valid = np.isfinite(values)
    whole = bool(valid.all())
    finite = values if whole else values[valid]
    refuse_fill(finite, name, date)
    anomaly = np.subtract(values, shift, dtype=np.float64)
    if not whole:
        anomaly[~valid] = 0
    moments = _weighted(anomaly, None if whole else valid, rows)
    return Share(moments, valid.size - finite.size, unlikely(values, finite, name))


def moments_of_change(now: np.ndarray, before: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(3,): weight, first and second moment of the change between two fields (H, W)."""
    change = np.subtract(now, before, dtype=np.float64)
    valid = np.isfinite(change)
    if valid.all():
        return _weighted(change, None, rows)
    change[~valid] = 0
    return _weighted(change, valid, rows)


def _weighted(values: np.ndarray, valid: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    count = np.full(len(rows), values.shape[1]) if valid is None else valid.sum(axis=1)
    by_row = count, values.sum(axis=1), np.einsum("hw,hw->h", values, values)
    return np.array([float(rows @ sums) for sums in by_row])


def _add_valid(total: np.ndarray, values: np.ndarray) -> None:
    np.add(total, values, out=total, where=np.isfinite(values))


def _mean_and_std(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """From (V, 3); 1 for the deviation of what does not vary."""
    weight, first, second = sums.T
    mean = first / weight
    variance = np.maximum(second / weight - mean**2, 0)
    return mean, np.where(variance > 0, np.sqrt(variance), 1.0)


_POOLS: list[ThreadPoolExecutor] = []


def _pool() -> ThreadPoolExecutor:
    """As many threads as this rank has of the machine's cores; numpy works without the GIL."""
    if not _POOLS:
        _POOLS.append(ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="statistics"))
    return _POOLS[0]
