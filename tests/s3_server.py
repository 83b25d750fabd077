"""A real S3 server (moto's) on this machine, slow and unreliable as asked, in a process of its own.

    with S3Server({"bucket/data.zarr": folder}, latency=0.05, error_rate=0.1) as server:
        open_archive("s3://bucket/data.zarr", access=Access(server.options))
        server.requests()            # since the last time it was asked
        server.set(error_rate=0.0)

Of the requests that fail a third are answered 503, a third cut off, and of a third half of the body comes.
A bucket named "forbidden" answers 403. `needs_s3()` skips a test where obstore or moto are absent.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CONTROL = "/-/control"  # no bucket has such a name


def needs_s3() -> None:
    missing = [name for name in ("obstore", "moto", "flask", "flask_cors") if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} absent: requirements-extras.txt")


class S3Server:
    """Serves local folders as "bucket/prefix"."""

    def __init__(
        self, folders: Mapping[str, str | Path], latency: float = 0.0, error_rate: float = 0.0
    ) -> None:
        needs_s3()
        self.folders = {name: os.path.abspath(path) for name, path in folders.items()}
        self.settings = {"latency": latency, "error_rate": error_rate}

    def __enter__(self) -> "S3Server":
        command = [sys.executable, "-m", "tests.s3_server", json.dumps(self.folders)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        assert self.process.stdout
        self.port = int(self.process.stdout.readline() or 0)
        assert self.port, "the server did not start"
        self.set(**self.settings)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> tuple[str, ...]:
        """As data.storage_options has them."""
        return "anon=true", f"endpoint_url={self.endpoint}"

    @property
    def arguments(self) -> list[str]:
        """The same on a command line."""
        return ["--data.storage_options", json.dumps(list(self.options))]

    def set(self, latency: float | None = None, error_rate: float | None = None) -> None:
        """From now on: seconds before each answer, share of requests that fail."""
        self._control({"latency": latency, "error_rate": error_rate})

    def requests(self) -> list[str]:
        """What was asked for ("GET /bucket/data.zarr/.zmetadata") since the last call, failures too."""
        return self._control({})["requests"]

    def put(self, key: str, content: bytes) -> None:
        """An object, "bucket/data.zarr/0.0", anew."""
        request = urllib.request.Request(f"{self.endpoint}/{key}", data=content, method="PUT")
        for name, value in (("x-amz-acl", "public-read"), ("Content-Type", "application/octet-stream")):
            request.add_header(name, value)
        urllib.request.urlopen(request, timeout=30).close()

    def _control(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        body = json.dumps({key: value for key, value in settings.items() if value is not None}).encode()
        request = urllib.request.Request(self.endpoint + CONTROL, data=body, method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)


# -- in the server's process


class Unreliable:
    """Late and failing answers around a WSGI application."""

    def __init__(self, serve: Callable[..., Iterable[bytes]]) -> None:
        self.serve, self.random = serve, random.Random(0)
        self.latency = self.error_rate = 0.0
        self.seen: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == CONTROL:
            return self._control(environ, start)
        self.seen.append(f"{environ['REQUEST_METHOD']} {path}")
        time.sleep(self.latency)
        if path.startswith("/forbidden"):
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

    def _control(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        wanted = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        self.latency = wanted.get("latency", self.latency)
        self.error_rate = wanted.get("error_rate", self.error_rate)
        seen, self.seen = self.seen, []
        body = json.dumps({"requests": seen}).encode()
        start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]


def _refuse(start: Callable[..., Any], status: str, code: str) -> Iterable[bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{status}</Message></Error>".encode()
    start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def fill(folders: Mapping[str, str]) -> None:
    """Buckets with the files below local folders, without a request for each."""
    models: Any = import_module("moto.s3.models")  # here: it takes a second, and is an extra
    backend, public = models.s3_backends["123456789012"]["aws"], models.get_canned_acl("public-read")
    for name, folder in folders.items():
        bucket, _, prefix = name.partition("/")
        if bucket not in backend.buckets:
            backend.create_bucket(bucket, "us-east-1")
        for path in Path(folder).rglob("*"):
            if path.is_file():
                key = "/".join(part for part in (prefix, path.relative_to(folder).as_posix()) if part)
                backend.put_object(bucket, key, path.read_bytes()).set_acl(public)


def serve(folders: Mapping[str, str]) -> None:
    """Until this process is killed, or its parent dies."""
    moto: Any = import_module("moto.moto_server.werkzeug_app")
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept, as S3 does

        def log(self, *_: Any, **__: Any) -> None:
            pass

    fill(folders)
    application = Unreliable(moto.DomainDispatcherApplication(moto.create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Silent)
    print(server.port, flush=True)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    server.serve_forever()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
