"""Random fields of the configured variables, a pure function of (date, variable), without a file.

`data.path = "random"` trains any configuration for profiling, for a rehearsal and in tests on a GPU.
"""

from functools import cache
from zlib import crc32

import numpy as np

from config import RANDOM, Data
from datasets.archive import TrainingStore
from datasets.channels import Channels
from datasets.grid import Grid, global_grid
from datasets.options import parse_period
from datasets.variables import units, usual_range
from errors import refuse

DEVIATIONS = 12  # in the usual range of a variable
ONE_YEAR = np.timedelta64(365, "D")


class RandomFields(TrainingStore):
    """Normally distributed noise in a variable's usual range, another one for each date, every `step_hours`.

    Dates are those between the first and the last of all periods; without a training period, those of the
    year before, too. A field is the noise of its variable, turned by a number of columns that depends on the
    date: drawing a new one would take as long as a step. Moments are given by their formulas.
    """

    def __init__(self, data: Data) -> None:
        """Raises ConfigError without data.grid_shape."""
        rows, columns = data.grid_shape
        if rows < 2 or columns < 2:
            refuse("data.grid_shape", [rows, columns], 'with data.path = "random" name the rows and columns')
        self.grid = global_grid((rows, columns), poles=rows % 2 == 1)
        if data.region:
            north, west, south, east = data.region
            width = (east - west) % 360 or 360
            longitude = west + np.linspace(0, width, columns, endpoint=width < 360)
            self.grid = Grid(np.linspace(north, south, rows), longitude)
        self.path, self.unreadable, self.selection, self.extra_dimensions = RANDOM, {}, {}, {}
        self.variables = self.names = Channels.of(data).variables
        self.static_variables = list(data.static_variables)
        periods = ("train_period", "validation_period", "test_period")
        spans = [parse_period(f"data.{name}", getattr(data, name)) for name in periods]
        ends = [np.datetime64(end, "s") for span in spans if span for end in span]
        ends = ends or [np.datetime64("2002-01-01", "s")]
        first = min(ends) if data.train_period else min(ends) - ONE_YEAR
        self.change_step = np.timedelta64(3600 * data.step_hours, "s")
        self.times = np.arange(first, max(ends) + np.timedelta64(1, "s"), self.change_step)
        self.shifts = {name: self.scale(name)[0] for name in self.variables}
        self._noise = cache(self._draw_noise)

    def find(self, name: str) -> list:
        """Return no place: nothing is in a file."""
        return []

    def units(self, name: str) -> str:
        return units(name)

    def check(self, variables, every_date: bool = False) -> None:
        """There is nothing to check."""

    def has(self, variables) -> np.ndarray:
        return np.ones(len(self.times), bool)

    def scale(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of a variable, 0 and 1 where its usual range is not known."""
        low, high = usual_range(name)
        if not np.isfinite([low, high]).all():
            return 0.0, 1.0
        return (low + high) / 2, (high - low) / DEVIATIONS

    def _draw_noise(self, name: str) -> np.ndarray:
        rng, (mean, std) = np.random.default_rng(crc32(name.encode())), self.scale(name)
        noise = rng.standard_normal(self.grid.shape, np.float32).clip(-DEVIATIONS / 2, DEVIATIONS / 2)
        return np.float32(mean) + np.float32(std) * noise

    def fill(self, date: int, variables, out: np.ndarray) -> None:
        """Fill `out` (V, H, W) float32 with the fields at times[date]."""
        for name, field in zip(variables, out, strict=True):
            text = f"{name} {self.times[date]}"
            turn = 1 + crc32(text.encode()) % (self.grid.shape[1] - 1)
            noise = self._noise(name)
            field[:, :turn], field[:, turn:] = noise[:, -turn:], noise[:, :-turn]

    def float16_packing(self, variables) -> None:
        """Return None: the fields are float32."""

    def read_static(self, name: str) -> np.ndarray:
        """Return a constant field (H, W) float32; 0 and 1 for the land-sea mask."""
        noise = self._noise(name)
        return (noise > noise.mean()).astype(np.float32) if name == "land_sea_mask" else noise

    def rows(self, variables) -> np.ndarray:
        cells = float(self.grid.shape[0] * self.grid.shape[1])
        rows = np.zeros((1, len(variables), 9))
        for v, name in enumerate(variables):
            variance = self.scale(name)[1] ** 2
            rows[0, v] = [0, 0, 0, cells, 0, cells * variance, cells, 0, 2 * cells * variance]
        return np.broadcast_to(rows, (len(self.times), *rows.shape[1:]))
