"""MLflow (an extra): files in the run's folder, or where MLFLOW_TRACKING_URI says."""

import logging
import os
import time
import tomllib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sinks.kept_run import KeptRun
from sinks.sink import scalars

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine; read when imported
# MLflow maintains its store of files no further, and asks who wants it to say so; the others need a database.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

from mlflow import MlflowClient  # type: ignore[reportMissingImports]  # noqa: E402
from mlflow.entities import Metric, Param  # type: ignore[reportMissingImports]  # noqa: E402

logger = logging.getLogger(__name__)
MOST_METRICS, MOST_PARAMS = 1000, 100  # that MLflow takes at once


class MlflowRun:
    """Told in the background, so that a server that is slow holds up no step."""

    def __init__(self, folder: Path, resume_step: int, written: int) -> None:
        self.folder = folder
        store = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlflow").absolute().as_uri())
        self.client = MlflowClient(tracking_uri=store)
        self.kept = KeptRun(folder / "mlflow.json", store, resume_step, written, self._begin)
        if self.kept.continues:
            self.client.update_run(self.kept.id, status="RUNNING")
        self.background, self.telling = ThreadPoolExecutor(1), list[Future]()
        self.failed = False
        logger.info("MLflow: run %s in %s", self.kept.id, store)

    def _begin(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rossby")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        run = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
        params = self._params()
        for start in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(run, params=params[start : start + MOST_PARAMS])
        return run

    def _params(self) -> list[Param]:
        """The configuration, "model.dim" and so on."""
        path = self.folder / "config.toml"
        sections = tomllib.loads(path.read_text()) if path.exists() else {}
        return [
            Param(f"{s}.{key}", str(value)) for s, keys in sections.items() for key, value in keys.items()
        ]

    def write(self, record: dict[str, Any]) -> None:
        """Raises what MLflow made of a record before this one."""
        for done in [each for each in self.telling if each.done()]:
            self.telling.remove(done)
            done.result()
        if self.kept.lacks(record["step"]):
            self.telling.append(self.background.submit(self._tell, record["step"], scalars(record)))

    def _tell(self, step: int, values: dict[str, float]) -> None:
        now = round(time.time() * 1000)
        metrics = [Metric(key_of(name), value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            if not self.failed:
                self.failed = True  # unless the next line returns: what waits is not tried then, too
                self.client.log_batch(self.kept.id, metrics=metrics[start : start + MOST_METRICS])
                self.failed = False

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        if self.kept.lacks(step):
            self.telling.append(self.background.submit(self._send, step, dict(pictures), scorecard))

    def _send(self, step: int, pictures: dict[str, Path], scorecard: str) -> None:
        for path in pictures.values():
            self.client.log_artifact(self.kept.id, str(path), f"validation/step-{step:08d}")
        self.client.log_text(self.kept.id, scorecard, f"validation/step-{step:08d}/scorecard.txt")

    def go_back(self, step: int) -> None:
        self.kept.go_back()

    def close(self) -> None:
        self.background.shutdown()
        for each in self.telling:
            each.result()
        self.client.set_terminated(self.kept.id)


def key_of(name: str) -> str:
    """MLflow's keys have no "@": val/rmse/geopotential:500-24h."""
    return name.replace("@", "-")
