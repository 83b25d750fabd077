"""Where metrics go beside metrics.jsonl: one file a library, each told every record."""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from config import Metrics
from errors import refuse
from sinks.sink import Guarded, Sink
from sinks.tensorboard import TensorBoard

# Key of the configuration -> what it needs, as requirements-extras.txt has it.
EXTRAS = {
    "enable_wandb": "wandb==0.30.0",
    "enable_mlflow": "mlflow-skinny==3.17.2",
    "prometheus_port": "prometheus-client==0.26.0",
}


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
