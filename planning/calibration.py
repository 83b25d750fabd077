"""What planning/calibrate.py measured on a machine: stored as JSON, and read at other sizes than measured.

Rates depend on the shape, on a CPU by factors, so every measured shape keeps its own time; a shape in between
takes the rate of its neighbours.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from errors import DataError
from planning.clusters import Cluster, Link

FORMAT = 1  # of the file
PRECISION = {"bfloat16": "bf16", "float32": "fp32"}  # torch's names -> those of clusters.toml
NEIGHBOURS = 4  # measured shapes that a rate is taken from


@dataclass(frozen=True)
class Timing:
    """One operation of one shape.

    kind                                             sizes                      work
    matmul/<forward|input_gradient|weight_gradient>  (m, k, n) of the product   2 m k n FLOP
    attention/<backend>/<forward|backward>           (batch, heads, T, E)       4 (8) batch heads T^2 E FLOP
    elementwise/<operation>                          (bytes read and written,)  bytes
    blocks/<backend>, forward and backward: (number, batch, T, D, heads, M)
    """

    kind: str
    dtype: str  # torch's name
    sizes: tuple[int, ...]
    seconds: float  # median of the repetitions that nothing disturbed
    median: float  # of all

    @property
    def work(self) -> float:
        """FLOP, or bytes of an elementwise operation."""
        if self.kind.startswith("matmul/"):
            return matmul_flops(*self.sizes)
        if self.kind.startswith("attention/"):
            return attention_flops(*self.sizes, backward=self.kind.endswith("/backward"))
        return float(self.sizes[0])


def matmul_flops(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n


def attention_flops(batch: int, heads: int, tokens: int, head_dim: int, backward: bool) -> float:
    """Model FLOPs: every token sees every other one; what a backward recomputes earns nothing."""
    return (8.0 if backward else 4.0) * batch * heads * tokens**2 * head_dim


@dataclass(frozen=True)
class Calibration:
    """Times on one machine, of a rank of `threads` threads while `ranks` such ranks were busy."""

    torch_version: str
    device_type: str  # "cpu" or "cuda"
    device_name: str  # "cpu", or torch's name of the GPU
    processor: str  # of the host
    cores: int  # of the host
    threads: int  # of a rank
    ranks: int  # that measured at once
    memory: int  # bytes: of the GPU, or of the host
    launch: float  # seconds of an operator on next to nothing
    allreduce: Link | None  # between two ranks of this host; None where there is one GPU
    timings: tuple[Timing, ...]

    def matmul_seconds(self, m: int, k: int, n: int, dtype: str, orientation: str = "forward") -> float:
        """Of an (m x k) by (k x n) product.

        With x (rows, inputs) and a weight (outputs, inputs), "forward" is x w^T, (m, k, n) = (rows, inputs,
        outputs); "input_gradient" is dy w, (rows, outputs, inputs); "weight_gradient" is dy^T x, (outputs,
        rows, inputs). Their operands lie differently in memory and their rates differ.
        """
        return self._seconds(f"matmul/{orientation}", dtype, (m, k, n), matmul_flops(m, k, n))

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """A linear layer's forward, or both products of its backward."""
        if not backward:
            return self.matmul_seconds(rows, inputs, outputs, dtype)
        return self.matmul_seconds(rows, outputs, inputs, dtype, "input_gradient") + self.matmul_seconds(
            outputs, rows, inputs, dtype, "weight_gradient"
        )

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """Of attention between q, k, v of (batch, heads, tokens, head_dim), or of its backward alone."""
        kind = f"attention/{backend}/{'backward' if backward else 'forward'}"
        work = attention_flops(batch, heads, tokens, head_dim, backward)
        return self._seconds(kind, dtype, (batch, heads, tokens, head_dim), work)

    def elementwise_seconds(self, size: float, dtype: str = "float32", operation: str = "copy") -> float:
        """Of an operation that reads and writes `size` bytes in all: one of planning/calibrate.py's."""
        return self._seconds(f"elementwise/{operation}", dtype, (max(round(size), 1),), size)

    def _seconds(self, kind: str, dtype: str, sizes: tuple[int, ...], work: float) -> float:
        rows = [row for row in self.timings if (row.kind, row.dtype) == (kind, dtype)]
        if not rows:
            there = sorted({f"{row.kind} in {row.dtype}" for row in self.timings})
            raise DataError(f"calibration: no {kind} in {dtype}, only {', '.join(there)}; calibrate for it")
        return max(work / interpolated_rate(rows, sizes), self.launch)

    @property
    def noise(self) -> float:
        """How much longer an operation took than undisturbed, as a share: what others did on this machine."""
        return statistics.median([row.median / row.seconds - 1 for row in self.timings])

    def table(self) -> str:
        """What was measured where, one line an operation and shape."""
        device = self.processor if self.device_type == "cpu" else f"{self.device_name} on {self.processor}"
        link = "one device, no link"
        if self.allreduce:
            alpha, beta = self.allreduce.latency * 1e6, self.allreduce.bandwidth / 1e9
            link = f"all-reduce {alpha:.0f} us a step and {beta:.2f} GB/s"
        rows = [
            f"{device}: {self.ranks} x {self.threads} threads, torch {self.torch_version}",
            f"an operator takes {self.launch * 1e6:.1f} us; {link}; others slowed all by {self.noise:.0%}",
            f"{'':<34}{'':<10}{'':<22}{'ms':>10}{'rate':>16}",
        ]
        for row in self.timings:
            rate = row.work / row.seconds / 1e9
            unit = "GB/s" if row.kind.startswith("elementwise/") else "GFLOP/s"
            if row.kind.startswith("blocks/"):
                rate, unit = row.sizes[0] / row.seconds, "blocks/s"
            shape = " x ".join(map(str, row.sizes))
            rows.append(
                f"{row.kind:<34}{row.dtype:<10}{shape:<22}{row.seconds * 1e3:>10.3f}{rate:>8,.0f} {unit:<7}"
            )
        return "\n".join(line.rstrip() for line in rows)


def interpolated_rate(rows: Iterable[Timing], sizes: tuple[int, ...]) -> float:
    """Work a second at `sizes`: the nearest shapes' rates, weighted by 1/distance^2, all in logarithms."""
    near = sorted((math.dist(logs(row.sizes), logs(sizes)), row.work / row.seconds) for row in rows)
    if near[0][0] == 0:
        return near[0][1]
    weights = [(distance**-2, rate) for distance, rate in near[:NEIGHBOURS]]
    return math.exp(sum(w * math.log(rate) for w, rate in weights) / sum(w for w, _ in weights))


def logs(sizes: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(math.log(size) for size in sizes)


# -- on the cluster


def calibrated(cluster: Cluster, measured: Calibration, devices: int | None = None) -> Cluster:
    """`cluster` with the rates that were measured, and `devices` devices (None: a node's)."""
    if cluster.shared:  # ranks that share the cores of this host, not those of clusters.toml
        ranks = max(measured.cores // measured.threads, 1)
        cluster = dataclasses.replace(cluster, devices_per_node=measured.cores, host_memory=measured.memory)
        cluster = dataclasses.replace(cluster, devices=measured.cores).with_devices(ranks)
    device = cluster.device
    matmul = matmul_rates(measured, lambda rates: sum(work for work, _ in rates) / sum(s for _, s in rates))
    if cluster.shared:  # there is no data sheet of some cores: the best product measured is their peak
        best = matmul_rates(measured, lambda rates: max(work / seconds for work, seconds in rates))
        device = dataclasses.replace(device, peak=best, memory=measured.memory // cluster.devices)
    device = dataclasses.replace(
        device,
        name=f"{device.name}, calibrated",
        matmul=device.matmul | matmul,
        attention_forward=updated(device.attention_forward, attention_rates(measured, "/forward")),
        attention_backward=updated(device.attention_backward, attention_rates(measured, "/backward")),
        bandwidth=elementwise_bandwidth(measured) or device.bandwidth,
        launch=measured.launch,
    )
    inside = measured.allreduce or cluster.inside
    cluster = dataclasses.replace(cluster, device=device, inside=inside)
    return cluster if devices is None else cluster.with_devices(devices)


Works = list[tuple[float, float]]  # (work, seconds)


def matmul_rates(measured: Calibration, summary: Callable[[Works], float]) -> dict[str, float]:
    """By precision, where there are measured products: `summary` of all of them."""
    works: dict[str, Works] = {}
    for row in measured.timings:
        if row.kind.startswith("matmul/") and row.dtype in PRECISION:
            works.setdefault(PRECISION[row.dtype], []).append((row.work, row.seconds))
    return {precision: summary(rows) for precision, rows in works.items()}


def elementwise_bandwidth(measured: Calibration) -> float:
    """Bytes over time of all elementwise operations; 0 where none was measured."""
    rows = [row for row in measured.timings if row.kind.startswith("elementwise/")]
    return sum(row.work for row in rows) / sum(row.seconds for row in rows) if rows else 0.0


def attention_rates(measured: Calibration, direction: str) -> dict[int, float]:
    """FLOP/s in bfloat16 of the faster backend, by head size."""
    rows = [row for row in measured.timings if row.kind.startswith("attention/") and row.dtype == "bfloat16"]
    rates: dict[int, float] = {}
    for row in rows:
        if row.kind.endswith(direction):
            head_size = row.sizes[-1]
            rates[head_size] = max(rates.get(head_size, 0.0), row.work / row.seconds)
    return rates


def updated(table: dict[int, float], measured: dict[int, float]) -> dict[int, float]:
    """Measured rates; head sizes that were not measured change as their nearest one did."""

    def change(head_size: int) -> float:
        near = min(measured, key=lambda size: abs(math.log(size / head_size)))
        there = min(table, key=lambda size: abs(math.log(size / near)))
        return measured[near] / table[there]

    return {size: rate * change(size) for size, rate in table.items()} | measured if measured else table


# -- the file


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Atomically: a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"format": FORMAT} | dataclasses.asdict(calibration), indent=1)
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def timing_of(row: dict[str, Any]) -> Timing:
    """What dataclasses.asdict made of one, and JSON of that."""
    return Timing(**{**row, "sizes": tuple(row["sizes"])})


def load_calibration(path: Path) -> Calibration:
    """DataError, one line, for a file that is not there, not whole, or of another torch or processor."""
    again = "; measure with plan.py --calibrate"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        timings = tuple(timing_of(row) for row in values.pop("timings"))
        link = values.pop("allreduce")
        measured = Calibration(**values, timings=timings, allreduce=Link(**link) if link else None)
    except FileNotFoundError as error:
        raise DataError(f"calibration {path}: not there{again}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"calibration {path}: cannot be read ({error}){again} again") from error
    then, now = measured.torch_version, torch_version()
    if then != now:
        raise DataError(f"calibration {path}: measured with torch {then}, this is {now}{again} again")
    if measured.device_type == "cpu" and measured.processor != processor_name():
        raise DataError(
            f"calibration {path}: measured on {measured.processor}, this is {processor_name()}{again} again"
        )
    return measured


def torch_version() -> str:
    """Of the installed torch, without its seconds of importing."""
    return version("torch")


def processor_name() -> str:
    """As Linux names it, with the number of cores: "AMD EPYC, 2 cores"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"
