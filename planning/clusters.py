"""Clusters for planning: devices, links, prices, from clusters.toml and files of the user.

All figures are in base units: bytes, seconds, FLOP/s, bytes/s, dollars. Where devices are shared (the
ranks on a CPU), a node's figures are divided among its ranks.
"""

import dataclasses
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import ConfigError, nearest
from planning.constants import REACHED, SCORE_BYTES

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
    hopper_forward: dict[int, float]  # rates of kernels for Hopper or later; empty: no such kernels
    hopper_backward: dict[int, float]
    bandwidth: float  # bytes/s, read and written, that elementwise kernels reach
    float32_attention: float = 0.0  # rate relative to bf16; 0: the ratio of matrix products

    def linear_seconds(self, rows: int, inputs: int, outputs: int, dtype: str, backward: bool) -> float:
        """Return the seconds of a linear layer: one product forward, two backward."""
        if not backward:
            return self.product_seconds(1, rows, inputs, outputs, dtype)
        of_input = self.product_seconds(1, rows, outputs, inputs, dtype)
        return of_input + self.product_seconds(1, outputs, rows, inputs, dtype)

    def product_seconds(self, number: int, rows: int, inputs: int, outputs: int, dtype: str) -> float:
        """Seconds of `number` products of matrices."""
        rate = REACHED * self.matmul.get(PRECISION[dtype], self.matmul["bf16"])
        return number * 2 * rows * inputs * outputs / rate

    def attention_seconds(
        self, batch: int, heads: int, tokens: int, head_dim: int, dtype: str, backward: bool, backend: str
    ) -> float:
        """Return the seconds of attention: 4 T^2 E FLOPs per head forward, 8 T^2 E backward."""
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
        """Seconds to read and write `size` bytes in all. operation: a kernel, by which subclasses may differ
        (benchmarks/planner_published.py).
        """
        return size / self.bandwidth

    def scaled(self, factor: float) -> "Device":
        """Return a device with memory and rates times `factor`. Costs per process or operator stay equal."""
        tables = ("peak", "matmul", "attention_forward", "attention_backward")
        rates = {name: {key: factor * rate for key, rate in getattr(self, name).items()} for name in tables}
        memory, bandwidth = round(self.memory * factor), self.bandwidth * factor
        return dataclasses.replace(self, memory=memory, bandwidth=bandwidth, **rates)


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
    known_as: tuple[str, ...] = ()  # torch's names of the device
    assumed: tuple[str, ...] = ()  # keys that are not measured, by their comments
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


# -- machines by name

MACHINES = Path(__file__).with_name("clusters.toml")
MOST_DEVICES = 1_000_000
Table = dict[str, Any]  # one machine of a TOML file
LINK, PRECISIONS = (
    ("latency", "bandwidth"),
    ("bf16", "fp32"),
)  # and fp8; "fp32" means TF32 where there is TF32
BY_HEAD_SIZE = [f"{kind}_{way}" for kind in ("attention", "hopper") for way in ("forward", "backward")]
# Keys of a machine that are not numbers -> type, or required keys of a table of numbers.
NON_NUMERIC: dict[str, type | tuple[str, ...]] = {"like": str, "known_as": list, "shared": bool}
NON_NUMERIC |= {"peak": PRECISIONS, "matmul": PRECISIONS, "inside": LINK, "between": LINK}
NON_NUMERIC |= dict.fromkeys(BY_HEAD_SIZE, ())
TABLE_KEYS = (*LINK, *PRECISIONS, "fp8", "32", "48", "64", "80", "96", "128", "256")
DEVICE_KEYS = [field.name for field in dataclasses.fields(Device)][1:]  # without the name
FIELDS = [*DEVICE_KEYS, *(field.name for field in dataclasses.fields(Cluster))]
KEYS = ["like", *(key for key in FIELDS if key not in ("name", "device", "devices", "anchor", "assumed"))]
OPTIONAL = ("like", "known_as", "shared", "float32_attention", "hopper_forward", "hopper_backward")
MAY_BE_ZERO = ("reserved", "on_demand", "spot", "spot_interruptions", "failures")


def load_cluster(name: str, files: Iterable[str | Path] = ()) -> Cluster:
    """Return the cluster `name`: a machine and a number of devices ("a100x64", "a100-40x16", "cpu2").

    A machine's name alone is one node of it. `files` are TOML files of the user's, which add machines or
    change keys of known ones. ConfigError, in one line, for what cannot be read or is not known.
    """
    tables, machine, number = all_machines(files), name, None
    if name not in tables:  # "x" first: "a100" is not 100 devices of "a"
        splits = [re.fullmatch(pattern, name) for pattern in (r"(.+)x(\d+)", r"(.*[^\d])(\d+)")]
        known = [split for split in splits if split and split[1] in tables]
        if not known:
            hint = nearest(re.sub(r"x?\d*$", "", name.lower()), tables)
            raise ConfigError(
                f"cluster {name!r}: no such machine; {hint} (its devices follow, as in a100x64)"
            )
        machine, number = known[0][1], int(known[0][2])
        if number > MOST_DEVICES:
            raise ConfigError(f"cluster {name!r}: give at most {MOST_DEVICES:,} devices")
    values = {key: value for key, value in tables[machine].items() if key != "like"}
    values |= {key: {int(size): rate for size, rate in values.get(key, {}).items()} for key in BY_HEAD_SIZE}
    values |= {key: Link(**values[key]) for key in ("inside", "between")}
    values["known_as"] = tuple(values.get("known_as", ()))
    device = Device(machine, **{key: values.pop(key) for key in DEVICE_KEYS if key in values})
    devices = values["devices_per_node"] = round(values["devices_per_node"])
    # Keys with "assumed" in their comments, in the table of the machine and of those that it is like.
    like, seen, assumed = machine, set(), []
    for _ in tables:
        text = MACHINES.read_text(encoding="utf-8").partition(f"\n[{like}]")[2].partition("\n[")[0]
        for key, comment in re.findall(r"^(\w+) = [^#\n]*#?(.*)$", text, re.MULTILINE):
            assumed += [key] * (key not in seen and "assumed" in comment)
            seen.add(key)
        like = tables.get(like, {}).get("like", "")
    # A node that ranks share is divided among one rank per core, unless there is another number.
    one = Cluster(machine, device, 1 if values.get("shared") else devices, assumed=tuple(assumed), **values)
    return one.with_devices(devices if number is None else number)


def machine_known_as(device_name: str, files: Iterable[str | Path] = ()) -> str | None:
    """Return the machine that has torch's name of this device in `known_as`."""
    tables = all_machines(files)
    return next((name for name, keys in tables.items() if device_name in keys.get("known_as", ())), None)


def all_machines(files: Iterable[str | Path] = ()) -> dict[str, Table]:
    """Return the machines of clusters.toml, updated by the user's files. Missing keys are those of the known
    machine of that name, or of the machine named by `like`. ConfigError for what is no TOML, for unknown keys
    or values, and for machines that are not complete.
    """

    def is_positive(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")

    tables: dict[str, Table] = {}
    for path in (MACHINES, *map(Path, files)):
        where = f"--clusters {path}"
        try:
            made = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{where}: {error}; give a TOML file of machines") from error
        for machine, table in made.items():
            if not isinstance(table, dict):
                raise ConfigError(f"{where}: {machine} is outside a machine; put it below [name]")
            # -- every value by its key: a number, a text or a table of numbers
            for key, value in table.items():
                takes, fix = NON_NUMERIC.get(key), "give a positive number"
                if key not in KEYS:
                    valid, fix = False, f"no such key; {nearest(key, KEYS)}"
                elif takes is None:
                    valid = is_positive(value) or (key in MAY_BE_ZERO and value == 0)
                elif isinstance(takes, type):
                    valid, fix = isinstance(value, takes), f"give a {takes.__name__}"
                else:
                    valid = isinstance(value, dict) and all(map(is_positive, value.values())) and bool(value)
                    valid = valid and set(takes) <= set(value) <= set(TABLE_KEYS)
                    named = ", ".join(takes) or "of head sizes"
                    fix = f"give a table of positive numbers with the keys {named}"
                if not valid:
                    raise ConfigError(f"{where}: {machine}.{key} = {value!r}: {fix}")
            # -- what the table leaves out is that of the machine it is like, or of the known one of its name
            base = table.get("like", machine)
            if "like" in table and base not in tables:
                reason = f"no such machine; {nearest(base, tables)}"
                raise ConfigError(f"{where}: {machine}.like = {base!r}: {reason}")
            tables[machine] = tables.get(base, {}) | table
            if missing := [key for key in KEYS if key not in tables[machine] and key not in OPTIONAL]:
                fix = f"add {', '.join(missing)}, or like = the machine that has the same"
                raise ConfigError(f"{where}: [{machine}] is not complete; {fix}")
            if len({bool(tables[machine].get(f"hopper_{way}")) for way in ("forward", "backward")}) > 1:
                raise ConfigError(f"{where}: [{machine}]: give both of hopper_forward and hopper_backward")
    return tables
