"""Atomic writing of files: to a temporary name, flushed, then renamed.

A kill or a full disk leaves the file that was there before.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
        with suppress(FileNotFoundError):
            partial.unlink()
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
    finally:
        os.close(descriptor)
