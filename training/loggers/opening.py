"""Loggers of a run besides metrics.jsonl: opening them on each rank, and handling of failures."""

import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from config import Config, Metrics
from errors import refuse, without_secrets

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

    def open(self, name: str, module: str, *arguments: Any) -> None:
        """Open the `Logger` of a module in this folder, which may import an extra package."""

        def create() -> Any:
            return import_module(f"training.loggers.{module}").Logger(*arguments)

        if opened := self._try(name, create):
            self.loggers[name] = opened

    def call(self, method: str, *arguments: Any) -> None:
        for name, each in list(self.loggers.items()):
            if hasattr(each, method):
                self._try(name, getattr(each, method), *arguments)

    def _try(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:  # of a library or its server: any
            text = without_secrets(" ".join(f"{error}".split()))[:300]
            logger.warning("%s: %s (%s); the run goes on without it", name, text, type(error).__name__)
            self.loggers.pop(name, None)


def open_loggers(config: Config, resume_step: int, written: int) -> Loggers:
    """Open those of this rank: on rank 0 those of the run, on the first rank of each host Prometheus.

    written: the last step that the start before logged.
    """
    loggers, settings = Loggers(), config.metrics
    for name in settings.loggers if dist.get_rank() == 0 else ():
        loggers.open(name, f"{name}_run", config, resume_step, written)
    if settings.prometheus and os.environ.get("LOCAL_RANK", "0") == "0":
        name, where = f"metrics.prometheus = {settings.prometheus}", address_and_port(settings.prometheus)
        loggers.open(name, "prometheus", *where, config)
    return loggers
