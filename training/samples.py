"""Samples of a run: the dates of its periods, and the statistics of the training period."""

import logging
from collections.abc import Sequence
from pathlib import Path

from datasets.field_dataset import FieldDataset
from datasets.grid import area_weights
from datasets.selection import Selection
from datasets.statistics import Numbers, load_statistics
from parallelisms.mesh import from_first_rank

logger = logging.getLogger("rossby")


class Samples:
    """Samples of all periods of a training store, created by all ranks together."""

    def __init__(self, selection: Selection, folder: Path, trained: Numbers | None = None) -> None:
        """folder: the run's, for the statistics file; trained: the statistics of its checkpoints.

        Raises DataError if the training dates have changed.
        """
        self.selection = selection
        self.area = area_weights(selection.archive.grid.latitude)  # (H,)
        about = (selection.archive, selection.variables, selection.train, selection.step, trained)
        self.statistics = from_first_rank(lambda: load_statistics(folder / "statistics.npz", *about))

    def dataset(self, period: str, later: Sequence[int]) -> FieldDataset:
        """Return samples of a window and the dates t + later x step in a period."""
        chosen = self.selection.samples(period, later)
        logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.selection.archive, self.selection.variables, chosen, self.selection.history)

    def dataset_by_lead(
        self, period: str, leads: Sequence[int], limit: int = 0, history: int = 1
    ) -> FieldDataset:
        """Return samples of a window of `history` states and the state at each lead, NaN where it is missing.
        With a limit, ranks may read different samples.
        """
        chosen = self.selection.samples_by_lead(period, leads, limit, history)
        if not limit:
            logger.info(self.selection.describe(period, chosen))
        return FieldDataset(self.selection.archive, self.selection.variables, chosen, history)
