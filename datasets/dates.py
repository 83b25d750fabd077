"""Helpers for series of dates (T,) datetime64[s] and for indices into them."""

from collections.abc import Sequence

import numpy as np

from datasets.options import parse_period
from errors import DataError


def is_inside(times: np.ndarray, key: str, period: Sequence[str]) -> np.ndarray:
    """Return which dates (T,) bool are in a period, all of them without one. Raises ConfigError."""
    span = parse_period(key, period)
    if not span:
        return np.ones(len(times), bool)
    first, last = (np.datetime64(end, "s") for end in span)
    return (times >= first) & (times <= last)


def consecutive(indices: np.ndarray) -> list[np.ndarray]:
    """Return the stretches of indices (n,) that follow one another without a gap."""
    return np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1)


def usual_hours(times: np.ndarray) -> float:
    """Return the most common interval between dates. Raises DataError for a single date."""
    if len(times) < 2:
        raise DataError("it has one date: nothing to train on")
    steps, counts = np.unique(np.diff(times), return_counts=True)
    return float(steps[counts.argmax()] / np.timedelta64(1, "h"))


def find_gaps(times: np.ndarray) -> np.ndarray:
    """Return the dates that the usual interval would have between the first and the last."""
    step = np.timedelta64(round(usual_hours(times) * 3600), "s")
    wide = np.flatnonzero(np.diff(times) > step)
    return np.concatenate([times[:0], *(np.arange(times[i] + step, times[i + 1], step) for i in wide)])


def evenly_spaced(items: np.ndarray, limit: int) -> np.ndarray:
    """Return at most `limit` of the items (0: all), from the first to the last."""
    if not limit or len(items) <= limit:
        return items
    return items[np.linspace(0, len(items) - 1, limit).round().astype(int)]
