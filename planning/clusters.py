"""Clusters for planning: devices, links, prices, from clusters.toml and files of the user, and runs on them.

All figures are in base units: bytes, seconds, FLOP/s, bytes/s, dollars. Where devices are shared (the
ranks on a CPU), a node's figures are divided among its ranks.
"""

import dataclasses
import re
import statistics
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from config import in_project
from errors import ConfigError, nearest
from jobs.durable_files import read_records
from planning.constants import ALLOCATOR_SLACK, REACHED, SCORE_BYTES

PRECISION = {"float32": "fp32", "bfloat16": "bf16", "float16": "bf16", "float8": "fp8"}
# Of model.attention_backend: cuDNN's, which torch 2.11 chooses by itself ("sdpa": benchmarks/gpu.sh on an
# H100), and FlashAttention-3 or -4; "auto" takes one of these.
HOPPER_KERNELS = ("auto", "sdpa", "cudnn", "flash_attn", "flash4")


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
    bandwidth: float  # bytes/s, read and written, that elementwise kernels reach
    # Rates of kernels for Hopper or later; empty: no such kernels.
    hopper_forward: dict[int, float] = field(default_factory=dict)
    hopper_backward: dict[int, float] = field(default_factory=dict)
    float32_attention: float = 0.0  # rate relative to bf16; 0: the ratio of matrix products

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """Return the seconds of a linear layer: one product of matrices forward, two backward."""
        rate = REACHED * self.matmul.get(PRECISION[dtype], self.matmul["bf16"])
        return (2 if backward else 1) * (2 * rows * inputs * outputs / rate)

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """Return the seconds of attention: 4 T^2 E FLOPs per head forward, 8 T^2 E backward."""
        if backend == "math":  # each product writes or reads all T^2 scores, and so does every pass between
            product = self.linear_seconds(batch * heads * tokens, head_dim, tokens, dtype, backward)
            scores = SCORE_BYTES[dtype != "float32"][backward] * batch * heads * tokens**2
            return 2 * product + self.elementwise_seconds(scores)
        rates = self.attention_backward if backward else self.attention_forward
        if backend in HOPPER_KERNELS and self.hopper_forward:
            rates = self.hopper_backward if backward else self.hopper_forward
        rate = rates[min(rates, key=lambda size: abs(size - head_dim))]
        if dtype == "float32":
            rate *= self.float32_attention or self.matmul["fp32"] / self.matmul["bf16"]
        return (8 if backward else 4) * batch * heads * tokens**2 * head_dim / rate

    def elementwise_seconds(self, size: float, operation: str = "copy") -> float:
        """Seconds to read and write `size` bytes in all. operation: a kernel, by which subclasses may differ
        (benchmarks/planner_published.py).
        """
        return size / self.bandwidth


@dataclass(frozen=True)
class Link:
    """A link of the network: a message of s bytes takes latency + s / bandwidth."""

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
    shared: bool = False  # the ranks of a node share its cores and memory, so that fewer ranks are faster
    known_as: list[str] = field(default_factory=list)  # torch's names of the device
    assumed: list[str] = field(default_factory=list)  # keys that are not measured, by their comments
    anchor: str = ""  # the kind of layouts that a measured run corrects; "": no run
    anchor_factor: float = 1.0  # the seconds of its steps as measured over those planned

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    @property
    def capacity(self) -> float:
        """Bytes that the tensors of a step may have on a device: its allocator needs more for them."""
        slack = 0.0 if self.shared else ALLOCATOR_SLACK
        return (self.device.memory - self.device.reserved) / (1 + slack)

    def with_devices(self, devices: int) -> "Cluster":
        """Return the machine with another number of devices (of a shared machine: of ranks)."""
        if devices < 1:
            raise ConfigError(f"cluster {self.name} with {devices} devices: give at least 1")
        if not self.shared:
            return dataclasses.replace(self, devices=devices)
        # Memory, rates and prices are divided; costs per process or operator stay equal.
        factor = min(self.devices, self.devices_per_node) / min(devices, self.devices_per_node)
        tables = ("peak", "matmul", "attention_forward", "attention_backward")
        device = dataclasses.replace(
            self.device,
            memory=round(self.device.memory * factor),
            bandwidth=self.device.bandwidth * factor,
            **{
                name: {key: factor * rate for key, rate in vars(self.device)[name].items()} for name in tables
            },
        )
        prices = {"on_demand": self.on_demand * factor, "spot": self.spot * factor}
        return dataclasses.replace(self, devices=devices, device=device, **prices)


# -- machines by name

MACHINES = Path(__file__).with_name("clusters.toml")
CPUINFO = Path("/proc/cpuinfo")  # of this host: flags of its instructions
EPYC = "cpu-epyc"  # the machine of CPUs with products in bf16 but without AMX
MOST_DEVICES = 1_000_000
DEVICE_KEYS = [known.name for known in dataclasses.fields(Device)][1:]  # without the name
FIELDS = [*dataclasses.fields(Device), *dataclasses.fields(Cluster)]
NO_KEYS = ("name", "device", "devices", "assumed", "anchor", "anchor_factor")
KEYS = ["like", *(known.name for known in FIELDS if known.name not in NO_KEYS)]
REQUIRED = [f.name for f in FIELDS if f.name in KEYS and f.default is MISSING is f.default_factory]
# Types of keys that are no numbers or, of tables of numbers, the keys that they must have and may have.
# "fp32" means TF32 where there is TF32.
PRECISIONS, LINK = ("bf16 fp32", "fp8"), ("latency bandwidth", "")
BY_HEAD_SIZE = [f"{kind}_{way}" for kind in ("attention", "hopper") for way in ("forward", "backward")]
KINDS: dict[str, Any] = {"like": str, "known_as": list, "shared": bool, "inside": LINK, "between": LINK}
KINDS |= {"peak": PRECISIONS, "matmul": PRECISIONS}
KINDS |= dict.fromkeys(BY_HEAD_SIZE, ("", "32 48 64 80 96 128 256"))
MAY_BE_ZERO = ("reserved", "on_demand", "spot", "spot_interruptions", "failures")


def load_cluster(name: str, files: Iterable[str | Path] = ()) -> Cluster:
    """Return the cluster `name`: a machine and a number of devices ("a100x64", "a100-40x16", "cpu2").

    A machine's name alone is one node of it. `files` are TOML files of the user's, which add machines or
    change keys of known ones. ConfigError, in one line, for what cannot be read or is not known.
    """
    machines = all_machines(files)
    # A name alone first, then one with "x": "a100" is not 100 devices of "a".
    for pattern in (r"(.+)()", r"(.+)x(\d+)", r"(.*[^\d])(\d+)"):
        if (split := re.fullmatch(pattern, name)) and split[1] in machines:
            machine = machines[split[1]]
            number = int(split[2]) if split[2] else machine.devices_per_node
            if number > MOST_DEVICES:
                raise ConfigError(f"cluster {name!r}: give at most {MOST_DEVICES:,} devices")
            return machine.with_devices(number)
    hint = nearest(re.sub(r"x?\d*$", "", name.lower()), machines)
    raise ConfigError(f"cluster {name!r}: no such machine; {hint} (its devices follow, as in a100x64)")


def machine_known_as(device_name: str) -> str | None:
    """Return the machine that has torch's name of this device in `known_as`; "cpu": the one with this host's
    kind of products in bf16.
    """
    flags = CPUINFO.read_text() if device_name == "cpu" and CPUINFO.exists() else ""
    if "avx512_bf16" in flags and "amx_tile" not in flags:
        return EPYC
    return next((name for name, one in all_machines().items() if device_name in one.known_as), None)


def all_machines(files: Iterable[str | Path] = ()) -> dict[str, Cluster]:
    """Return the machines of clusters.toml, updated by the user's files: a node of each, or a rank where
    ranks share a node. Missing keys are those of the known machine of that name, or of the machine named by
    `like`. ConfigError for what is no TOML, for unknown keys or values, and for machines that are not
    complete.
    """

    def is_positive(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")

    tables: dict[str, dict[str, Any]] = {}
    machines: dict[str, Cluster] = {}
    for path in (MACHINES, *map(Path, files)):
        where = f"--clusters {path}"
        try:
            text = path.read_text(encoding="utf-8")
            made = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{where}: {error}; give a TOML file of machines") from error
        for machine, table in made.items():
            if not isinstance(table, dict):
                raise ConfigError(f"{where}: {machine} is outside a machine; put it below [name]")
            # -- every value by its key: a number, a text or a table of numbers
            for key, value in table.items():
                kind, fix = KINDS.get(key), "give a positive number"
                if key not in KEYS:
                    valid, fix = False, f"no such key; {nearest(key, KEYS)}"
                elif kind is None:
                    valid = is_positive(value) or (key in MAY_BE_ZERO and value == 0)
                elif isinstance(kind, type):
                    valid, fix = isinstance(value, kind), f"give a {kind.__name__}"
                else:
                    needed, possible = (names.split() for names in kind)
                    valid = isinstance(value, dict) and all(map(is_positive, value.values())) and bool(value)
                    valid = valid and set(needed) <= set(value) <= {*needed, *possible}
                    named = ", ".join(needed) or "of head sizes"
                    fix = f"give a table of positive numbers with the keys {named}"
                if not valid:
                    raise ConfigError(f"{where}: {machine}.{key} = {value!r}: {fix}")
            # -- what the table leaves out is that of the machine it is like, or of the known one of its name
            base = table.get("like", machine)
            if "like" in table and base not in tables:
                reason = f"no such machine; {nearest(base, tables)}"
                raise ConfigError(f"{where}: {machine}.like = {base!r}: {reason}")
            values = tables[machine] = tables.get(base, {}) | table
            if missing := [key for key in REQUIRED if key not in values]:
                fix = f"add {', '.join(missing)}, or like = the machine that has the same"
                raise ConfigError(f"{where}: [{machine}] is not complete; {fix}")
            if len({bool(values.get(f"hopper_{way}")) for way in ("forward", "backward")}) > 1:
                raise ConfigError(f"{where}: [{machine}]: give both of hopper_forward and hopper_backward")
            # -- keys with "assumed" in their comments, here or in the table of what it is like
            lines = f"\n{text}".partition(f"\n[{machine}]")[2].partition("\n[")[0]
            assumed = re.findall(r"^(\w+) = .*#.*assumed", lines, re.MULTILINE)
            assumed += [key for key in machines[base].assumed if key not in table] if base in machines else []
            # -- a rank where ranks share a node: one per core divides it, unless there is another number
            values = {key: value for key, value in values.items() if key != "like"}
            values |= {k: {int(n): rate for n, rate in values.get(k, {}).items()} for k in BY_HEAD_SIZE}
            values |= {key: Link(**values[key]) for key in ("inside", "between")}
            device = Device(machine, **{key: values.pop(key) for key in DEVICE_KEYS if key in values})
            devices = values["devices_per_node"] = round(values["devices_per_node"])
            devices = 1 if values.get("shared") else devices
            machines[machine] = Cluster(machine, device, devices, assumed=assumed, **values)
    return machines


# -- a measured run, which corrects the plans of layouts of its kind (--anchor)

RUNS = Path(in_project("outputs"))


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says of its last start."""

    ranks: int
    seconds: float  # of a step, the median of the second half of its logged steps: the others warm up
    device: str  # torch's name, or "cpu"


def run_record(folder: Path) -> RunRecord:
    """Read starts.jsonl and metrics.jsonl of a run. Raises ConfigError."""
    starts, metrics = (read_records(folder / name) for name in ("starts.jsonl", "metrics.jsonl"))
    last = starts[-1] if starts else {}
    ranks, device = last.get("ranks"), last.get("device")
    if not (isinstance(ranks, int) and isinstance(device, str)):
        reason = "not the folder of a run: its starts.jsonl has no line with ranks and device"
        raise ConfigError(f"--anchor {folder}: {reason}")
    seconds = [record["step_seconds"] for record in metrics if record.get("step_seconds")]
    if not seconds or not all(isinstance(value, int | float) for value in seconds):
        raise ConfigError(f"--anchor {folder}: its metrics.jsonl has no step_seconds; train more steps")
    return RunRecord(ranks, statistics.median(seconds[len(seconds) // 2 :]), device)


def newest_run(cluster: Cluster) -> Path | None:
    """Return the folder in outputs/ of the run that was trained last on the devices of this machine."""
    files = sorted(RUNS.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        with suppress(ConfigError):
            if run_record(file.parent).device in cluster.known_as:
                return file.parent
    return None
