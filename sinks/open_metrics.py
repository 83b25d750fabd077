"""What Prometheus and others who read OpenMetrics are answered (prometheus-client, an extra).

docs/metrics.md lists the names; docs/grafana/ has a dashboard and rules for alerts.
"""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server  # type: ignore[reportMissingImports]
from prometheus_client.core import GaugeMetricFamily  # type: ignore[reportMissingImports]
from prometheus_client.registry import Collector  # type: ignore[reportMissingImports]

from checkpoints.files import complete_steps, step_folder
from jobs.heartbeat import activity
from sinks.graphics_cards import GraphicsCards

logger = logging.getLogger(__name__)
# Key of metrics.jsonl -> name and unit here, factor, what it is.
LOGGED = {
    "step": ("rossby_step", 1, "Last logged step"),
    "epoch": ("rossby_epoch", 1, "Passes through the training dates"),
    "loss": ("rossby_loss", 1, "Training loss of the last logged step"),
    "grad_norm": ("rossby_grad_norm", 1, "Norm of the gradient before clipping"),
    "lr": ("rossby_learning_rate", 1, "Learning rate"),
    "samples_per_second": ("rossby_samples_per_second", 1, "Samples a second over all ranks"),
    "step_seconds": ("rossby_step_seconds", 1, "Seconds a step"),
    "data_wait": ("rossby_data_wait_ratio", 1, "Part of a step that this rank waits for data"),
    "mfu": ("rossby_mfu_ratio", 1, "Model FLOP/s over the peak of the device"),
    "tflops": ("rossby_model_flops_per_second", 1e12, "Model FLOP/s of a device"),
    "memory_gib": (
        "rossby_peak_memory_bytes",
        2**30,
        "Peak so far: of the CUDA allocator, else of the process",
    ),
    "skipped_steps": ("rossby_skipped_steps", 1, "Bad steps that were skipped since this start"),
}
PART, SCORE = "seconds/", "val/"
MEMORY = {"MemTotal": "total", "MemAvailable": "available"}  # of /proc/meminfo


class OpenMetrics:
    """Serves from a thread. Raises OSError where the port is taken."""

    def __init__(self, address: str, port: int, folder: Path, steps: int) -> None:
        self.registry = CollectorRegistry()
        self.logged = {key: self._gauge(name, about) for key, (name, _, about) in LOGGED.items()}
        self.logged_at = self._gauge(
            "rossby_step_timestamp_seconds", "When the last step was logged, or the start"
        )
        self.parts = self._gauge("rossby_part_seconds", "Seconds a step in a part of it", "part")
        self.scores = self._gauge(
            "rossby_score", "Scores of the last validation, as metrics.jsonl names them", "name"
        )
        self._gauge("rossby_last_step", "The step that ends the run").set(steps)
        self._gauge("rossby_restarts", "Times that the launcher has started the ranks again").set(restarts())
        self._gauge(
            "rossby_start_timestamp_seconds", "When this process began to train"
        ).set_to_current_time()
        self.logged["skipped_steps"].set(0)
        self.logged_at.set_to_current_time()
        ProcessCollector(registry=self.registry)
        self.registry.register(Now(folder / "checkpoints", time.time()))
        self.registry.register(GraphicsCards())
        self.server, _ = start_http_server(port, address, self.registry)
        logger.info("metrics: http://%s:%d/metrics", address, port)

    def _gauge(self, name: str, about: str, *labels: str) -> Gauge:
        return Gauge(name, about, labels, registry=self.registry)

    def write(self, record: dict[str, Any]) -> None:
        values = record | data_wait(record)
        for key, value in values.items():
            if value is None:
                continue
            if key in LOGGED:
                self.logged[key].set(value * LOGGED[key][1])
            elif key.startswith(PART):
                self.parts.labels(key.removeprefix(PART)).set(value)
            elif key.startswith(SCORE):
                self.scores.labels(key).set(value)
        if "loss" in record:
            self.logged_at.set_to_current_time()

    def go_back(self, step: int) -> None:
        self.logged["step"].set(step)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def data_wait(record: dict[str, Any]) -> dict[str, float]:
    return {"data_wait": record["data_seconds"] / record["step_seconds"]} if "data_seconds" in record else {}


def restarts() -> int:
    """Of this job: its launcher numbers the attempts."""
    return int(os.environ.get("ROSSBY_ATTEMPT", "0"))


class Now(Collector):
    """What is looked up when somebody asks: ages, and the memory of this host."""

    def __init__(self, checkpoints: Path, started: float) -> None:
        self.checkpoints, self.started = checkpoints, started

    def collect(self) -> Iterator[GaugeMetricFamily]:
        about = "Seconds since the trainer of this rank has last shown a sign of life"
        yield GaugeMetricFamily("rossby_heartbeat_age_seconds", about, activity.seconds)
        if self.checkpoints.is_dir():
            about = "Seconds since the newest complete checkpoint was written, or since the start without one"
            yield GaugeMetricFamily("rossby_checkpoint_age_seconds", about, self._checkpoint_age())
        memory = GaugeMetricFamily("rossby_host_memory_bytes", "Memory of this host", labels=["kind"])
        for kind, value in host_memory_now().items():
            memory.add_metric([kind], value)
        yield memory

    def _checkpoint_age(self) -> float:
        newest = self.started
        if steps := complete_steps(self.checkpoints):
            newest = step_folder(self.checkpoints, steps[-1]).stat().st_mtime
        return time.time() - newest


def host_memory_now() -> dict[str, float]:
    """Bytes, "total" and "available"; nothing where there is no /proc."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {name: line.split()[1] for line in lines if (name := line.partition(":")[0]) in MEMORY}
    return {MEMORY[name]: int(kib) * 1024 for name, kib in found.items()}
