"""A folder on a fast disk that keeps what was read from an object store, up to a bound, for all processes of
a node.

An entry is a file of its own, written beside its name and renamed: nobody sees half of one. It is not flushed
to the disk, which would cost more than it saves; instead its checksum stands in it, and what a crash has left
is read from the source again. Whoever would pass the bound removes what was not used for longest, under a
lock; a reader that has such a file open reads on.
"""

import fcntl
import logging
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from google_crc32c import value as crc32c  # zarr's; 10 GB/s, where zlib's crc32 has 1

from errors import DataError

logger = logging.getLogger(__name__)
HEADER = struct.Struct("<4sIQ")  # magic, CRC-32C and length of what follows
MAGIC = b"RBC1"
UNFINISHED = ".new"
ABANDONED = 3600  # seconds after which nobody writes to an unfinished file any more
KEPT = 0.9  # of the bound, after something was removed: the folder is looked through seldom


class DiskCache:
    """Entries by name (hexadecimal). Called from many threads and processes."""

    def __init__(self, folder: str | Path, limit: int) -> None:
        """limit: bytes of all files. DataError where the folder cannot be written to."""
        self.folder, self.limit, self.broken = Path(folder), limit, ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            fix = "name a folder on a local disk that can be written to"
            raise DataError(f"data.disk_cache_path = {str(folder)!r}: {error.strerror}; {fix}") from None

    def get(self, name: str) -> bytes | None:
        """The content; None where there is none, or what is there is damaged."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as file:
                header, content = file.read(HEADER.size), file.readall()
            os.utime(path)  # used now
        except OSError:  # not there, or removed just now
            return None
        if header == HEADER.pack(MAGIC, crc32c(content), len(content)):
            return content
        with suppress(FileNotFoundError):
            path.unlink()
        return None

    def put(self, name: str, content: bytes) -> None:
        """Keeps the content where there is room; a full disk ends the keeping, not the run."""
        if self.broken:
            return
        try:
            if beside := self._reserve(name, HEADER.size + len(content)):
                _fill(beside, content)
                with self._locked():  # who counts sees it under one of its names
                    os.replace(beside, self._path(name))
        except OSError as error:
            self.broken = str(error)
            logger.warning(f"data.disk_cache_path: {error}: no more is kept there by this process")

    def size(self) -> int:
        """Bytes of all files, unfinished ones as large as they will be."""
        with self._locked():
            return sum(size for _, size, _ in self._entries())

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time, of all threads and processes; the kernel releases it even if a process dies."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _reserve(self, name: str, size: int) -> Path | None:
        """An unfinished file that is as large as it will be, so that others count it. None: there is such an
        entry, or no room.
        """
        path = self._path(name)
        with self._locked():
            if size > self.limit or path.exists():
                return None
            used = self._used()
            if used is None or used + size > self.limit:
                used = self._make_room(size)
            if used + size > self.limit:
                return None
            path.parent.mkdir(exist_ok=True)
            beside = path.with_name(f".{name}.{os.getpid()}.{threading.get_ident()}{UNFINISHED}")
            with beside.open("wb") as file:
                os.truncate(file.fileno(), size)
            (self.folder / ".used").write_text(str(used + size))
            return beside

    def _used(self) -> int | None:
        """Bytes as the last one under the lock has counted them: never fewer than there are."""
        try:
            return int((self.folder / ".used").read_text())
        except (OSError, ValueError):
            return None

    def _make_room(self, size: int) -> int:
        """Removes what was not used for longest; the bytes that are left."""
        entries, now = sorted(self._entries()), time.time()
        used = sum(each for _, each, _ in entries)
        aim = max(min(KEPT * self.limit, self.limit - size), 0)
        for last_use, each, path in entries if used + size > self.limit else []:
            if used <= aim:
                break
            if path.suffix == UNFINISHED and now - last_use < ABANDONED:
                continue
            with suppress(FileNotFoundError):
                path.unlink()
            used -= each
        return used

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """(last use, bytes, file)."""
        for folder in self.folder.iterdir():
            for path in folder.iterdir() if folder.is_dir() else ():
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield status.st_mtime, status.st_size, path


def _fill(beside: Path, content: bytes) -> None:
    """Raises OSError, and leaves nothing then."""
    try:
        with beside.open("r+b", buffering=0) as file:
            for part in (HEADER.pack(MAGIC, crc32c(content), len(content)), content):
                left = memoryview(part)
                while left:
                    left = left[file.write(left) or 0 :]
    except OSError:
        beside.unlink(missing_ok=True)
        raise
