"""The samples of a run: dates of its periods, and the statistics of the one it trains on."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from config import Data
from datasets.field_dataset import FieldDataset, cache_if_small
from datasets.grid import area_weights
from datasets.selection import Selection
from datasets.statistics import Numbers, Source, sampled_pairs
from training.shared_statistics import load_or_count

logger = logging.getLogger("rossby")


class Samples:
    """Made by all ranks together. Fields are kept in memory where they take at most `data.cache_gib`."""

    def __init__(
        self,
        selection: Selection,
        data: Data,
        folder: Path,
        trained: Numbers | None = None,
    ) -> None:
        """folder: the run's, which keeps the statistics; trained: those that its checkpoints were made with.

        DataError: the training dates are not those any more.
        """
        self.selection, variables = selection, selection.variables
        dates = np.union1d(selection.train, selection.validation)
        self.archive = cache_if_small(selection.archive, variables, dates, data.cache_gib)
        self.area = area_weights(selection.archive.grid.latitude)  # (H,)
        source = Source(self.archive, variables, selection.train, selection.step, self.area)
        source = replace(source, dates=sampled_pairs(source, data.statistics_dates))
        self.statistics = load_or_count(folder / "statistics.npz", source, trained)

    def dataset(self, period: str, later: Sequence[int]) -> FieldDataset:
        """Samples of a window and the dates t + later x step in a period."""
        chosen = self.selection.samples(period, later)
        logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.archive, self.selection.variables, chosen, self.selection.history)

    def dataset_by_lead(
        self, period: str, leads: Sequence[int], limit: int = 0, history: int = 1
    ) -> FieldDataset:
        """Samples of a window of `history` states and what follows after each lead, NaN where that is not
        there. With a limit every rank may read other ones.
        """
        chosen = self.selection.samples_by_lead(period, leads, limit, history)
        if not limit:
            logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.archive, self.selection.variables, chosen, history)
