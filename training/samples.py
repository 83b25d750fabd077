"""Samples of a run: the dates of its periods, and the statistics of the training period."""

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
    """Samples of all periods, created by all ranks together; kept in memory up to `data.cache_gib`."""

    def __init__(
        self,
        selection: Selection,
        data: Data,
        folder: Path,
        trained: Numbers | None = None,
    ) -> None:
        """folder: the run's, for the statistics file; trained: the statistics of its checkpoints.

        Raises DataError if the training dates have changed.
        """
        self.selection, variables = selection, selection.variables
        dates = np.union1d(selection.train, selection.validation)
        self.archive = cache_if_small(selection.archive, variables, dates, data.cache_gib)
        self.area = area_weights(selection.archive.grid.latitude)  # (H,)
        source = Source(self.archive, variables, selection.train, selection.step, self.area)
        source = replace(source, dates=sampled_pairs(source, data.statistics_dates))
        self.statistics = load_or_count(folder / "statistics.npz", source, trained)

    def dataset(self, period: str, later: Sequence[int]) -> FieldDataset:
        """Return samples of a window and the dates t + later x step in a period."""
        chosen = self.selection.samples(period, later)
        logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.archive, self.selection.variables, chosen, self.selection.history)

    def dataset_by_lead(
        self, period: str, leads: Sequence[int], limit: int = 0, history: int = 1
    ) -> FieldDataset:
        """Return samples of a window of `history` states and the state at each lead, NaN where it is missing.
        With a limit, ranks may read different samples.
        """
        chosen = self.selection.samples_by_lead(period, leads, limit, history)
        if not limit:
            logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.archive, self.selection.variables, chosen, history)
