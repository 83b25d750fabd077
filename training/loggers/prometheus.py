"""Prometheus and other readers of OpenMetrics (prometheus-client, an extra); names: docs/metrics.md."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server  # type: ignore[reportMissingImports]

from checkpoints.files import complete_steps, step_folder
from config import Config
from jobs.heartbeat import activity

# Key of metrics.jsonl -> its name here, and the factor to SI units.
RENAMED = {
    "lr": ("learning_rate", 1),
    "mfu": ("mfu_ratio", 1),
    "tflops": ("model_flops_per_second", 1e12),
    "memory_gib": ("peak_memory_bytes", 2**30),
}


class Logger:
    """Serves the last values from a thread. Raises OSError if the port is taken."""

    def __init__(self, address: str, port: int, config: Config) -> None:
        self.checkpoints, self.started = config.dump_folder / "checkpoints", time.time()
        # Steps between two records and two saves: alerts have their limits in the times that these take.
        self.intervals = {"log": config.metrics.log_freq, "checkpoint": config.checkpoint.interval}
        self.registry, self.gauges = CollectorRegistry(), dict[str, Gauge]()
        ProcessCollector(registry=self.registry)
        values = {"start_timestamp_seconds": self.started, "step_timestamp_seconds": self.started}
        for name, value in (values | {"last_step": config.training.steps, "skipped_steps": 0}).items():
            self._gauge(name).set(value)
        self._gauge("heartbeat_age_seconds").set_function(lambda: time.monotonic() - activity.since)
        if self.checkpoints.is_dir():
            self._gauge("checkpoint_age_seconds").set_function(self._checkpoint_age)
        self.server, _ = start_http_server(port, address, self.registry)

    def _gauge(self, name: str, labels: tuple[str, ...] = ()) -> Gauge:
        if name not in self.gauges:
            self.gauges[name] = Gauge(f"rossby_{name}", "docs/metrics.md", labels, registry=self.registry)
        return self.gauges[name]

    def _checkpoint_age(self) -> float:
        steps = complete_steps(self.checkpoints)
        saved = step_folder(self.checkpoints, steps[-1]).stat().st_mtime if steps else self.started
        return time.time() - saved

    def log(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if value is not None and key.startswith("val/"):
                self._gauge("score", ("name",)).labels(key).set(value)
            elif value is not None:
                name, factor = RENAMED.get(key, (key, 1))
                self._gauge(name).set(value * factor)
        if "loss" in record:
            self._gauge("step_timestamp_seconds").set_to_current_time()
        if "step_seconds" in record:
            for name, steps in self.intervals.items():
                self._gauge(f"{name}_interval_seconds").set(steps * record["step_seconds"])
        if "data_seconds" in record:
            self._gauge("data_wait_ratio").set(record["data_seconds"] / record["step_seconds"])

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
