"""What Prometheus and others who read OpenMetrics are answered (prometheus-client, an extra).

docs/metrics.md lists the names; docs/grafana/ has a dashboard and rules for alerts.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server  # type: ignore[reportMissingImports]
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
    "exposed_communication": (
        "rossby_exposed_communication_ratio",
        1,
        "Part of a step of the newest trace in which nothing but a collective ran",
    ),
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


class OpenMetrics(Collector):
    """Serves from a thread what it was told last, and what it looks up when it is asked: ages, memory of the
    host. Raises OSError where the port is taken.
    """

    def __init__(self, address: str, port: int, folder: Path, steps: int) -> None:
        self.checkpoints, self.steps = folder / "checkpoints", steps
        self.started = self.logged_at = time.time()
        self.told: dict[str, float] = {"skipped_steps": 0}  # as metrics.jsonl names it -> the last value
        registry = CollectorRegistry()
        for collector in (self, GraphicsCards(), ProcessCollector(registry=None)):
            registry.register(collector)
        self.server, _ = start_http_server(port, address, registry)
        logger.info("metrics: http://%s:%d/metrics", address, port)

    def write(self, record: dict[str, Any]) -> None:
        known = {key: value for key, value in (record | data_wait(record)).items() if value is not None}
        self.told = self.told | known  # another one: the thread may be reading the one before
        if "loss" in record:
            self.logged_at = time.time()

    def go_back(self, step: int) -> None:
        self.write({"step": step})

    def show(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        """Prometheus has numbers alone."""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        told = self.told
        for key, (name, factor, about) in LOGGED.items():
            if key in told:
                yield GaugeMetricFamily(name, about, told[key] * factor)
        parts = {key.removeprefix(PART): value for key, value in told.items() if key.startswith(PART)}
        yield labelled("rossby_part_seconds", "Seconds a step in a part of it", "part", parts)
        scores = {key: value for key, value in told.items() if key.startswith(SCORE)}
        about = "Scores of the last validation, as metrics.jsonl names them"
        yield labelled("rossby_score", about, "name", scores)
        for name, (about, value) in self._now().items():
            yield GaugeMetricFamily(name, about, value)
        yield labelled("rossby_host_memory_bytes", "Memory of this host", "kind", host_memory_now())

    def _now(self) -> dict[str, tuple[str, float]]:
        found = {
            "rossby_last_step": ("The step that ends the run", self.steps),
            "rossby_restarts": ("Times that the launcher has started the ranks again", restarts()),
            "rossby_start_timestamp_seconds": ("When this process began to train", self.started),
            "rossby_step_timestamp_seconds": ("When the last step was logged, or the start", self.logged_at),
            "rossby_heartbeat_age_seconds": ("Since the last sign of life of this rank", activity.seconds),
        }
        if self.checkpoints.is_dir():
            about = "Since the newest complete checkpoint was written, or since the start without one"
            found["rossby_checkpoint_age_seconds"] = (about, time.time() - self._saved_at())
        return found

    def _saved_at(self) -> float:
        steps = complete_steps(self.checkpoints)
        return step_folder(self.checkpoints, steps[-1]).stat().st_mtime if steps else self.started


def labelled(name: str, about: str, label: str, values: dict[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, about, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family


def data_wait(record: dict[str, Any]) -> dict[str, float]:
    return {"data_wait": record["data_seconds"] / record["step_seconds"]} if "data_seconds" in record else {}


def restarts() -> int:
    """Of this job: torchelastic numbers the attempts."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def host_memory_now() -> dict[str, float]:
    """Bytes, "total" and "available"; nothing where there is no /proc."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {name: line.split()[1] for line in lines if (name := line.partition(":")[0]) in MEMORY}
    return {MEMORY[name]: int(kib) * 1024 for name, kib in found.items()}
