"""Files that a kill or a full disk leaves whole: written to a temporary name, flushed, then renamed; and
metrics.jsonl, one object a line.
"""

import errno
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, renamed to `path` when the block ends without error. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.new{path.suffix}")  # numpy adds a suffix where there is none
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Write a text file atomically. Raises OSError."""
    with replacing(path) as partial:
        partial.write_text(text)


def append_whole(path: Path, text: str) -> None:
    """Append all of the text to a file, or nothing of it. Raises OSError."""
    with path.open("ab", buffering=0) as file:
        before, left = file.tell(), text.encode()
        try:
            while left:
                left = left[file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def sync_folder(path: Path) -> None:
    """Flush a folder, because a new name in it may be lost otherwise."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some file systems cannot flush a folder, as SMB
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


class Journal:
    """The records of a run, written by one rank. Lines that do not fit on a full disk are written later."""

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, ""

    def write(self, record: dict[str, Any] | None = None) -> None:
        """Append a record, after those that could not be written before."""
        is_first = not self.waiting
        self.waiting += json.dumps(record) + "\n" if record else ""
        try:
            append_whole(self.path, self.waiting)
            self.waiting = ""
        except OSError as error:
            if is_first:
                logger.warning("%s: %s; its lines are kept until they can be written", self.path, error)

    def forget_after(self, step: int, key: str = "") -> int:
        """Drop the records of later steps, and of `step` if it has the key. Return the last step, or 0."""
        self.close()
        records = read_records(self.path)
        remain = [r for r in records if r["step"] < step or (r["step"] == step and not (key and key in r))]
        try:
            if records:
                write_durably(self.path, "".join(json.dumps(record) + "\n" for record in remain))
        except OSError as error:
            logger.warning("%s: %s; the records of repeated steps could not be removed", self.path, error)
        return max((record["step"] for record in records), default=0)

    def close(self) -> None:
        if self.waiting:
            self.write()
        if lines := self.waiting.count("\n"):
            logger.warning("%s: its last %d lines could not be written", self.path, lines)


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
