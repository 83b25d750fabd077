"""Partial results of each rank in files of a folder, from which a long computation continues after a kill.

Each attempt writes only its own results, to its own files: 1.0.npz and 1.1.npz of the first attempt with two
ranks, then 2.0.npz.
"""

import logging
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jobs.durable_files import replacing

logger = logging.getLogger("rossby")
SAVE_SECONDS = 60.0  # between two files
MOST_TIME = 0.05  # largest fraction of the time that is spent on files


class SavedParts:
    """Files of one computation. Rank 0 calls `read` first and sends its `attempt` to the other ranks."""

    def __init__(self, folder: Path, rank: int) -> None:
        """folder: of this computation alone, inside the folder of all of them."""
        self.folder, self.rank, self.attempt = folder, rank, 1
        self.saved_at, self.interval = time.monotonic(), SAVE_SECONDS

    def read(self) -> list[dict[str, Any]]:
        """Return the arrays of earlier attempts; those of a damaged file are left out, and counted again."""
        paths = sorted(self.folder.glob("*.npz"))
        self.attempt = 1 + max((int(path.name.split(".")[0]) for path in paths), default=0)
        return [arrays for path in paths if (arrays := read_arrays(path))]

    def write_if_due(self, arrays_so_far: Callable[[], dict[str, Any]]) -> None:
        """Write the arrays, every minute and in a twentieth of the time; a full disk is only logged."""
        started = time.monotonic()
        if started - self.saved_at < self.interval:
            return
        path = self.folder / f"{self.attempt}.{self.rank}.npz"
        try:
            with replacing(path) as partial:
                np.savez(partial, **arrays_so_far())
        except OSError as error:
            logger.warning(f"{path}: not written ({error}): a kill now loses the results so far")
        self.saved_at = time.monotonic()
        self.interval = max(SAVE_SECONDS, (self.saved_at - started) / MOST_TIME)

    def remove(self) -> None:
        """Remove the files, also those of computations that were never completed."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)


def read_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays of a file, {} if it is damaged."""
    try:
        with np.load(path) as stored:
            return {name: stored[name] for name in stored}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
