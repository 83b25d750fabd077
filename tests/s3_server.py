"""A real S3 server (moto's) in threads of this process, slow and unreliable as asked.

    with S3Server({"bucket/data.zarr": folder}) as server:
        server.latency, server.error_rate = 0.05, 0.1
        open_archive("s3://bucket/data.zarr", access=Access(server.options))

Of the requests that fail a third are answered 503, a third cut off, and of a third half of the body comes.
A bucket named "forbidden" answers 403. `needs_s3()` skips a test where obstore or moto are absent.
"""

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def needs_s3() -> None:
    missing = [name for name in ("obstore", "moto", "flask", "flask_cors") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} absent: requirements-extras.txt")


class S3Server:
    """Serves local folders as "bucket/prefix"; latency in seconds before each answer."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        needs_s3()
        self.folders, self.latency, self.error_rate = folders, 0.0, 0.0
        self.random = random.Random(0)
        self.seen: list[str] = []  # requests, "GET /bucket/data.zarr/.zmetadata"

    def __enter__(self) -> "S3Server":
        moto: Any = import_module("moto.moto_server.werkzeug_app")  # here: it takes a second, and is an extra
        models: Any = import_module("moto.s3.models")
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"  # connections are kept, as S3 does

            def log(self, *_: Any, **__: Any) -> None:
                pass

        self.backend = models.s3_backends["123456789012"]["aws"]
        self.public = models.get_canned_acl("public-read")
        for key, folder in self.folders.items():
            self.upload(key, folder)
        self.serve = moto.DomainDispatcherApplication(moto.create_backend_app)
        self.server = make_server("127.0.0.1", 0, self.answer, threaded=True, request_handler=Silent)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.backend.reset()

    @property
    def options(self) -> tuple[str, ...]:
        """As data.storage_options has them."""
        return "anon=true", f"endpoint_url=http://127.0.0.1:{self.server.port}"

    @property
    def arguments(self) -> list[str]:
        """The same on a command line."""
        return ["--data.storage_options", json.dumps(list(self.options))]

    def upload(self, key: str, folder: Path) -> None:
        """The files below a folder as "bucket/prefix", without a request for each."""
        bucket, _, prefix = key.partition("/")
        if bucket not in self.backend.buckets:
            self.backend.create_bucket(bucket, "us-east-1")
        for path in folder.rglob("*"):
            if path.is_file():
                name = f"{prefix}/{path.relative_to(folder).as_posix()}"
                self.backend.put_object(bucket, name, path.read_bytes()).set_acl(self.public)

    def answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        self.seen.append(f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}")
        time.sleep(self.latency)
        if environ["PATH_INFO"].startswith("/forbidden"):
            return _refuse(start, "403 Forbidden", "AccessDenied")
        if self.random.random() >= self.error_rate:
            return self.serve(environ, start)
        kind = self.random.randrange(3)
        if kind == 0:
            return _refuse(start, "503 Service Unavailable", "SlowDown")
        if kind == 1:
            start("200 OK", [("Content-Length", "1")])
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return [b""]
        content = b"".join(self.serve(environ, start))
        return [content[: len(content) // 2]]  # of what its header says


def _refuse(start: Callable[..., Any], status: str, code: str) -> Iterable[bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{status}</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]
