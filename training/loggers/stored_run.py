"""A run in a store that only appends: one id across resumes, each step once."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.durable_files import write_durably


class StoredRun:
    """The id of a run in the store and the last step there, in a file of the run's folder."""

    def __init__(
        self, path: Path, store: str, resume_step: int, written: int, create: Callable[[], str]
    ) -> None:
        """written: the last step that the start before logged; create: makes a run in the store."""
        before = json.loads(path.read_text()) if path.exists() else {}
        continues = resume_step > 0 and before.get("store") == store
        self.id: str = before["id"] if continues else create()
        self.last = max(before["last_step"], written) if continues else -1
        self.newest = self.last
        write_durably(path, json.dumps({"id": self.id, "store": store, "last_step": self.last}))

    def lacks(self, step: int) -> bool:
        """Return True if the store does not have this step; repeated steps are not sent again."""
        self.newest = max(self.newest, step)
        return step > self.last

    def restart(self) -> None:
        self.last = self.newest


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, by TensorBoard's names: "train/loss", "val/loss"."""
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in record.items()
        if name != "step" and value is not None and math.isfinite(value)
    }
