"""Statistics of the training period, and the passage between physical and normalised fields.

Shapes: B batch, V variables, H latitudes, W longitudes, n dates.
"""

import hashlib
import logging
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from datasets.plausibility import Plausibility
from durable_files import replacing
from errors import DataError

logger = logging.getLogger(__name__)
Numbers = dict[str, list[float]]  # mean, std, change_std -> one number a variable
ROUNDING = 1e-7  # of float32: what varies less is one number
BLOCK_BYTES = 2**28  # of fields read at once while streaming


class Fields(Protocol):
    """What can be read by date: an archive, or its dates held in memory."""

    times: np.ndarray

    def read_block(self, start: int, stop: int, variables: Sequence[str]) -> np.ndarray: ...

    def files_state(self, variables: Sequence[str]) -> bytes: ...


@dataclass(frozen=True, eq=False)
class Statistics:
    """Area-weighted moments of each variable over the training period, in its own units."""

    mean: np.ndarray  # (V,)
    std: np.ndarray  # (V,)
    change_std: np.ndarray  # (V,) standard deviation of the change over one model step
    mean_field: np.ndarray  # (V, H, W) float32: the climatology of the training period
    empty_dates: np.ndarray  # datetime64[s], those on which a variable has no value at all
    dates: np.ndarray  # (n,) datetime64[s], all that were counted
    fingerprint: str  # of what all this was computed from

    @property
    def numbers(self) -> Numbers:
        """What a model's weights were trained with: the three moments, to the last digit."""
        return {name: getattr(self, name).tolist() for name in ("mean", "std", "change_std")}

    def empty_in(self, times: np.ndarray) -> np.ndarray:
        """Indices of the dates `times` (T,) that have no value of some variable."""
        return np.flatnonzero(np.isin(times, self.empty_dates))

    def write(self, path: Path) -> None:
        with replacing(path) as beside:
            np.savez(beside, **asdict(self))


def read_statistics(path: Path) -> Statistics | None:
    """None where there are none, or the file is damaged: then it says so."""
    if not path.exists():
        return None
    try:
        with np.load(path) as stored:
            arrays = {name: stored[name] for name in stored.files if name != "fingerprint"}
            return Statistics(**arrays, fingerprint=str(stored["fingerprint"]))
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        logger.warning("%s: is damaged, or of another version (%s)", path, type(error).__name__)
        return None


class Source(NamedTuple):
    """What statistics are computed from."""

    fields: Fields
    variables: list[str]
    dates: np.ndarray  # indices into fields.times
    step: np.timedelta64  # of the model
    weights: np.ndarray  # (H,) of area


def load_or_compute(caches: Sequence[Path], source: Source) -> Statistics:
    """Statistics of a source, read from the first of `caches` that are of the same data, else computed and
    written to the last.
    """
    fingerprint = fingerprint_of(*source[:4])
    for cache in caches:
        stored = read_statistics(cache)
        if stored and stored.fingerprint == fingerprint:
            return stored
    statistics = compute(*source, fingerprint)
    statistics.write(caches[-1])
    return statistics


def load_as_trained(cache: Path, source: Source, numbers: Numbers) -> Statistics:
    """The statistics that weights were trained with, whatever dates have come since, read from `cache` where
    the files are as they were. Otherwise computed again from the same dates, and held against `numbers`.

    DataError: the fields of these dates are others now.
    """
    stored = read_statistics(cache)
    if stored and stored.numbers != numbers:
        stored = None
    times = source.fields.times
    dates = np.flatnonzero(np.isin(times, stored.dates)) if stored else source.dates
    if stored and len(dates) < len(stored.dates):
        logger.info(f"{cache}: {len(stored.dates) - len(dates)} of its dates are not in the data any more")
        return stored
    then = source._replace(dates=dates)
    fingerprint = fingerprint_of(*then[:4])
    if stored and stored.fingerprint == fingerprint:
        return stored
    again = compute(*then, fingerprint)
    if problem := _difference(source.variables, again.numbers, numbers):
        raise DataError(f"data.path: {problem}; {WAY_OUT}")
    logger.info("data.path: other files than before, with the same statistics")
    exact = {name: np.asarray(values) for name, values in numbers.items()}
    again = replace(again, **exact)
    again.write(cache)
    return again


SAME = 1e-9  # relative: of the same fields another processor adds up other last digits
WAY_OUT = (
    "take the data and the dates that the run began with, or start a new one: another job.dump_folder, with "
    "checkpoint.initial_load_path for its weights"
)


def _difference(variables: Sequence[str], now: Numbers, then: Numbers) -> str:
    """The first moment that is not what it was; "" where all are."""
    for name, values in now.items():
        for variable, ours, theirs, scale in zip(variables, values, then[name], then["std"], strict=True):
            if abs(ours - theirs) > SAME * scale:
                what = f"{name} of {variable} is {ours:.9g} here and was {theirs:.9g}"
                return f"the training dates are not those that the weights were trained on: {what}"
    return ""


SAMPLED = 16  # dates whose values stand for all where files say nothing of themselves


def fingerprint_of(fields: Fields, variables: Sequence[str], dates: np.ndarray, step: np.timedelta64) -> str:
    """Of names, dates, and of the files' names, sizes and times of change, which cost no reading.

    Through a URL nobody knows these: there it is the values of 16 dates, evenly spaced, so that a change of
    more than a fifteenth of the period is found for certain.
    """
    digest = hashlib.sha256(repr((list(variables), int(step / np.timedelta64(1, "s")))).encode())
    digest.update(fields.times[dates].astype("datetime64[s]").tobytes())
    files = fields.files_state(variables)
    digest.update(files)
    places = np.linspace(0, len(dates) - 1, SAMPLED).round().astype(int) if not files else []
    for i in dates[np.unique(places).astype(int)]:
        digest.update(fields.read_block(int(i), int(i) + 1, variables).tobytes())
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
    state, change = _Moments(weights), _Moments(weights)
    empty: list[int] = []
    recent: OrderedDict[np.datetime64, np.ndarray] = OrderedDict()  # fields of the last model step
    total = count = np.zeros(0)
    plausibility = Plausibility(variables)
    for i, field in stream(archive, variables, dates):
        valid = np.isfinite(field)  # (V, H, W)
        plausibility.look(field, valid, archive.times[i])
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
    plausibility.say()
    if not total.size:
        raise DataError(f"data.variables = {variables}: no training date has values for all of them")
    mean, std = state.mean_and_std()
    for v in np.flatnonzero(state.constant()):
        logger.warning(f"data.path: {variables[v]} is {mean[v]:g} in all cells on all dates")
    with np.errstate(invalid="ignore"):
        mean_field = np.where(count > 0, total / count, mean[:, None, None]).astype(np.float32)
    change_std = change.mean_and_std()[1] if change.weight.size else std
    times = archive.times.astype("datetime64[s]")
    return Statistics(mean, std, change_std, mean_field, times[empty], times[dates], fingerprint)


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

    def constant(self) -> np.ndarray:
        """(V,) bool: which are one number everywhere."""
        variance = self.second / self.weight - (self.first / self.weight) ** 2
        return variance <= (ROUNDING * self.shift) ** 2

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
