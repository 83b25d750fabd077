"""What an evaluation has counted so far, in files of a folder, so that one that is killed continues."""

import logging
import shutil
import time
import zipfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from torch import Tensor

from jobs.durable_files import replacing
from parallelisms.mesh import from_first_rank

logger = logging.getLogger("rossby")
SAVE_SECONDS = 60.0
MOST_TIME = 0.05  # of an evaluation, for saves


class Countable(Protocol):
    """What is counted of a forecast, on one rank."""

    table: Tensor  # (S, n, ...): columns of dates, each filled by one rank

    @property
    def sums(self) -> dict[str, Tensor]:
        """Return the sums over dates."""
        ...


class SavedTallies:
    """The files of one evaluation. Used by all ranks together, each of which writes its own."""

    def __init__(self, folder: Path, key: str) -> None:
        """folder: of all evaluations; key: of this one. What others have left is removed."""
        self.folder, self.saved_at, self.save_every = folder / key, time.monotonic(), SAVE_SECONDS
        self.done: set[int] = set()  # dates in this rank's tallies
        self.path = self.folder / "0.npz"
        if not dist.is_initialized() or dist.get_rank() == 0:
            for other in folder.glob("*"):
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)

    def load(self, tallies: Collection[Countable]) -> set[int]:
        """Add what killed attempts have counted to the tallies of rank 0; return their dates on all ranks."""

        def merge() -> tuple[set[int], str]:
            found = [(path, arrays) for path in self.folder.glob("*.npz") if (arrays := read_arrays(path))]
            for _, arrays in sorted(found, key=lambda pair: -len(pair[1]["dates"])):
                dates = arrays["dates"].tolist()
                if not self.done.isdisjoint(dates):
                    continue  # an attempt that was killed had added it to its own
                self.done |= set(dates)
                for i, tally in enumerate(tallies):
                    tally.table[:, dates] = tally.table.new_tensor(arrays[f"{i} table"])
                    for name, total in tally.sums.items():
                        total += total.new_tensor(arrays[f"{i} {name}"])
            return self.done, str(1 + max((int(path.name.split(".")[0]) for path, _ in found), default=0))

        done, attempt = from_first_rank(merge) if dist.is_initialized() else merge()
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.path = self.folder / f"{attempt}.{rank}.npz"
        if done and rank == 0:
            logger.info(f"evaluation: {len(done)} dates are scored already")
        return done

    def add(self, dates: Iterable[int], tallies: Iterable[Countable]) -> None:
        """Note that dates are counted, and write the tallies now and then; a full disk is only logged."""
        self.done |= set(dates)
        started = time.monotonic()
        if started - self.saved_at < self.save_every:
            return
        columns = sorted(self.done)
        arrays: dict[str, Any] = {"dates": np.array(columns, int)}
        for i, tally in enumerate(tallies):
            arrays[f"{i} table"] = tally.table[:, columns].cpu().numpy()
            arrays |= {f"{i} {name}": total.cpu().numpy() for name, total in tally.sums.items()}
        try:
            with replacing(self.path) as partial:
                np.savez(partial, **arrays)
        except OSError as error:
            logger.warning(
                f"{self.path}: not written ({error}): an evaluation that is killed now begins again"
            )
        self.saved_at = time.monotonic()
        self.save_every = max(SAVE_SECONDS, (self.saved_at - started) / MOST_TIME)

    def remove(self) -> None:
        """Remove the files: the evaluation is complete."""
        shutil.rmtree(self.folder, ignore_errors=True)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file, {} if it is damaged: its dates are scored again."""
    try:
        with np.load(path) as stored:
            return {name: stored[name] for name in stored}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return {}
