"""gs:// through gcsfs: without credentials, and with errors, from a server that speaks enough of Google's."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from archives import storage_options
from archives.archive import open_archive
from archives.storage_options import Access
from errors import DataError
from tests.sample_archives import NAMES, analyses, values, weatherbench

# Looked for, not imported: who imports it first decides how it asks (archives/object_store.py).
if find_spec("gcsfs") is None:
    pytest.skip("gcsfs is an extra, see requirements-extras.txt", allow_module_level=True)


BUSY = (2, 12)  # numbers of such answers; gcsfs waits a second after each


class Objects(BaseHTTPRequestHandler):
    """The files of a folder as objects of any bucket; some answers are 503."""

    folder = Path()
    protocol_version = "HTTP/1.1"
    seen: list[str | None] = []

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization"))
        path = unquote(self.path).partition("?")[0]
        file = self.folder / path.partition("/o/")[2]
        if "/b/forbidden/" in path:
            self.answer(403, b"denied")
        elif not file.is_file():
            self.answer(404, b"not there")
        elif len(self.seen) in BUSY:
            self.answer(503, b"busy")
        elif "alt=media" in self.path:
            content, span = (
                file.read_bytes(),
                re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")),
            )
            if span:
                first, last = span.groups()
                content = (
                    content[int(first) : int(last or len(content)) + 1] if first else content[-int(last) :]
                )
            self.answer(206 if span else 200, content)
        else:
            about = {"name": file.name, "bucket": "b", "size": str(file.stat().st_size), "generation": "1"}
            self.answer(200, json.dumps(about).encode())

    def answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def options(tmp_path, monkeypatch) -> Iterator[tuple[str, ...]]:
    monkeypatch.setattr(storage_options, "MACHINE", tmp_path)  # no cloud
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    handler = type("Handler", (Objects,), {"folder": tmp_path, "seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (f"endpoint_url=http://127.0.0.1:{server.server_port}",)
    assert set(handler.seen) == {None}, "nobody has credentials"
    server.shutdown()
    server.server_close()


def test_a_public_bucket_needs_no_credentials(options, tmp_path):
    weatherbench(tmp_path, analyses())
    access = Access(options, "gs", str(tmp_path / "cache"), 0.1)
    archive = open_archive("gs://bucket/wb.zarr", access=access)
    np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(analyses()))


def test_what_is_not_there_and_what_is_forbidden_is_one_line(options, capfd):
    for url, reason in (
        ("gs://bucket/none.zarr", "there is no Zarr store"),
        ("gs://forbidden/x.zarr", "give credentials in the environment"),
    ):
        with pytest.raises(DataError, match=reason) as error:
            open_archive(url, access=Access(options))
        assert "\n" not in str(error.value)
    assert "Traceback" not in capfd.readouterr().err
