"""Stores behind a URL (s3://, gs://, https://, ... of fsspec): reads that are repeated until they succeed.

A request to an object store fails now and then, and is late. What may pass (a timeout, a reset, 429, 5xx) is
tried again for a minute, longer each time; what will not (403, a bucket that is not there) is one line at
once. With a folder on a fast disk (archives/disk_cache.py) each range is read from the store once.
"""

import asyncio
import hashlib
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import fsspec
import fsspec.asyn
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from archives.chunks import Done, work
from archives.disk_cache import DiskCache
from archives.storage_options import S3, Access, anonymous_options, protocol_of
from errors import SECRET_NAME, DataError, without_secrets

logger = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.1, 8.0  # seconds between tries, twice as long each time, and up to half more
PATIENCE, PATIENCE_AT_FIRST = 60.0, 10.0  # seconds; a store that has never answered may be misspelt
SAID_EVERY = 60.0  # seconds between warnings
MOST_SECONDS = 300  # of one try that gets on; one that does not ends after the library's own 15 to 60
CONNECTIONS = 64  # requests at once, of a process
MARKERS = ("zarr.json", ".zmetadata", ".zgroup", ".zattrs")  # of a store
METADATA = {*MARKERS, ".zarray"}  # small, read once, and what tells one version of a store from another
ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
PASSING = {  # errors of libraries that are imported only where they are used, by name
    "ChecksumError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ConnectionClosedError",
    "ConnectionError",
    "HTTPClientError",
    "IncompleteRead",
    "ResponseParserError",
    "ServerDisconnectedError",
    "TransportError",
}


class UrlObjects:
    """Those below a URL. Called from many threads; each process makes its own."""

    def __init__(self, url: str, access: Access) -> None:
        """DataError: the package is not there, or no folder for what is kept."""
        self.url = url.rstrip("/")
        self.files, self.root = _open_filesystem(self.url, access)
        self.secrets = [
            str(value) for name, value in access.options_for(url).items() if _is_secret(name, value)
        ]
        limit = round(access.cache_gib * 2**30)
        self.cache = DiskCache(access.cache_path, limit) if access.cache_path else None
        self.has_answered = False
        self._opening = threading.RLock()  # cached_property has none since Python 3.12
        self._counting, self._repeated, self._said = threading.Lock(), 0, -SAID_EVERY
        self._given_up = threading.Event()  # by one thread: the others need not wait as long again

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes | None:
        """As archives.chunks.Objects says. DataError, one line without secrets: not even after a minute."""
        if key in MARKERS and (start, length) == (0, None):
            return self.markers[key]
        if self.cache is None or key.rpartition("/")[2] in METADATA:
            return self._fetch(key, start, length)
        name = hashlib.sha256(f"{self.version}\n{key}\n{start}\n{length}".encode()).hexdigest()[:40]
        content = self.cache.get(name)
        work.add(Done(asked=1, kept=content is not None))
        if content is None and (content := self._fetch(key, start, length)) is not None:
            self.cache.put(name, content)
        return content

    def names(self, folder: str) -> list[str]:
        """What lies directly in a folder of the store."""
        path = f"{self.root}/{folder}".rstrip("/")
        try:
            found = self._persistently(folder, lambda: self.files.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)

    def require_store(self) -> None:
        """DataError: there is none."""
        assert self.markers

    @property
    def markers(self) -> dict[str, bytes | None]:
        """The metadata of the root, read once, all at the same time; DataError where there are none."""
        with self._opening:
            return self._markers

    @cached_property
    def _markers(self) -> dict[str, bytes | None]:
        with ThreadPoolExecutor(len(MARKERS)) as pool:
            tries = [pool.submit(self._marker, key) for key in MARKERS]
            found = {key: each.result() for key, each in zip(MARKERS, tries, strict=True)}
        contents = {key: each if isinstance(each, bytes) else None for key, each in found.items()}
        if not any(contents.values()):
            errors = [each for each in found.values() if isinstance(each, Exception)]
            if refused := [each for each in errors if isinstance(each, PermissionError)]:
                raise DataError(self._complaint(MARKERS[0], refused[0], 0))
            raise DataError(f"cannot read {self.url!r}: there is no Zarr store ({self._reason(errors[0])})")
        return contents

    def _marker(self, key: str) -> bytes | Exception:
        """Who may not list a bucket is forbidden (403) to read what is not there."""
        try:
            return self._persistently(key, lambda: self._cat(key, 0, None), may_be_refused=True)
        except (*ABSENT, PermissionError) as error:
            return error

    @property
    def version(self) -> str:
        """Of the whole store: what its metadata say and when they were written.

        Asking for each object's date would cost a request for each read that the cache saves.
        """
        with self._opening:
            return self._version

    @cached_property
    def _version(self) -> str:
        parts = [self.url.encode(), *(content or b"" for content in self.markers.values())]
        for key in (key for key, content in self.markers.items() if content):
            about = self._persistently(key, lambda key=key: self.files.info(f"{self.root}/{key}"))
            marks = ("ETag", "etag", "LastModified", "mtime", "updated", "generation", "created", "size")
            parts.append(repr([str(about.get(mark)) for mark in marks]).encode())
        return hashlib.sha256(b"\n".join(parts)).hexdigest()

    def _fetch(self, key: str, start: int, length: int | None) -> bytes | None:
        try:
            return self._persistently(key, lambda: self._cat(key, start, length))
        except ABSENT:
            return None

    def _cat(self, key: str, start: int, length: int | None) -> bytes:
        """One try. Whole objects are asked for without a range: a store may have empty ones."""
        path, whole = f"{self.root}/{key}", start == 0 and length is None
        end = start + length if length is not None and start >= 0 else None
        limits = {"start": None if whole else start, "end": end}
        if self.files.async_impl:
            fetch = self.files._cat_file  # type: ignore[attr-defined]
            content = fsspec.asyn.sync(self.files.loop, fetch, path, timeout=MOST_SECONDS, **limits)
        else:
            content = self.files.cat_file(path, **limits)
        assert isinstance(content, bytes), type(content)
        return content if length is None or start >= 0 else content[:length]

    def _persistently(self, key: str, attempt: Callable[[], Any], may_be_refused: bool = False) -> Any:
        """What `attempt` gives, tried again while it may help. Raises FileNotFoundError and the like, and
        PermissionError where asked to; DataError for all else.
        """
        began, wait = time.monotonic(), FIRST_WAIT
        while True:
            try:
                content = attempt()
                self.has_answered = True
                self._given_up.clear()
                return content
            except Exception as error:  # each file system raises what it pleases
                if isinstance(error, ABSENT):
                    self.has_answered = True
                    raise
                if may_be_refused and is_refused(error):
                    raise PermissionError(*error.args) from None
                patience = PATIENCE if self.has_answered else PATIENCE_AT_FIRST
                passed = time.monotonic() - began
                if not is_passing(error):
                    raise DataError(self._complaint(key, error, passed)) from None
                self._tell(error)
                if passed + wait > patience or self._given_up.wait(wait * random.uniform(1, 1.5)):
                    self._given_up.set()
                    raise DataError(self._complaint(key, error, passed)) from None
            wait = min(2 * wait, LONGEST_WAIT)

    def _tell(self, error: Exception) -> None:
        """That requests are repeated, once a minute."""
        with self._counting:
            self._repeated += 1
            now, count = time.monotonic(), self._repeated
            if now - self._said < SAID_EVERY:
                return
            self._said, self._repeated = now, 0
        text = "a request" if count == 1 else f"{count} requests"
        logger.warning(
            f"{without_secrets(self.url)}: {text} failed and will be repeated: {self._reason(error)}"
        )

    def _complaint(self, key: str, error: Exception, passed: float) -> str:
        where = f"cannot read {self.url + '/' + key!r}: {self._reason(error)}"
        if is_passing(error):
            return f"{where}; tried for {passed:.0f} s: is the address right, and the network there?"
        if is_refused(error) or "credential" in str(error).lower():
            fix = 'give credentials in the environment, or data.storage_options = ["anon=true"] for none'
            return f"{where}; {fix}"
        return f"{where}; look at data.path and data.storage_options"

    def _reason(self, error: Any) -> str:
        """In one line, without secrets."""
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return without_secrets(text)


def is_passing(error: BaseException | None) -> bool:
    """Whether the same request may succeed later: its status says so, or that there was no answer."""
    while error is not None:
        if status := _status(error):
            return status in (408, 429) or status >= 500
        names = {kind.__name__ for kind in type(error).__mro__}
        if isinstance(error, TimeoutError | ConnectionError) or PASSING & names:
            return True
        error = error.__cause__
    return False


def is_refused(error: BaseException) -> bool:
    """401 or 403; gcsfs makes an OSError of it."""
    forbidden = str(error).startswith("Forbidden")
    return isinstance(error, PermissionError) or forbidden or _status(error) in (401, 403)


def _status(error: BaseException) -> int:
    """Of HTTP, as botocore, aiohttp and gcsfs give it; 0: none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    found = getattr(error, "status", None) or getattr(error, "code", None)
    return int(str(found)) if str(found).isdecimal() else 0


def _is_secret(name: str, value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(SECRET_NAME, name, re.IGNORECASE) is not None


def _open_filesystem(url: str, access: Access) -> tuple[Any, str]:
    """The file system and the path on it. Its own repeats are switched off where they can be: ours know when
    to end. DataError: the package that it needs is not there, or an option makes no sense to it.
    """
    protocol, options = protocol_of(url), access.options_for(url)
    if anonymous := anonymous_options(protocol, options):
        logger.info(f"{protocol}://: no credentials found, so none are used")
    options = {**_DEFAULTS.get(protocol, {}), **anonymous, **options}
    # gcsfs 2026.10 asks over gRPC how a bucket is laid out before it reads anything: a minute where nobody
    # answers that. It looks at this when it is imported.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        files, root = fsspec.url_to_fs(url, **({protocol: options} if "::" in url else options))
    except ImportError as error:
        package = PACKAGES.get(protocol, "")
        fix = f": {sys.executable} -m pip install {package}" if package else f" ({error})"
        raise DataError(f"cannot read {url!r}: {protocol}:// needs another package{fix}") from None
    except (ValueError, TypeError) as error:
        raise DataError(f"cannot read {url!r}: {' '.join(str(error).split())}") from None
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs with tracebacks what it raises as well
    if protocol in S3 and hasattr(files, "retries"):
        files.retries = 1
    return files, root.rstrip("/")


PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
# s3fs asks for an object's size before it reads it whole, unless it is to be read in one piece.
_S3_DEFAULTS = {
    "max_concurrency": 1,
    "config_kwargs": {"max_pool_connections": CONNECTIONS, "retries": {"total_max_attempts": 1}},
}
_DEFAULTS: dict[str, dict[str, Any]] = dict.fromkeys(S3, _S3_DEFAULTS)


# -- for whom


def open_objects(url: str, access: Access) -> UrlObjects:
    """The objects below a URL: the same ones in a process, so that its connections and its patience are."""
    return _opened(url, access, os.getpid())


@lru_cache(maxsize=64)
def _opened(url: str, access: Access, process: int) -> UrlObjects:
    return UrlObjects(url, access)


class ObjectStore(Store):
    """Objects as zarr reads them; nothing can be written."""

    def __init__(self, objects: UrlObjects) -> None:
        super().__init__(read_only=True)
        self.objects = objects

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectStore) and other.objects is self.objects

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        content = await _in_thread(self.objects.read, key, *_span(byte_range))
        return None if content is None else prototype.buffer.from_bytes(content)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return list(await asyncio.gather(*[self.get(key, prototype, span) for key, span in key_ranges]))

    async def exists(self, key: str) -> bool:
        return await _in_thread(self.objects.read, key, 0, 1) is not None

    async def set(self, key: str, value: Buffer) -> None:
        raise PermissionError(f"{self.objects.url} is only read")

    async def delete(self, key: str) -> None:
        raise PermissionError(f"{self.objects.url} is only read")

    async def list(self) -> AsyncIterator[str]:
        async for key in self.list_prefix(""):
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError(f"{self.objects.url}: only folders are listed")
        yield  # which makes this a generator

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        for name in await _in_thread(self.objects.names, prefix.rstrip("/")):
            yield name


def _span(wanted: ByteRequest | None) -> tuple[int, int | None]:
    """(start, length) of zarr's ways to say it."""
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end - wanted.start
    if isinstance(wanted, OffsetByteRequest):
        return wanted.offset, None
    return (-wanted.suffix, None) if isinstance(wanted, SuffixByteRequest) else (0, None)


async def _in_thread(read: Callable[..., Any], *arguments: Any) -> Any:
    """zarr's loop goes on meanwhile: it asks for the chunks of a selection at once."""
    future = asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), read, *arguments)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())  # the first error is enough
    return await future


@lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="object-store")


def open_zarr(url: str, access: Access) -> Any:
    """The group at a URL, read-only, from consolidated metadata where there are any. DataError."""
    import zarr

    objects = open_objects(url, access)
    objects.require_store()  # here: each of zarr's tasks would find out for itself
    return zarr.open_group(ObjectStore(objects), mode="r")
