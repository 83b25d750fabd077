"""Zarr stores at URLs: obstore for S3, Google, Azure and HTTP, fsspec for every other protocol.

obstore repeats failed requests (time-outs, broken connections, 429 and 5xx) for a minute.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, ObjectStore

from datasets.options import parse_storage_options
from errors import DataError

OBSTORE = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https"}
# s3fs's names -> obstore's.
ALIASES = {"anon": "skip_signature", "endpoint_url": "endpoint", "key": "access_key_id"}
ALIASES |= {"secret": "secret_access_key"}
AWS_VARIABLES = """AWS_ACCESS_KEY_ID AWS_PROFILE AWS_WEB_IDENTITY_TOKEN_FILE AWS_SHARED_CREDENTIALS_FILE
    AWS_CONTAINER_CREDENTIALS_RELATIVE_URI AWS_CONTAINER_CREDENTIALS_FULL_URI""".split()
GOOGLE_VARIABLES = ["GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"]
GOOGLE_FILE = "~/.config/gcloud/application_default_credentials.json"
# Protocol -> variables and files with credentials, and the vendor of machines with credentials of their own.
AWS = AWS_VARIABLES, ["~/.aws/credentials", "~/.aws/config"], "Amazon"
CREDENTIALS = {"s3": AWS, "s3a": AWS, "gs": (GOOGLE_VARIABLES, [GOOGLE_FILE], "Google")}
MACHINE = Path("/sys/class/dmi/id")  # "Amazon EC2", "Google": a machine there has credentials of its own
RETRIES = {
    "max_retries": 12,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=8), "base": 2},
}
BODY_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)  # seconds
TIMEOUTS = {"timeout": "300s", "connect_timeout": "10s"}


@dataclass(frozen=True)
class Access:
    """Options of stores at URLs, given to those of `protocol` only ("": to any)."""

    storage_options: tuple[str, ...] = field(default=(), repr=False)  # may contain secrets
    protocol: str = ""

    @classmethod
    def of(cls, storage_options: Sequence[str], path: str) -> "Access":
        """Return the options of a data.path, and of others of its protocol. Raises ConfigError."""
        parse_storage_options(storage_options)
        return cls(tuple(storage_options), protocol_of(path))

    def options_for(self, url: str) -> dict[str, Any]:
        """Return the options for a URL, none for another protocol: they may be secrets of another store."""
        options = parse_storage_options(self.storage_options)
        return options if self.protocol in ("", protocol_of(url)) else {}


NO_OPTIONS = Access()


def is_url(path: str) -> bool:
    """Return True for "gs://...", "memory://...", "simplecache::s3://..."."""
    return "://" in path or "::" in path


def protocol_of(url: str) -> str:
    """Return "s3" for "s3://bucket/x" and for "simplecache::s3://bucket/x", "" for a path."""
    last = url.split("::")[-1]
    return last.partition("://")[0] if "://" in last else ""


def open_store(url: str, access: Access = NO_OPTIONS) -> Any:
    """Return the zarr store at a URL, without a request to it. Raises DataError."""
    options, protocol = access.options_for(url), protocol_of(url)
    try:
        if protocol not in OBSTORE or "::" in url:
            return FsspecStore.from_url(url, storage_options=options, read_only=True)
        from obstore.store import from_url

        config, client = _obstore_options(protocol, options)
        given: Any = {"config": config} if protocol not in ("http", "https") else {}
        store = from_url(url, client_options=client, retry_config=RETRIES, **given)  # type: ignore[reportCallIssue, reportArgumentType]
    except Exception as error:  # every library raises its own
        fix = "; install it (pip install -r requirements.txt, or the package that fsspec names)"
        fix = fix if isinstance(error, ImportError) else ""
        raise DataError(f"cannot read {url!r}: {describe_error(error)}{fix}") from None
    return _PatientStore(store, read_only=True)


class _PatientStore(ObjectStore):
    """A store that also repeats requests with an incomplete response, which obstore 0.12 does not repeat."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        from obstore.exceptions import GenericError

        for wait in BODY_WAITS:
            try:
                return await super().get(key, prototype, byte_range)
            except GenericError as error:
                if "body error" not in str(error):
                    raise
                await asyncio.sleep(wait)
        return await super().get(key, prototype, byte_range)


def _obstore_options(protocol: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of the store and of the HTTP client."""
    config = {ALIASES.get(name, name): value for name, value in options.items()}
    if protocol == "gs" and config.get("token") == "anon":  # as gcsfs has it
        config["skip_signature"] = bool(config.pop("token"))
    if set(config) <= {"endpoint", "region"} and protocol in CREDENTIALS:
        # Without credentials obstore would wait, and public stores need none.
        variables, files, maker = CREDENTIALS[protocol]
        about = [MACHINE / name for name in ("sys_vendor", "product_name")]
        has_credentials = (
            any(map(os.environ.get, variables))
            or any(Path(name).expanduser().exists() for name in files)
            or any(maker in path.read_text() for path in about if path.is_file())
        )
        if not has_credentials:
            config["skip_signature"] = True
    plain_http = str(config.get("endpoint", "")).startswith("http://") or protocol == "http"
    return config, {**TIMEOUTS, "allow_http": True} if plain_http else TIMEOUTS


def describe_error(error: BaseException) -> str:
    """Return the type and the first paragraph of an error on one line, at most 200 characters."""
    text = " ".join(str(error).split("\n\n")[0].split())
    # obstore's words for a host without an answer, after all tries.
    hint = "no answer, is there a network? " if "error sending request" in str(error) else ""
    return f"{hint}{type(error).__name__}: {text}"[:200]
