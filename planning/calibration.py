"""Times that planning/calibrate.py measured on a machine: stored as JSON, read at any size.

Rates depend on the shape, on a CPU by factors, so every measured shape keeps its own time; a shape in between
takes the rate of its neighbours.
"""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from command_line import text_table
from errors import DataError
from planning.hardware import PRECISION, Cluster, Device

FORMAT = 2  # of the file
NEIGHBOURS = 4  # measured shapes that a rate is taken from


@dataclass(frozen=True)
class Timing:
    """One operation of one shape.

    kind                                             sizes                      work
    matmul/<forward|input_gradient|weight_gradient>  (m, k, n) of the product   2 m k n FLOP
    attention/<backend>/<forward|backward>           (batch, heads, T, E)       4 (8) batch heads T^2 E FLOP
    elementwise/<operation>                          (bytes read and written,)  bytes
    blocks/<backend>, forward and backward           (number, batch, T, D, heads, M)    blocks

    With x (rows, inputs) and a weight (outputs, inputs), "forward" is x w^T, (m, k, n) = (rows, inputs,
    outputs); "input_gradient" is dy w, (rows, outputs, inputs); "weight_gradient" is dy^T x, (outputs, rows,
    inputs). The order of their operands in memory differs, and so do their rates.
    """

    kind: str
    dtype: str  # torch's name
    sizes: tuple[int, ...]
    seconds: float  # median of the repetitions that nothing disturbed
    median: float  # of all

    @property
    def rate(self) -> float:
        """Work a second."""
        return work_of(self.kind, self.sizes) / self.seconds


def work_of(kind: str, sizes: tuple[int, ...]) -> float:
    if kind.startswith("matmul/"):
        return matmul_flops(*sizes)
    if kind.startswith("attention/"):
        return attention_flops(*sizes, backward=kind.endswith("/backward"))
    return float(sizes[0])


def matmul_flops(m: int, k: int, n: int) -> float:
    return 2.0 * m * k * n


def attention_flops(batch: int, heads: int, tokens: int, head_dim: int, backward: bool) -> float:
    """Model FLOPs: every token sees every other one; what a backward recomputes earns nothing."""
    return (8.0 if backward else 4.0) * batch * heads * tokens**2 * head_dim


@dataclass(frozen=True)
class Calibration:
    """Times on one machine, of a rank of `threads` threads."""

    torch_version: str
    device_type: str  # "cpu" or "cuda"
    device_name: str  # "cpu", or torch's name of the GPU
    processor: str  # of the host
    cores: int  # of the host
    threads: int  # of a rank
    memory: int  # bytes: of the GPU, or of the host
    timings: tuple[Timing, ...]
    float8: float = 1.0  # rate of products over that in bfloat16: not measured, the data sheet's of a device

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """A linear layer's forward, or both products of its backward."""
        if dtype == "float8":
            return self.linear_seconds(rows, inputs, outputs, "bfloat16", backward) / self.float8
        if not backward:
            return self._seconds("matmul/forward", dtype, (rows, inputs, outputs))
        of_input = self._seconds("matmul/input_gradient", dtype, (rows, outputs, inputs))
        return of_input + self._seconds("matmul/weight_gradient", dtype, (outputs, rows, inputs))

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """Seconds of attention between q, k, v of (batch, heads, tokens, head_dim), or of its backward."""
        kind = f"attention/{backend.replace('auto', 'sdpa')}/{'backward' if backward else 'forward'}"
        return self._seconds(kind, dtype, (batch, heads, tokens, head_dim))

    def elementwise_seconds(self, size: float, dtype: str = "float32", operation: str = "copy") -> float:
        """Seconds of an operation that reads and writes `size` bytes in all: as long as copying where
        planning/calibrate.py does not measure it, nothing for norms, which were measured as they are.
        """
        if operation == "norm cast":
            return 0.0
        operation = "copy" if operation.startswith(("exchange", "float8")) else operation
        return self._seconds(f"elementwise/{operation}", dtype, (max(round(size), 1),))

    def _seconds(self, kind: str, dtype: str, sizes: tuple[int, ...]) -> float:
        rows = [row for row in self.timings if (row.kind, row.dtype) == (kind, dtype)]
        if not rows:
            there = sorted({f"{row.kind} in {row.dtype}" for row in self.timings})
            raise DataError(f"calibration: no {kind} in {dtype}, only {', '.join(there)}; calibrate for it")
        return work_of(kind, sizes) / interpolated_rate(rows, sizes)

    @property
    def noise(self) -> float:
        """Fraction by which operations took longer than undisturbed: the load of other programs."""
        return statistics.median([row.median / row.seconds - 1 for row in self.timings])

    def table(self) -> str:
        """Table of all measurements, one line an operation and shape."""
        device = self.processor if self.device_type == "cpu" else f"{self.device_name} on {self.processor}"
        rows: list[tuple[object, ...]] = [("", "", "", "ms", "10^9/s")]  # FLOPs, bytes or blocks
        for row in self.timings:
            shape = " x ".join(map(str, row.sizes))
            rows.append((row.kind, row.dtype, shape, row.seconds * 1e3, row.rate / 1e9))
        return (
            f"{device}: {self.threads} threads, torch {self.torch_version}; "
            f"others slowed all by {self.noise:.0%}\n"
            f"{text_table('<34 <10 <28 >10.3f >10,.1f', rows)}"
        )


Rates = Device | Calibration  # what gives the seconds of operations


def interpolated_rate(rows: Iterable[Timing], sizes: tuple[int, ...]) -> float:
    """Work a second at `sizes`: the nearest shapes' rates, weighted by 1/distance^2, all in logarithms."""
    near = sorted((math.dist(logs(row.sizes), logs(sizes)), row.rate) for row in rows)
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
        own = {"devices_per_node": measured.cores, "host_memory": measured.memory, "devices": measured.cores}
        cluster = dataclasses.replace(cluster, **own).with_devices(max(measured.cores // measured.threads, 1))
        peak: dict[str, float] = {}  # no data sheet has that of some cores: the best product measured
        for row in measured.timings:
            if row.kind.startswith("matmul/"):
                peak[PRECISION[row.dtype]] = max(row.rate, peak.get(PRECISION[row.dtype], 0.0))
        device = dataclasses.replace(cluster.device, peak=peak, memory=measured.memory // cluster.devices)
        cluster = dataclasses.replace(cluster, device=device)
    rates = cluster.device.matmul
    measured = dataclasses.replace(measured, float8=rates.get("fp8", rates["bf16"]) / rates["bf16"])
    device = dataclasses.replace(cluster.device, name=f"{cluster.device.name}, calibrated")
    cluster = dataclasses.replace(cluster, device=device, measured=measured)
    return cluster if devices is None else cluster.with_devices(devices)


# -- the file


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Atomically: a reader finds the old file or the new one, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    text = json.dumps({"format": FORMAT} | dataclasses.asdict(calibration), indent=1)
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def load_calibration(path: Path) -> Calibration:
    """DataError, one line, for a file that is not there, not whole, or of another torch or processor."""
    again = "; measure with plan.py --calibrate"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise ValueError(f"format is not {FORMAT}")
        timings = tuple(Timing(**row | {"sizes": tuple(row["sizes"])}) for row in values.pop("timings"))
        measured = Calibration(**values, timings=timings)
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
    """Version of the installed torch, without its seconds of importing."""
    return version("torch")


def processor_name() -> str:
    """Name of the processor by Linux, with the number of cores: "AMD EPYC, 2 cores"."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"
