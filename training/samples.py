"""The samples of a run: dates of its periods, and the statistics of the one it trains on."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from archives.grid import area_weights
from config import Data
from datasets.loader import FieldDataset
from datasets.memory_archive import cache_if_small
from datasets.normalization import Numbers, Source, known_empty_dates, load_as_trained, load_or_compute
from datasets.selection import Selection, evenly_spaced
from parallelisms.mesh import from_first_rank

logger = logging.getLogger("rossby")


class Samples:
    """Made by all ranks together. Fields are kept in memory where they take at most `data.cache_gib`."""

    def __init__(
        self, selection: Selection, data: Data, folder: Path, trained: Numbers | None = None
    ) -> None:
        """folder: the run's, which keeps the statistics; trained: those that its checkpoints were made with.

        DataError: the training dates are not those any more.
        """
        self.selection, variables = selection, selection.variables
        dates = np.union1d(selection.train, selection.validation)
        self.archive = cache_if_small(selection.archive, variables, dates, data.cache_gib)
        self.area = area_weights(selection.archive.grid.latitude)  # (H,)
        counted = evenly_spaced(selection.train, data.statistics_dates)
        source, cache = Source(self.archive, variables, counted, selection.step, self.area), "statistics.npz"
        self.statistics = from_first_rank(
            lambda: (
                load_as_trained(folder / cache, source, trained)
                if trained
                else load_or_compute([folder / cache], source)
            )
        )
        self.empty = {
            "train": self.statistics.empty_in(self.archive.times),
            "validation": from_first_rank(
                lambda: known_empty_dates(self.archive, variables, selection.validation)
            ),
        }

    def dataset(self, period: str, offsets: Sequence[int]) -> FieldDataset:
        """Samples of the dates t + offset x step in a period."""
        chosen = self.selection.samples(period, offsets, self.empty[period])
        logger.info(self.selection.describe(period, chosen, self.empty[period]))
        return FieldDataset(self.archive, self.selection.variables, chosen)

    def dataset_a_lead(self, period: str, leads: Sequence[int], limit: int = 0) -> FieldDataset:
        """Samples of a date and what follows after each lead, NaN where that is not there."""
        chosen = self.selection.samples_a_lead(period, leads, self.empty[period], limit)
        if not limit:
            logger.info(self.selection.describe(period, chosen, self.empty[period]))
        return FieldDataset(self.archive, self.selection.variables, chosen)
