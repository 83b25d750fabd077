"""Files that are whole under their names: written beside, flushed, renamed. A kill or a full disk leaves the
file that was there before.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name to write to, which takes the place of `path` when the block ends well. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new{path.suffix}")  # numpy adds a suffix where there is none
    try:
        yield beside
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(FileNotFoundError):
            beside.unlink()
        raise
    sync_folder(path.parent)


def write_durably(path: Path, text: str) -> None:
    """Raises OSError."""
    with replacing(path) as beside:
        beside.write_text(text)


def append_whole(path: Path, text: str) -> None:
    """All of the text at the end of a file, or nothing of it. Raises OSError."""
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
    """A new name is on the disk only when its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
