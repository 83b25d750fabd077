"""Loggers of TensorBoard, W&B and Prometheus, read with their own readers."""

import json
import math
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config import Config, Job, Training
from config import Metrics as Settings
from errors import ConfigError
from tests.planned import run_train
from tests.started_jobs import ROOT, VALIDATION, losses, run_options, write_config
from tests.test_metrics import CONTRACT
from training.loggers.opening import EXTRAS, Loggers, StoredRun, check_loggers, open_loggers
from training.loggers.tensorboard_run import Logger as TensorBoard

GRAFANA = ROOT / "docs/grafana"


def config_of(folder: Path, settings: Settings) -> Config:
    return Config(job=Job(dump_folder=str(folder)), metrics=settings, training=Training(steps=10))


# -- what is asked for and absent


@pytest.mark.parametrize(("name", "package"), EXTRAS.items())
def test_an_extra_that_is_absent_is_one_line(name, package, monkeypatch):
    asked = Settings(loggers=(name,)) if name != "prometheus" else Settings(prometheus="127.0.0.1:9400")  # type: ignore[arg-type]
    monkeypatch.setattr("training.loggers.opening.version", Mock(side_effect=PackageNotFoundError))
    with pytest.raises(ConfigError, match=rf"metrics\..*: needs .*-m pip install {package}"):
        check_loggers(asked)
    check_loggers(Settings())
    assert package in (ROOT / "requirements-extras.txt").read_text()


def test_a_logger_that_cannot_be_imported_is_a_warning(one_rank, tmp_path, caplog):
    config = config_of(tmp_path, Settings(loggers=("no_such",)))  # type: ignore[arg-type]
    assert not open_loggers(config, 0, 0).loggers and "goes on without it" in caplog.text


def test_a_logger_that_fails_costs_one_warning(caplog):
    class Broken:
        def log(self, record: dict[str, Any]) -> None:
            raise ConnectionError("https://user:password@host is\nnot there")

    loggers = Loggers()
    loggers.loggers["Somebody's"] = Broken()
    for step in range(3):
        loggers.call("log", {"step": step})
    loggers.call("close")
    assert [record.message for record in caplog.records] == [
        "Somebody's: https://***@host is not there (ConnectionError); the run goes on without it"
    ]


def test_tensorboard_shows_validations(tmp_path):
    logger = TensorBoard(config_of(tmp_path, Settings()), 0, 0)
    logger.log({"step": 20, "val/loss": 0.5, "val/rmse/a": 1.0, "val/rmse_persistence/a": 2.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (score,) = events.Scalars("val/rmse/a")
    assert (score.step, score.value) == (20, 1.0)
    (text,) = events.Tensors("config/text_summary")
    assert b"    local_batch_size = " in text.tensor_proto.string_val[0]


def test_a_store_that_only_appends_is_told_each_step_once(tmp_path):
    path = tmp_path / "run.json"
    first = StoredRun(path, 0, 0)
    assert all(first.lacks(step) for step in (1, 2, 3, 3))  # a validation has its step's number
    first.restart()
    assert [first.lacks(step) for step in (2, 3, 4)] == [False, False, True]
    second = StoredRun(path, 2, 7)  # killed after step 7, and again after step 3
    third = StoredRun(path, 2, 3)
    assert second.id == third.id == first.id
    assert [third.lacks(step) for step in (3, 7, 8)] == [False, False, True]
    assert StoredRun(path, 0, 8).id != first.id


# -- Weights & Biases: one run across a resume


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """The folder of a run of 8 steps that took steps 5 and 6 twice."""
    pytest.importorskip("wandb", reason="requirements-extras.txt")
    folder = tmp_path_factory.mktemp("loggers")
    run, config = folder / "run", write_config(folder)
    options = run_options(config, run, "--checkpoint.interval", "4", '--metrics.loggers=["wandb"]')
    options += VALIDATION
    run_train(*options, "--training.steps", "6")
    shutil.rmtree(run / "checkpoints/step-00000006")
    run_train(*options, "--training.steps", "8")
    assert sorted(losses(run)) == list(range(1, 9))
    return run


@pytest.mark.slow
def test_wandb_has_the_losses_of_the_run_once(resumed):
    files = sorted(resumed.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1  # both of one run
    rows = []
    for file in files:
        command = [sys.executable, "-m", "wandb", "leet", "inspect", str(file)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for record in shown.split("\n# record ")[1:]:
            if record.partition("\n")[0].endswith(": history"):
                items = dict(re.findall(r'nested_key: "(.*)"\n\s*value_json: "(.*)"', record))
                rows.append((float(items["_step"]), float(items["train/loss"])))
    assert rows == sorted(losses(resumed).items())


# -- Prometheus


@pytest.fixture
def served(one_rank, tmp_path) -> Iterator[tuple[Any, str]]:
    pytest.importorskip("prometheus_client", reason="requirements-extras.txt")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (tmp_path / "checkpoints").mkdir()  # as the Checkpointer has made it
    settings = Settings(loggers=(), prometheus=f"127.0.0.1:{port}")
    loggers = open_loggers(config_of(tmp_path, settings), 0, 0)
    yield loggers, f"http://127.0.0.1:{port}/metrics"
    loggers.call("close")


def values_of(url: str) -> dict[str, float]:
    """As the library's own reader has them, of OpenMetrics."""
    from prometheus_client.openmetrics.parser import (  # type: ignore[reportMissingImports]
        text_string_to_metric_families,
    )

    accepted = {"Accept": "application/openmetrics-text; version=1.0.0"}
    with urllib.request.urlopen(urllib.request.Request(url, headers=accepted), timeout=10) as answer:
        text = answer.read().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {" ".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}


def test_open_metrics_are_what_was_told(served, tmp_path):
    loggers, url = served
    before = values_of(url)
    assert before["rossby_last_step"] == 10 and before["rossby_skipped_steps"] == 0
    assert not {"rossby_loss", "rossby_mfu_ratio"} & before.keys()
    record = {"step": 3, "loss": 0.5, "mfu": None, "memory_gib": 2.0}
    record |= {"step_seconds": 0.4, "data_seconds": 0.1}
    loggers.call("log", record)
    loggers.call("log", {"step": 3, "val/rmse/geopotential:500@24h": 70.0})
    (tmp_path / "checkpoints/step-00000002").mkdir()
    after = values_of(url)
    assert (after["rossby_step"], after["rossby_loss"], after["rossby_data_wait_ratio"]) == (3, 0.5, 0.25)
    assert after["rossby_peak_memory_bytes"] == 2**31
    assert after["rossby_score val/rmse/geopotential:500@24h"] == 70 and "rossby_mfu_ratio" not in after
    assert 0 <= after["rossby_checkpoint_age_seconds"] < 60 and after["rossby_heartbeat_age_seconds"] >= 0
    loggers.call("log", {"step": 4, "loss": math.nan})
    assert math.isnan(values_of(url)["rossby_loss"])


def test_a_port_that_is_taken_costs_one_warning(served, tmp_path, caplog):
    url = served[1]
    settings = Settings(loggers=(), prometheus=urllib.parse.urlsplit(url).netloc)
    second = open_loggers(config_of(tmp_path, settings), 0, 0)
    second.call("log", {"step": 1, "loss": 1.0})
    second.call("close")
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(r"metrics.prometheus = [\d.:]+: .*in use.*; the run goes on without it", said)
    assert "rossby_loss" not in values_of(url)


def test_the_rules_fire_when_they_should():
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (apt install prometheus)")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *command], cwd=GRAFANA, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_panels_and_alerts_ask_for_what_is_served(served):
    """Without those of other programs: GPUs, the host."""
    loggers, url = served
    loggers.call("log", dict.fromkeys(CONTRACT, 1.0) | {"val/loss": 1.0})
    panels = json.loads((GRAFANA / "rossby.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel["targets"]]
    asked += re.findall(r"expr: (.*)", (GRAFANA / "alerts.yml").read_text())
    names = set(re.findall(r"\b(?:rossby|process)_\w+", " ".join(asked)))
    assert len(names) > 15 and names <= {sample.partition(" ")[0] for sample in values_of(url)}
