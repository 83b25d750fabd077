"""The samples of a run: dates of its periods, and the statistics of the one it trains on."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from archives.archive import Archive
from archives.grid import area_weights
from config import Data
from datasets.field_dataset import FieldDataset
from datasets.memory_archive import cache_if_small
from datasets.selection import Selection
from datasets.shared_dataset import SharedDataset
from datasets.statistics import Numbers, Source, known_empty_dates, sampled_pairs
from datasets.store_advice import conversion_advice
from parallelisms.mesh import from_first_rank
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
        same_samples: dist.ProcessGroup | None = None,
    ) -> None:
        """folder: the run's, which keeps the statistics; trained: those that its checkpoints were made with.
        same_samples: the ranks that read the same samples as this one.

        DataError: the training dates are not those any more.
        """
        self.selection, variables, self.same_samples = selection, selection.variables, same_samples
        dates = np.union1d(selection.train, selection.validation)
        self.archive = cache_if_small(selection.archive, variables, dates, data.cache_gib)
        if self.archive is selection.archive:
            self._advise(dates)
        self.area = area_weights(selection.archive.grid.latitude)  # (H,)
        source = Source(self.archive, variables, selection.train, selection.step, self.area)
        source = replace(source, dates=sampled_pairs(source, data.statistics_dates))
        self.statistics = load_or_count([folder / "statistics.npz"], source, trained)
        self.empty = {
            "train": self.statistics.empty_in(self.archive.times),
            "validation": from_first_rank(
                lambda: known_empty_dates(self.archive, variables, selection.validation)
            ),
        }

    def _advise(self, dates: np.ndarray) -> None:
        """On rank 0, for fields that are read from files at every step."""
        archive, variables = self.selection.archive, self.selection.variables
        line = from_first_rank(lambda: conversion_advice(archive, variables, dates))
        if line:
            logger.info(line)

    def dataset(self, period: str, later: Sequence[int]) -> FieldDataset:
        """Samples of a window and the dates t + later x step in a period."""
        chosen = self.selection.samples(period, later, self.empty[period])
        logger.info(self.selection.describe(period, chosen, self.empty[period]))
        return self._shared(chosen)

    def dataset_a_lead(
        self, period: str, leads: Sequence[int], limit: int = 0, history: int = 1
    ) -> FieldDataset:
        """Samples of a window of `history` states and what follows after each lead, NaN where that is not
        there. With a limit every rank may read other ones.
        """
        chosen = self.selection.samples_a_lead(period, leads, self.empty[period], limit, history)
        if limit:
            return FieldDataset(self.archive, self.selection.variables, chosen)
        logger.info(self.selection.describe(period, chosen, self.empty[period]))
        return self._shared(chosen)

    def _shared(self, chosen: np.ndarray) -> FieldDataset:
        """Of samples that the ranks of this one's group need together: read by all of them, where that saves
        anything.
        """
        archive, variables = self.archive, self.selection.variables
        if isinstance(archive, Archive) and self.same_samples and archive.by_threads(variables):
            return SharedDataset(archive, variables, chosen, self.same_samples)
        return FieldDataset(archive, variables, chosen)
