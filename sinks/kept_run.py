"""A run in a store that only appends: the same one across resumes, each step in it once."""

import json
from collections.abc import Callable
from pathlib import Path

from jobs.durable_files import write_durably


class KeptRun:
    """Its name there, and the last step that it was told, kept in a file of the run's folder.

    A resumed run repeats the steps after its checkpoint: the store keeps the values that it has. From step 0
    another run begins.
    """

    def __init__(
        self, path: Path, store: str, resume_step: int, written: int, begin: Callable[[], str]
    ) -> None:
        """store: where its name means something. written: the last step of the start before; begin: makes a
        run in the store, and names it.
        """
        before = json.loads(path.read_text()) if path.exists() else {}
        self.continues = resume_step > 0 and before.get("store") == store
        self.id: str = before["id"] if self.continues else begin()
        self.last = max(before["last_step"], written) if self.continues else -1
        self.newest = self.last
        write_durably(path, json.dumps({"id": self.id, "store": store, "last_step": self.last}))

    def lacks(self, step: int) -> bool:
        """Whether the store is to be told of this step."""
        self.newest = max(self.newest, step)
        return step > self.last

    def go_back(self) -> None:
        self.last = self.newest
