"""A cluster as the planner sees it: devices, the links between them, and what they cost.

All figures are in base units: bytes, seconds, FLOP/s, bytes/s, dollars. Where devices are shared (the
ranks on a CPU), a node's figures are divided among its ranks.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from errors import ConfigError
from planning.constants import ORDINARY, SCORE_BYTES

PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16", "float8": "fp8"}
# Of model.attention_backend: cuDNN's, which torch 2.11 chooses by itself ("sdpa": benchmarks/gpu.sh on an
# H100), and FlashAttention-3 or -4; "auto" takes one of these.
HOPPER_KERNELS = ("auto", "sdpa", "cudnn", "flash3", "flash4")


@dataclass(frozen=True)
class Device:
    """One GPU, or the part of a CPU that a rank has."""

    name: str
    memory: int  # bytes, all that torch sees
    reserved: int  # bytes of it lost to the CUDA context, NCCL's buffers and fragmentation
    peak: dict[str, float]  # FLOP/s by precision, dense, from the data sheet
    matmul: dict[str, float]  # FLOP/s by precision that large matrix products reach
    attention_forward: dict[int, float]  # bf16 FLOP/s by head size: 4 T^2 d of them, not causal
    attention_backward: dict[int, float]  # the same, of 8 T^2 d
    hopper_forward: dict[int, float]  # those of kernels made for Hopper or later; empty: there are none
    hopper_backward: dict[int, float]
    bandwidth: float  # bytes/s, read and written, that elementwise kernels reach
    float32_attention: float = 0.0  # over that in bf16; 0: as in matrix products

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """One product forward, two backward."""
        if not backward:
            return self.product_seconds(1, rows, inputs, outputs, dtype)
        of_input = self.product_seconds(1, rows, outputs, inputs, dtype)
        return of_input + self.product_seconds(1, outputs, rows, inputs, dtype)

    def product_seconds(self, number: int, rows: int, inputs: int, outputs: int, dtype: str) -> float:
        """Seconds of `number` products of matrices.

        A tile of the output is written when it is computed, which takes longer than computing it where a row
        has few inputs: those of a narrow model, or of one of many tensor-parallel ranks.
        """
        rate = ORDINARY * self.matmul.get(PRECISION[dtype], self.matmul["bf16"])
        written = (4 if dtype == "float32" else 2) * rows * outputs
        return number * (2 * rows * inputs * outputs / rate + written / self.bandwidth)

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """4 T^2 E FLOPs of a head forward, 8 backward."""
        if backend == "math":  # each product writes or reads all T^2 scores, and so does every pass between
            shapes = (tokens, head_dim, tokens), (tokens, tokens, head_dim)  # half of the products each
            products = sum(self.product_seconds(batch * heads, *shape, dtype) for shape in shapes)
            scores = SCORE_BYTES[dtype != "float32"][backward] * batch * heads * tokens**2
            return (2 if backward else 1) * products + self.elementwise_seconds(scores)
        rates = self.attention_backward if backward else self.attention_forward
        if backend in HOPPER_KERNELS and self.hopper_forward:
            rates = self.hopper_backward if backward else self.hopper_forward
        rate = rates[min(rates, key=lambda size: abs(size - head_dim))]
        if dtype == "float32":
            rate *= self.float32_attention or self.matmul["fp32"] / self.matmul["bf16"]
        return (8 if backward else 4) * batch * heads * tokens**2 * head_dim / rate

    def elementwise_seconds(self, size: float, operation: str = "copy") -> float:
        """Seconds to read and write `size` bytes in all, whatever the operation."""
        return size / self.bandwidth

    def scaled(self, factor: float) -> "Device":
        """Memory and rates times `factor`. What a process or an operator costs stays what it was."""
        tables = ("peak", "matmul", "attention_forward", "attention_backward")
        rates = {name: {key: factor * rate for key, rate in getattr(self, name).items()} for name in tables}
        memory, bandwidth = round(self.memory * factor), self.bandwidth * factor
        return dataclasses.replace(self, memory=memory, bandwidth=bandwidth, **rates)


@dataclass(frozen=True)
class Link:
    """A message of s bytes takes latency + s / bandwidth."""

    latency: float  # seconds of one step of a ring
    bandwidth: float  # bytes/s sent while as many are received (NCCL's bus bandwidth)


@dataclass(frozen=True)
class Cluster:
    """`devices` devices of one kind in nodes of `devices_per_node`."""

    name: str
    device: Device
    devices: int
    devices_per_node: int
    inside: Link  # between devices of a node; the bandwidth is of one device
    # between nodes; the bandwidth is of a node: a ring through all devices of its nodes has it to itself, and
    # rings of one device a node, one ring for each local rank, divide it by devices_per_node
    between: Link
    host_memory: int  # bytes a node
    host_bandwidth: float  # bytes/s, read and written, of a node's own memory
    host_link: float  # bytes/s from one device to its host's memory
    storage: float  # bytes/s of one node to and from the shared file system
    on_demand: float  # $ a device-hour
    spot: float  # $ a device-hour
    spot_interruptions: float  # a node-hour, for spot nodes
    failures: float  # a node-hour, of every node
    shared: bool = False  # ranks of a node divide its cores and memory: fewer ranks, faster ones
    anchor: Any = None  # the Anchor, a measured run that plans are scaled by (planning/known_runs.py)

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    def with_devices(self, devices: int) -> "Cluster":
        """Return the machine with another number of devices (of a shared machine: of ranks)."""
        if devices < 1:
            raise ConfigError(f"cluster {self.name} with {devices} devices: give at least 1")
        if not self.shared:
            return dataclasses.replace(self, devices=devices)
        factor = min(self.devices, self.devices_per_node) / min(devices, self.devices_per_node)
        prices = {"on_demand": self.on_demand * factor, "spot": self.spot * factor}
        return dataclasses.replace(self, devices=devices, device=self.device.scaled(factor), **prices)
