"""metrics.jsonl: one object per line. Lines that do not fit on a full disk are kept and written later."""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.durable_files import append_whole, write_durably

logger = logging.getLogger(__name__)


class Journal:
    """The records of a run, written by one rank. A full disk does not end the run."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, []

    def write(self, record: dict[str, Any]) -> None:
        self.waiting.append(json.dumps(record) + "\n")
        problem = self._flush()
        if problem and len(self.waiting) == 1:
            logger.warning("%s: %s; its lines are kept until they can be written", self.path, problem)

    def _flush(self) -> OSError | None:
        try:
            append_whole(self.path, "".join(self.waiting))
            self.waiting = []
        except OSError as error:
            return error

    def forget_after(self, step: int) -> int:
        """Drop the records of later steps, which will be repeated. Return the last recorded step, 0: none."""
        return self._keep(lambda record: record["step"] <= step)

    def forget(self, step: int, key: str) -> None:
        """Drop the record of a step that has a key: a new one will replace it."""
        self._keep(lambda record: record["step"] != step or key not in record)

    def _keep(self, is_kept: Callable[[dict[str, Any]], bool]) -> int:
        self.close()
        records = read_records(self.path)
        text = "".join(json.dumps(each) + "\n" for each in records if is_kept(each))
        try:
            if records:
                write_durably(self.path, text)
        except OSError as error:
            logger.warning("%s: %s; the records of repeated steps could not be removed", self.path, error)
        return max((record["step"] for record in records), default=0)

    def close(self) -> None:
        if self.waiting and self._flush():
            logger.warning("%s: its last %d lines could not be written", self.path, len(self.waiting))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return all complete records; lines that a kill or a full disk has cut are counted and skipped."""
    records, lines = [], path.read_text(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    if torn := len(lines) - len(records):
        logger.warning("%s: %d incomplete lines are skipped", path, torn)
    return records
