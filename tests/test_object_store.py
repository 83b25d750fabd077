"""Data behind URLs: against a real S3 server (moto's) that is slow and fails; what goes wrong in one line."""

import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import forecast
from archives import object_store, storage_options
from archives.archive import open_archive
from archives.disk_cache import DiskCache
from archives.object_store import is_passing, open_objects
from archives.storage_options import Access, anonymous_options, parse_storage_options
from command_line import load_config, to_toml
from errors import ConfigError, DataError, without_secrets
from tests.s3_server import ROOT, S3Server
from tests.sample_archives import NAMES, analyses, values, weatherbench, zarr3
from tests.test_damaged_data import store
from tests.test_forecast import write_archive
from train import train
from verification.climatology import open_climatology
from verification.forecast_layouts import open_forecast

URL = "s3://bucket/wb.zarr"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Analyses in Zarr 2 and 3, without consolidated metadata, and ten days to train on."""
    path = tmp_path_factory.mktemp("stores")
    truth = analyses()
    weatherbench(path, truth)
    zarr3(path, truth)
    store(path / "holed.zarr", "zlib").unlink()
    (path / "training").mkdir()
    write_archive(path / "training")
    return path


@pytest.fixture(scope="module")
def started(folder) -> Iterator[S3Server]:
    stores = {name: folder / name for name in ("wb.zarr", "three.zarr", "holed.zarr")}
    stores["ten.zarr"] = folder / "training/wb.zarr"
    with S3Server({f"bucket/{name}": path for name, path in stores.items()}) as server:
        yield server


@pytest.fixture
def server(started, monkeypatch) -> S3Server:
    """Quick and reliable again, asked by nobody."""
    monkeypatch.setattr(object_store, "FIRST_WAIT", 0.01)
    started.set(latency=0.0, error_rate=0.0)
    started.requests()
    return started


def test_opening_asks_for_the_metadata_once(server):
    archive = open_archive(URL, access=Access((*server.options, "default_block_size=5242880")))
    asked = [each.removeprefix("GET /bucket/wb.zarr/") for each in server.requests()]
    assert sorted(asked[:4]) == [".zattrs", ".zgroup", ".zmetadata", "zarr.json"]
    assert set(asked[4:]) == {"latitude/0", "longitude/0", "level/0", "time/0"} and len(asked) < 14
    archive.read(1, NAMES)
    assert len(server.requests()) == 3  # a chunk an array, without asking how large it is


@pytest.mark.parametrize("name", ["wb.zarr", "three.zarr"])
def test_failures_and_latency_cost_no_value(server, folder, name, caplog):
    server.set(latency=0.02, error_rate=0.1)
    archive = open_archive(f"s3://bucket/{name}", access=Access((*server.options, "default_fill_cache=true")))
    for _ in range(4):
        np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(analyses()))
    assert len(server.requests()) > 60
    assert 1 <= caplog.text.count("failed and will be repeated") <= 1 and "s3://bucket" in caplog.text


def test_bytes_are_those_of_the_files(server, folder):
    objects, key = open_objects(URL, Access(server.options)), "geopotential/0.0.0.0"
    content = (folder / "wb.zarr" / key).read_bytes()
    assert objects.read(key) == content and objects.read(key, 5, 7) == content[5:12]
    assert objects.read(key, -9) == content[-9:] and objects.read(key, -9, 4) == content[-9:-5]
    assert objects.read(key, 5) == content[5:] and objects.read("geopotential/9.9.9.9") is None


def test_a_missing_chunk_is_missing_there_too(server):
    """It reads as zeros: then the store is asked. This one has no consolidated metadata, and is listed."""
    archive = open_archive("s3://bucket/holed.zarr", access=Access(server.options))
    found = archive.read_block(0, 5, ["2m_temperature"])[:, 0]
    assert np.isnan(found[2]).all() and np.isfinite(found[[0, 1, 3, 4]]).all()


def configuration(folder: Path, run: Path, *options: str) -> list[str]:
    path = folder / "tiny.toml"
    path.write_text("""
[data]
variables = ["geopotential:500", "2m_temperature"]
train_period = ["2020-01-01", "2020-01-06"]
validation_period = ["2020-01-07", "2020-01-10"]
cache_gib = 0.0
[model]
attention_backend = "sdpa"
patch_size = [3, 4]
dim = 16
num_layers = 2
num_heads = 2
[training]
steps = 3
local_batch_size = 4
[metrics]
log_freq = 1
enable_tensorboard = false
[checkpoint]
enable = true
async_mode = "disabled"
[validation]
lead_hours = [6]
plots = false
[forecast]
period = ["2020-01-07", "2020-01-07T06"]
num_steps = 20
""")
    return ["--job.config_file", str(path), "--job.dump_folder", str(run), *options]


def test_train_validate_and_forecast_from_a_store_that_fails(server, folder, tmp_path):
    """The losses are those of local files, to the bit, and the forecasts too."""
    local = configuration(tmp_path, tmp_path / "local", "--data.path", str(folder / "training/wb.zarr"))
    cache = ["--data.disk_cache_path", str(tmp_path / "cache"), "--data.disk_cache_gib", "0.01"]
    options = ["--data.path", "s3://bucket/ten.zarr", *server.arguments, *cache]
    remote = configuration(tmp_path, tmp_path / "remote", *options)
    server.set(latency=0.005, error_rate=0.1)
    for arguments in (local, remote):
        train(load_config(arguments))
        assert forecast.forecast(load_config(arguments)) == 0
    here, there = (json_lines(tmp_path / run / "metrics.jsonl") for run in ("local", "remote"))
    assert [each.get("loss") for each in here] == [each.get("loss") for each in there]
    assert any("val/loss" in each for each in there)
    hits = [each["disk_cache_hits"] for each in there if "disk_cache_hits" in each]
    assert max(hits) > 0 and not any("disk_cache_hits" in each for each in here)
    chunks = [
        (tmp_path / run / "forecast.zarr/geopotential/0.0.0.0.0").read_bytes() for run in ("local", "remote")
    ]
    assert chunks[0] == chunks[1] and DiskCache(tmp_path / "cache", 10**8).size() > 0


def test_forecasts_and_climatologies_may_be_behind_urls_too(server, folder, tmp_path):
    truth, leads = analyses()[["2m_temperature"]], np.array([6, 12], "timedelta64[h]")
    made = truth.expand_dims(prediction_timedelta=leads.astype("timedelta64[ns]"), axis=1)
    hours = truth.isel(time=slice(0, 4)).rename(time="hour").assign_coords(hour=[0, 6, 12, 18])
    for name, dataset in (("forecast.zarr", made), ("climatology.zarr", hours)):
        dataset.to_zarr(tmp_path / name, zarr_format=2, consolidated=True)
        upload(server, tmp_path / name, f"bucket/{name}")
    access = Access(server.options, "s3")
    found = open_forecast("s3://bucket/forecast.zarr", access=access)
    assert found.leads.tolist() == leads.astype("timedelta64[s]").tolist() and len(found.times) == 5
    fields = found.read_block(slice(0, 5), slice(0, 2), ["2m_temperature"])
    np.testing.assert_array_equal(fields[:, 1, 0], truth["2m_temperature"].values)
    assert open_climatology("s3://bucket/climatology.zarr", access).hours.tolist() == [0, 6, 12, 18]


def upload(server: S3Server, folder: Path, key: str) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            server.put(f"{key}/{path.relative_to(folder)}", path.read_bytes())


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what goes wrong


def first_error(url: str, *options: str) -> str:
    """One line, within ten seconds or so."""
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        open_archive(url, access=Access(options))
    assert time.monotonic() - began < 20 and "\n" not in str(error.value)
    return str(error.value)


def test_errors_of_a_store_are_one_line(server, monkeypatch):
    anonymous, endpoint = server.options
    assert "no Zarr store (FileNotFoundError: The specified bucket does" in first_error(
        "s3://nowhere/x.zarr", *server.options
    )
    assert "no Zarr store (FileNotFoundError: The specified key" in first_error(
        "s3://bucket/x.zarr", *server.options
    )
    assert "give credentials in the environment" in first_error("s3://forbidden/x.zarr", *server.options)
    given = ("key=AKIAEXAMPLE", "secret=topsecret", endpoint)
    refused = first_error("s3://forbidden/x.zarr", *given)
    assert "403" in refused and "topsecret" not in refused and "AKIAEXAMPLE" not in refused
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"endpoint_url=http://127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(object_store, "PATIENCE_AT_FIRST", 1.0)
        assert "is the address right, and the network there?" in first_error(URL, anonymous, dead)


def test_a_store_that_ends_during_a_run_is_one_line(server, monkeypatch):
    monkeypatch.setattr(object_store, "PATIENCE", 1.0)
    archive = open_archive(URL, access=Access(server.options))
    server.set(error_rate=1.0)
    with pytest.raises(DataError, match="cannot read 's3://bucket/wb.zarr/geopotential/.*tried for [01] s"):
        archive.read_block(0, 5, NAMES)


def test_a_program_ends_with_2(server, tmp_path):
    began = time.monotonic()
    options = ["--data.path", "s3://nowhere/x.zarr", *server.arguments]
    command = [sys.executable, "forecast.py", *configuration(tmp_path, tmp_path / "run", *options)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    lines = [line for line in ended.stderr.splitlines() if line]
    assert ended.returncode == 2 and len(lines) == 1, ended.stderr
    assert lines[0].startswith("rossby: cannot read 's3://nowhere/x.zarr'") and time.monotonic() - began < 60


def test_a_package_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for protocol in ("gs", "gcs"):
        assert "-m pip install gcsfs" in first_error(f"{protocol}://bucket/x.zarr")
    assert "Protocol not known: nfs9" in first_error("nfs9://bucket/x.zarr")


def test_what_may_pass_is_tried_again():
    class Status(OSError):
        def __init__(self, code: int) -> None:
            self.code = code

    passing = [Status(429), Status(500), Status(503), TimeoutError(), ConnectionResetError()]
    assert all(map(is_passing, passing))
    assert not any(map(is_passing, [Status(403), Status(404), PermissionError(), ValueError()]))
    busy = OSError("reduce your request rate")
    busy.__cause__ = Status(503)
    assert is_passing(busy)


# -- options, secrets


def test_options_are_toml_or_text():
    found = parse_storage_options(["anon=true", "endpoint_url=http://h:5000", "key=123", "retries = 4"])
    assert found == {"anon": True, "endpoint_url": "http://h:5000", "key": "123", "retries": 4}
    assert parse_storage_options(["client_kwargs={region_name = 'x'}"]) == {
        "client_kwargs": {"region_name": "x"}
    }
    for wrong in (["anon"], ["anon="], ["anon=true", "anon=false"], ["secret=***"], ["c={token='s3cr'}"]):
        with pytest.raises(ConfigError, match="data.storage_options = ") as error:
            parse_storage_options(wrong)
        assert "s3cr" not in str(error.value)


def test_options_are_for_the_protocol_of_the_data():
    access = Access(("anon=true",), "s3")
    assert access.options_for("s3://b/x") == access.options_for("simplecache::s3://b/x") == {"anon": True}
    assert access.options_for("gs://b/x") == {}


def test_secrets_are_not_written_down():
    options = ["key=AKIA1", "secret=s3cr", "token=anon", 'password="pw d"', "anon=false"]
    text = to_toml(load_config(["--data.storage_options", json.dumps(options)]))
    assert not any(secret in text for secret in ("AKIA1", "s3cr", "pw d"))
    assert '"secret=***"' in text and '"token=anon"' in text and '"anon=false"' in text
    assert without_secrets(f"data.storage_options = {options!r}").count("***") == 3
    assert without_secrets("data.select = ['monkey=1']") == "data.select = ['monkey=1']"


def test_who_has_no_credentials_reads_as_nobody(monkeypatch, tmp_path):
    for name in (*storage_options.AWS_VARIABLES, "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(storage_options, "MACHINE", tmp_path)
    assert anonymous_options("s3", {}) == {"anon": True} and anonymous_options("gs", {}) == {"token": "anon"}
    assert anonymous_options("s3", {"profile": "x"}) == {} == anonymous_options("https", {})
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    assert anonymous_options("s3", {}) == {} == anonymous_options("gs", {})


# -- the cache on a disk


def cached(server: S3Server, folder: Path, gib: float = 1e-3) -> Access:
    return Access(server.options, "s3", str(folder), gib)


def test_what_was_read_once_is_not_asked_for_again(server, tmp_path):
    for count in (2, 0):
        object_store._opened.cache_clear()
        archive = open_archive(URL, access=cached(server, tmp_path))
        server.requests()
        np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(analyses()))
        assert bool(server.requests()) == bool(count)
    for path in [path for path in tmp_path.rglob("*") if len(path.name) == 40]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")  # what a crash may leave
    np.testing.assert_array_equal(archive.read_block(0, 5, NAMES), values(analyses()))
    assert server.requests()


def test_a_changed_store_is_read_anew(server, folder, tmp_path):
    key = "bucket/changed.zarr"
    upload(server, folder / "wb.zarr", key)
    before = open_objects(f"s3://{key}", cached(server, tmp_path)).read("geopotential/0.0.0.0")
    time.sleep(1.1)  # S3 knows seconds
    server.put(f"{key}/geopotential/0.0.0.0", b"other")
    server.put(f"{key}/.zmetadata", (folder / "wb.zarr/.zmetadata").read_bytes())
    object_store._opened.cache_clear()  # as the next start does
    after = open_objects(f"s3://{key}", cached(server, tmp_path)).read("geopotential/0.0.0.0")
    assert after == b"other" != before


def fill(folder: str, limit: int, seed: int) -> None:
    cache, largest = DiskCache(folder, limit), 0
    for number in range(150):
        name = f"{(seed * 37 + number) % 200:040x}"
        content = cache.get(name)
        assert content is None or content == name.encode() * 100
        if content is None:
            cache.put(name, name.encode() * 100)
        largest = max(largest, cache.size())
    os._exit(0 if largest <= limit else 1)


def test_two_processes_keep_the_bound(tmp_path):
    context, limit = multiprocessing.get_context("fork"), 40 * 4016
    started = [context.Process(target=fill, args=(str(tmp_path), limit, seed)) for seed in (0, 1)]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0, 0]
    assert limit / 2 < DiskCache(tmp_path, limit).size() <= limit


def test_the_oldest_goes_first(tmp_path, caplog):
    cache = DiskCache(tmp_path, 3000)
    for number, name in enumerate(("a" * 40, "b" * 40)):
        cache.put(name, bytes(1000))
        os.utime(cache._path(name), (number, number))
    assert cache.get("a" * 40) == bytes(1000)  # used now
    cache.put("c" * 40, bytes(1000))
    assert cache.get("b" * 40) is None and cache.get("a" * 40) and cache.get("c" * 40)
    cache.put("d" * 40, bytes(4000))  # larger than the whole bound
    assert cache.get("d" * 40) is None and cache.size() <= 3000
    (tmp_path / "ee").write_text("a file where a folder belongs")
    with caplog.at_level(logging.WARNING):
        cache.put("e" * 40, bytes(10))
    assert "no more is kept there" in caplog.text and cache.get("e" * 40) is None
    with pytest.raises(DataError, match="data.disk_cache_path = .*: Not a directory; name a folder"):
        DiskCache(tmp_path / "ee/x", 1)
