"""Loggers of a run besides metrics.jsonl: opening them on each rank, and handling of failures."""

import json
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.distributed as dist

from config import Config, Metrics
from errors import refuse, without_secrets
from jobs.durable_files import write_durably

logger = logging.getLogger(__name__)
EXTRAS = {  # as in requirements-extras.txt
    "wandb": "wandb==0.30.0",
    "prometheus": "prometheus-client==0.26.0",
}


def check_loggers(settings: Metrics) -> None:
    """Raise ConfigError if a package that is asked for is not installed, or metrics.prometheus is wrong."""
    asked: dict[str, tuple[str, Any]] = {
        name: ("metrics.loggers", settings.loggers) for name in settings.loggers if name in EXTRAS
    }
    if settings.prometheus:
        asked["prometheus"] = ("metrics.prometheus", settings.prometheus)
        address_and_port(settings.prometheus)
    for name, (key, value) in asked.items():
        package = EXTRAS[name].partition("==")[0]
        try:
            version(package)
        except PackageNotFoundError:
            fix = f"{sys.executable} -m pip install {EXTRAS[name]}"
            refuse(key, value, f"needs {package}, which is not installed; {fix}")


def address_and_port(text: str) -> tuple[str, int]:
    """Return ("127.0.0.1", 9400) of "127.0.0.1:9400". Raises ConfigError."""
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal() or not 0 < int(port) < 2**16:
        refuse("metrics.prometheus", text, 'write address:port, for example "127.0.0.1:9400"')
    return address, int(port)


class Loggers:
    """Loggers by name. After its first error a logger is closed with a warning; the run continues.

    A logger has the methods log(record) and close(), and may have restart(step), after which later steps come
    again. The logger "wandb" of metrics.loggers is `Logger(config, resume_step, written)` in wandb_run.py.
    """

    def __init__(self) -> None:
        self.loggers: dict[str, Any] = {}

    def call(self, method: str, argument: Any = None) -> None:
        """Call a method of all loggers that have it."""
        for name, opened in list(self.loggers.items()):
            if use := getattr(opened, method, None):
                self.attempt(name, use if argument is None else partial(use, argument))

    def attempt(self, name: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call for this logger, None after an error."""
        try:
            return call()
        except Exception as error:  # of a library or its server: any
            text = without_secrets(" ".join(f"{error}".split()))[:300]
            logger.warning("%s: %s (%s); the run goes on without it", name, text, type(error).__name__)
            self.loggers.pop(name, None)


def open_loggers(config: Config, resume_step: int, written: int) -> Loggers:
    """Open those of this rank: on rank 0 those of the run, on the first rank of each host Prometheus.

    written: the last step that the start before logged.
    """
    loggers, settings = Loggers(), config.metrics
    openings: dict[str, Callable[[], Any]] = {}  # which may import an extra package
    for name in settings.loggers if dist.get_rank() == 0 else ():
        module = f"training.loggers.{name}_run"
        openings[name] = lambda module=module: import_module(module).Logger(config, resume_step, written)
    if settings.prometheus and os.environ.get("LOCAL_RANK", "0") == "0":
        address, port = address_and_port(settings.prometheus)
        module = "training.loggers.prometheus"
        openings[f"metrics.prometheus = {settings.prometheus}"] = lambda: import_module(module).Logger(
            address, port, config
        )
    for name, open_logger in openings.items():
        if opened := loggers.attempt(name, open_logger):
            loggers.loggers[name] = opened
    return loggers


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record, by TensorBoard's names: "train/loss", "val/loss"."""
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in record.items()
        if name != "step" and value is not None and math.isfinite(value)
    }


class StoredRun:
    """The id of a run at W&B, which only appends, and the last step there, in a file of the run's folder: one
    id across resumes, each step once.
    """

    def __init__(self, path: Path, resume_step: int, written: int) -> None:
        """written: the last step that the start before logged."""
        before = json.loads(path.read_text()) if resume_step > 0 and path.exists() else {}
        self.id: str = before.get("id") or uuid.uuid4().hex
        self.last = self.newest = max(before["last_step"], written) if before else -1
        write_durably(path, json.dumps({"id": self.id, "store": "wandb", "last_step": self.last}))

    def lacks(self, step: int) -> bool:
        """Return True if W&B does not have this step; repeated steps are not sent again."""
        self.newest = max(self.newest, step)
        return step > self.last

    def restart(self) -> None:
        self.last = self.newest
