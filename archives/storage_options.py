"""How data behind a URL are reached: data.storage_options = ["anon=true", "endpoint_url=http://host:9000"].

Standard library and TOML only: the check of a command line imports this, and answers in under a second.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from errors import SECRET_NAME, refuse

KEY = "data.storage_options"
INSTEAD = "the environment (AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS) or a credentials file"
S3, GS = ("s3", "s3a"), ("gs", "gcs")
# Where botocore and google-auth look for credentials, as far as a file or a variable can say it.
AWS_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
MACHINE = Path("/sys/class/dmi/id")  # "Amazon EC2", "Google": a machine there has its own


@dataclass(frozen=True)
class Access:
    """How URLs are read: options of the file system, and a folder that keeps what was read. Hashable."""

    storage_options: tuple[str, ...] = field(default=(), repr=False)  # with secrets, perhaps
    protocol: str = ""  # of data.path, whose options these are: no other protocol gets them; "": all do
    cache_path: str = ""  # "": nothing is kept
    cache_gib: float = 0.0

    def options_for(self, url: str) -> dict[str, Any]:
        """For fsspec, of the file system that a URL lies on (the last of a chain)."""
        protocol = protocol_of(url)
        given = parse_storage_options(self.storage_options)
        return given if self.protocol in ("", protocol) else {}


NO_OPTIONS = Access()


def protocol_of(url: str) -> str:
    """ "s3" of "s3://bucket/x" and of "simplecache::s3://bucket/x"; "" of a path."""
    last = url.split("::")[-1]
    return last.partition("://")[0] if "://" in last else ""


def parse_storage_options(texts: Sequence[str]) -> dict[str, Any]:
    """["anon=true", "endpoint_url=http://host"] -> {"anon": True, "endpoint_url": "http://host"}.

    Values are TOML where they can be read so, and texts otherwise; secrets always are texts. ConfigError.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not (name and equals and value):
            reason = 'write an option of the file system and its value, for example ["anon=true"]'
            refuse(KEY, [name] if equals else "...", reason)
        if name in found:
            refuse(KEY, name, "stands twice; keep one of them")
        if value.strip("\"'") == "***":
            refuse(KEY, f"{name}=***", f"secrets are not written down; give it again, or in {INSTEAD}")
        found[name] = _value(name, value)
    return found


def _value(name: str, text: str) -> Any:
    if re.fullmatch(SECRET_NAME, name, re.IGNORECASE):
        return text.strip("\"'")
    try:
        value = tomli.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    if hidden := [key for key in _names_within(value) if re.fullmatch(SECRET_NAME, key, re.IGNORECASE)]:
        refuse(KEY, name, f"{hidden[0]} would be written down from in there; give it in {INSTEAD}")
    return value if isinstance(value, bool | int | float | str | list | dict) else text


def _names_within(value: Any) -> list[str]:
    if not isinstance(value, dict):
        return []
    return [name for key, inner in value.items() for name in [key, *_names_within(inner)]]


# -- without credentials


def anonymous_options(protocol: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a file system read without credentials, where nobody has given any; else nothing.

    Public stores (gs://weatherbench2) need none, and both libraries would look for some for seconds, or end
    with an error that says nothing of it.
    """
    names = {"anon", "token", "key", "secret", "profile", "session", "client_kwargs"}
    if names & set(given):
        return {}
    if protocol in S3 and not _has_aws_credentials():
        return {"anon": True}
    if protocol in GS and not _has_google_credentials():
        return {"token": "anon"}
    return {}


def _has_aws_credentials() -> bool:
    home = Path.home() / ".aws"
    files = [
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", home / "credentials"),
        os.environ.get("AWS_CONFIG_FILE", home / "config"),
    ]
    return any(map(os.environ.get, AWS_VARIABLES)) or any(map(os.path.exists, files)) or _is_in("Amazon")


def _has_google_credentials() -> bool:
    folder = Path(os.environ.get("CLOUDSDK_CONFIG", Path.home() / ".config/gcloud"))
    named = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    return bool(named) or (folder / "application_default_credentials.json").exists() or _is_in("Google")


def _is_in(cloud: str) -> bool:
    said = [MACHINE / name for name in ("sys_vendor", "product_name")]
    return any(cloud in path.read_text() for path in said if path.is_file())
