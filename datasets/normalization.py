"""Statistics of the training period, and the passage between physical and normalised fields.

Shapes: B batch, V variables, H latitudes, W longitudes, n dates.
"""

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from errors import DataError

logger = logging.getLogger(__name__)
BLOCK_BYTES = 2**28  # of fields read at once while streaming


class Fields(Protocol):
    """What can be read by date: an archive, or its dates held in memory."""

    times: np.ndarray

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Statistics:
    """Area-weighted moments of each variable over the training period, in its own units."""

    mean: np.ndarray  # (V,)
    std: np.ndarray  # (V,)
    change_std: np.ndarray  # (V,) standard deviation of the change over one model step
    mean_field: np.ndarray  # (V, H, W) float32: the climatology of the training period
    empty_dates: np.ndarray  # indices of dates on which a variable has no value at all
    fingerprint: str  # of what all this was computed from


def load_or_compute(
    cache: Path,
    archive: Fields,
    variables: list[str],
    dates: np.ndarray,
    step: np.timedelta64,
    weights: np.ndarray,
) -> Statistics:
    """Statistics over the dates `dates` of `archive`, read from `cache` if they are of the same data."""
    fingerprint = _fingerprint(archive, variables, dates, step)
    if cache.exists():
        with np.load(cache) as stored:
            if str(stored["fingerprint"]) == fingerprint:
                arrays = {name: stored[name] for name in stored.files if name != "fingerprint"}
                return Statistics(**arrays, fingerprint=fingerprint)
    statistics = compute(archive, variables, dates, step, weights, fingerprint)
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, **asdict(statistics))
    return statistics


def _fingerprint(archive: Fields, variables: list[str], dates: np.ndarray, step: np.timedelta64) -> str:
    """Of names, dates and the values of the first and last field: other data cannot pass for these."""
    digest = hashlib.sha256(repr((variables, int(step.astype(int)))).encode())
    digest.update(archive.times[dates].astype("datetime64[s]").tobytes())
    for i in (dates[0], dates[-1]):
        digest.update(archive.read_block(int(i), int(i) + 1, variables).tobytes())
    return digest.hexdigest()


def compute(
    archive: Fields,
    variables: list[str],
    dates: np.ndarray,
    step: np.timedelta64,
    weights: np.ndarray,
    fingerprint: str = "",
) -> Statistics:
    """One pass over the dates; weights (H,) are area weights; missing cells count in no moment."""
    state, change, empty = _Moments(weights), _Moments(weights), []
    recent: OrderedDict[np.datetime64, np.ndarray] = OrderedDict()  # fields of the last model step
    total = count = np.zeros(0)
    for i, field in stream(archive, variables, dates):
        valid = np.isfinite(field)  # (V, H, W)
        if not valid.any(axis=(1, 2)).all():
            empty.append(i)
            continue
        now = archive.times[i]
        state.add(field, valid)
        if (before := recent.get(now - step)) is not None:
            change.add(field - before, valid & np.isfinite(before))
        if not total.size:
            total, count = np.zeros(field.shape), np.zeros(field.shape)
        total += np.where(valid, field, 0)
        count += valid
        recent[now] = field
        while next(iter(recent)) <= now - step:
            recent.popitem(last=False)
    if not total.size:
        raise DataError(f"data.variables = {variables}: no training date has values for all of them")
    mean, std = state.mean_and_std()
    with np.errstate(invalid="ignore"):
        mean_field = np.where(count > 0, total / count, mean[:, None, None]).astype(np.float32)
    change_std = change.mean_and_std()[1] if change.weight.size else std
    return Statistics(mean, std, change_std, mean_field, np.asarray(empty, int), fingerprint)


def stream(archive: Fields, variables: Sequence[str], dates: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(index, field (V, H, W)) for each of the ascending dates, read in runs of neighbours."""
    first = archive.read_block(int(dates[0]), int(dates[0]) + 1, variables)
    longest = max(1, BLOCK_BYTES // first.nbytes)
    for run in np.split(dates, np.flatnonzero(np.diff(dates) != 1) + 1):
        for part in np.split(run, range(longest, len(run), longest)):
            block = archive.read_block(int(part[0]), int(part[-1]) + 1, variables)
            yield from zip(part.tolist(), block, strict=True)


def known_empty_dates(archive: Fields, variables: Sequence[str], dates: np.ndarray) -> np.ndarray:
    """Indices of the dates on which one of the variables has no value at all, as far as looking is cheap.

    Only fields in memory are looked at. Elsewhere such a date costs its reading: masks keep it out of the
    scores.
    """
    if not (getattr(archive, "in_memory", False) and len(dates)):
        return np.zeros(0, int)
    found = [
        i for i, field in stream(archive, variables, dates) if not np.isfinite(field).any(axis=(1, 2)).all()
    ]
    return np.asarray(found, int)


class _Moments:
    """Area-weighted mean and standard deviation a variable, in float64, around the first field's mean."""

    def __init__(self, weights: np.ndarray) -> None:
        self.row_weights = weights[:, None]  # (H, 1)
        self.weight = self.shift = self.first = self.second = np.zeros(0)

    def add(self, field: np.ndarray, valid: np.ndarray) -> None:
        if not self.shift.size:
            self.shift = np.where(valid, field, 0).astype(np.float64).sum(axis=(1, 2))
            self.shift /= np.maximum(valid.sum(axis=(1, 2)), 1)
            self.weight, self.first, self.second = np.zeros((3, len(field)))
        # Squares around a value near the mean: 5e4 m2 s-2 squared would eat seven of the sixteen digits.
        anomaly = np.where(valid, field - self.shift[:, None, None], 0)
        area = valid * self.row_weights  # (V, H, W)
        self.weight += area.sum(axis=(1, 2))
        self.first += (area * anomaly).sum(axis=(1, 2))
        self.second += (area * anomaly**2).sum(axis=(1, 2))

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        mean = self.first / self.weight
        variance = np.maximum(self.second / self.weight - mean**2, 0)
        return self.shift + mean, np.where(variance > 0, np.sqrt(variance), 1.0)


class Normalizer(nn.Module):
    """Physical fields to normalised ones and back, and one step of the model from its output.

    Lives on the device: the loader moves fields as they are stored.
    """

    mean: Tensor
    std: Tensor
    change_scale: Tensor

    def __init__(self, statistics: Statistics, predict: str) -> None:
        super().__init__()
        self.predict = predict
        column = {"mean": statistics.mean, "std": statistics.std}
        column["change_scale"] = statistics.change_std / statistics.std
        for name, values in column.items():
            self.register_buffer(
                name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False
            )

    def normalize(self, fields: Tensor) -> tuple[Tensor, Tensor]:
        """fields (..., V, H, W) -> normalised fields with 0 where a value is missing, and a mask of values
        (bool).
        """
        mask = torch.isfinite(fields)
        return torch.where(mask, (fields - self.mean) / self.std, 0.0), mask

    def denormalize(self, fields: Tensor) -> Tensor:
        """(..., V, H, W) normalised -> physical units."""
        return fields * self.std + self.mean

    def advance(self, state: Tensor, output: Tensor) -> Tensor:
        """The next normalised state (B, V, H, W) from this one and the model's output, in float32."""
        output = output.float()
        return output if self.predict == "state" else state + self.change_scale * output

    def expected_output(self, state: Tensor, target: Tensor) -> Tensor:
        """The output that would take `state` to `target` (B, V, H, W): the inverse of `advance`."""
        return target if self.predict == "state" else (target - state) / self.change_scale

    @property
    def output_scale(self) -> Tensor:
        """(V, 1, 1): by how much the next state changes with the output."""
        return torch.ones_like(self.change_scale) if self.predict == "state" else self.change_scale
