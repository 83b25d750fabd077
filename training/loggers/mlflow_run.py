"""MLflow (an extra): files in the run's folder, or the store of MLFLOW_TRACKING_URI."""

import os
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from config import Config
from training.loggers.stored_run import StoredRun, scalars

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine; read at the import
os.environ.setdefault(
    "MLFLOW_ALLOW_FILE_STORE", "true"
)  # not maintained any more; the others need a database

from mlflow import MlflowClient  # type: ignore[reportMissingImports]  # noqa: E402
from mlflow.entities import Metric, Param  # type: ignore[reportMissingImports]  # noqa: E402


class Logger:
    """Sends from a thread, so that a slow server delays no step."""

    def __init__(self, config: Config, resume_step: int, written: int) -> None:
        self.folder = folder = config.dump_folder
        store = os.environ.get("MLFLOW_TRACKING_URI", (folder / "mlflow").absolute().as_uri())
        self.client = MlflowClient(tracking_uri=store)
        self.stored = StoredRun(folder / "mlflow.json", store, resume_step, written, self._create)
        self.client.update_run(self.stored.id, status="RUNNING")
        self.thread, self.last = ThreadPoolExecutor(1), Future[None]()

    def _create(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rossby")
        found = self.client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self.client.create_experiment(name)
        run = self.client.create_run(experiment, run_name=self.folder.name).info.run_id
        path = self.folder / "config.toml"
        sections = tomllib.loads(path.read_text()) if path.exists() else {}
        params = [Param(f"{s}.{key}", str(value)) for s in sections for key, value in sections[s].items()]
        self.client.log_batch(run, params=params)
        return run

    def _send(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Queue a call. Raises the error of the one before, and gives up what waits."""
        if self.last.done() and self.last.exception():
            self.thread.shutdown(wait=False, cancel_futures=True)
            self.last.result()
        self.last = self.thread.submit(call, *arguments)

    def log(self, record: dict[str, Any]) -> None:
        step, now = record["step"], round(time.time() * 1000)
        if self.stored.lacks(step):  # MLflow allows no "@" in a name
            values = scalars(record).items()
            metrics = [Metric(name.replace("@", "-"), value, now, step) for name, value in values]
            self._send(self.client.log_batch, self.stored.id, metrics)

    def restart(self, step: int) -> None:
        self.stored.restart()

    def close(self) -> None:
        self._send(self.client.set_terminated, self.stored.id)
        self.thread.shutdown()
        self.last.result()
