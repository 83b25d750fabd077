"""Where metrics go beside metrics.jsonl: one file a library, each told every record. What fails there costs a
warning, never the run.
"""

import logging
import math
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

from config import Metrics
from errors import refuse, without_secrets
from sinks.tensorboard import TensorBoard

logger = logging.getLogger(__name__)
# Key of the configuration -> what it needs, as requirements-extras.txt has it.
EXTRAS = {
    "enable_wandb": "wandb==0.30.0",
    "enable_mlflow": "mlflow-skinny==3.17.2",
    "prometheus_port": "prometheus-client==0.26.0",
}


class Sink(Protocol):
    def write(self, record: dict[str, Any]) -> None:
        """A logged step or a validation: "step" and numbers, None or not finite where there is none."""
        ...

    def go_back(self, step: int) -> None:
        """The steps after `step` are going to be done again."""
        ...

    def close(self) -> None: ...


def check_sinks(settings: Metrics) -> None:
    """ConfigError: a package that is asked for is not installed."""
    for key, package in EXTRAS.items():
        name = package.partition("==")[0]
        if getattr(settings, key) and not _is_installed(name):
            fix = f"{sys.executable} -m pip install {package}"
            refuse(f"metrics.{key}", getattr(settings, key), f"needs {name}, which is not installed; {fix}")


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def open_sinks(
    settings: Metrics, folder: Path, resume_step: int, written: int, steps: int, is_first: bool
) -> list[Sink]:
    """Those of this rank: the first writes the run's record, and the first of each host answers Prometheus.

    written: the last step that the start before has logged.
    """
    sinks: list[Sink] = []
    if is_first and settings.enable_tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard", resume_step))
    if is_first and settings.enable_wandb:
        from sinks.wandb_run import WandbRun  # an extra, as those below

        sinks.append(Guarded("Weights & Biases", lambda: WandbRun(folder, resume_step, written)))
    if is_first and settings.enable_mlflow:
        from sinks.mlflow_run import MlflowRun

        sinks.append(Guarded("MLflow", lambda: MlflowRun(folder, resume_step, written)))
    if settings.prometheus_port and os.environ.get("LOCAL_RANK", "0") == "0":
        from sinks.open_metrics import OpenMetrics

        where = (settings.prometheus_address, settings.prometheus_port)
        name = f"metrics.prometheus_port = {settings.prometheus_port}"
        sinks.append(Guarded(name, lambda: OpenMetrics(*where, folder, steps)))
    return sinks


class Guarded:
    """A sink of somebody else's library: its first error is one warning, and the end of it alone."""

    def __init__(self, name: str, open_sink: Callable[[], Sink]) -> None:
        self.name = name
        self.sink: Sink | None = self._tried(open_sink)

    def _tried(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # whatever its library or its server makes of it
            text = without_secrets(" ".join(f"{error}".split()))[:300]
            logger.warning("%s: %s (%s); the run goes on without it", self.name, text, type(error).__name__)
            self.sink = None

    def write(self, record: dict[str, Any]) -> None:
        if sink := self.sink:
            self._tried(lambda: sink.write(record))

    def go_back(self, step: int) -> None:
        if sink := self.sink:
            self._tried(lambda: sink.go_back(step))

    def close(self) -> None:
        if sink := self.sink:
            self._tried(sink.close)


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a record under the names that TensorBoard has: "train/loss", "val/loss"."""
    return {
        name if "/" in name else f"train/{name}": float(value)
        for name, value in record.items()
        if name != "step" and value is not None and math.isfinite(value)
    }
