"""Use, memory and power of the GPUs of this host, by NVML (nvidia-ml-py, an extra)."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily  # type: ignore[reportMissingImports]
from prometheus_client.registry import Collector  # type: ignore[reportMissingImports]

logger = logging.getLogger(__name__)


def open_nvml() -> Any:
    """The library's module, ready to be asked; None where there are no GPUs, or no nvidia-ml-py."""
    try:
        import pynvml  # type: ignore[reportMissingImports]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver: no GPU
        logger.info("no GPU metrics: %s", error)
        return None
    return pynvml


class GraphicsCards(Collector):
    """All GPUs that NVML shows, by its own numbers, whoever uses them."""

    def __init__(self) -> None:
        self.nvml = open_nvml()
        count = self.nvml.nvmlDeviceGetCount() if self.nvml else 0
        self.cards = [self.nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        if not self.cards:
            return
        nvml = self.nvml
        asked: dict[str, tuple[str, Callable[[Any], float]]] = {
            "rossby_gpu_utilization_ratio": (
                "Part of the time that a kernel ran",
                lambda card: nvml.nvmlDeviceGetUtilizationRates(card).gpu / 100,
            ),
            "rossby_gpu_memory_used_bytes": (
                "Memory in use, by whomever",
                lambda card: nvml.nvmlDeviceGetMemoryInfo(card).used,
            ),
            "rossby_gpu_power_watts": ("Power", lambda card: nvml.nvmlDeviceGetPowerUsage(card) / 1000),
        }
        for name, (about, ask) in asked.items():
            family = GaugeMetricFamily(name, about, labels=["gpu"])
            for index, card in enumerate(self.cards):
                try:
                    family.add_metric([str(index)], ask(card))
                except nvml.NVMLError:  # this card does not know, as one that is cut into MIG instances
                    continue
            yield family
