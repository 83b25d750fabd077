"""Machines that a run can be planned for: planning/clusters.toml, a user's own files, a calibration.

All figures are in base units: bytes, seconds, FLOP/s, bytes/s, watts, dollars. Where devices are shared (the
ranks on a CPU), the file gives a whole node's figures, which its ranks divide among them.
"""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import ConfigError

MACHINES = Path(__file__).with_name("clusters.toml")
CALIBRATION = Path("outputs/calibration.json")
THIS = "this"  # the machine that was calibrated
PRECISIONS = ("bf16", "fp32", "fp8")  # "fp32" means TF32 where the device has it
HEAD_SIZES = ("32", "48", "64", "80", "96", "128", "256")  # TOML's keys are text
Table = dict[str, Any]  # one machine of a TOML file
# Key of a machine -> what it takes, and the keys of that where it is a table.
KEYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "like": ("text", ()),  # a machine that has the rest
    "known_as": ("names", ()),  # torch's names of the device
    **dict.fromkeys(("memory", "reserved", "bandwidth", "launch", "watts"), ("number", ())),
    **dict.fromkeys(("peak", "matmul"), ("rates", PRECISIONS)),
    **dict.fromkeys(("attention_forward", "attention_backward"), ("rates", HEAD_SIZES)),
    **dict.fromkeys(("inside", "between"), ("link", ("latency", "bandwidth"))),
    **dict.fromkeys(("devices_per_node", "host_memory", "host_link", "storage"), ("number", ())),
    **dict.fromkeys(("on_demand", "spot", "spot_interruptions", "pue"), ("number", ())),
    "shared": ("switch", ()),
}
OPTIONAL = ("like", "known_as", "shared")
MAY_BE_ZERO = ("reserved", "launch", "on_demand", "spot", "spot_interruptions")
WHOLE = ("memory", "reserved", "devices_per_node", "host_memory")


@dataclass(frozen=True)
class Device:
    """One GPU, or one rank's share of a CPU."""

    name: str
    memory: int  # bytes, all that torch sees
    reserved: int  # bytes of it lost to the CUDA context, NCCL's buffers and fragmentation
    peak: dict[str, float]  # FLOP/s by precision, dense, from the data sheet
    matmul: dict[str, float]  # FLOP/s by precision that large matrix products reach
    attention_forward: dict[int, float]  # bf16 FLOP/s by head size: 4 T^2 d of them, not causal
    attention_backward: dict[int, float]  # the same, of 8 T^2 d
    bandwidth: float  # bytes/s, read and written, that elementwise kernels reach
    launch: float  # seconds that an operator costs however small it is
    watts: float  # drawn while training, with the device's share of its node


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
    host_link: float  # bytes/s from one device to its host's memory
    storage: float  # bytes/s of one node to and from the shared file system
    on_demand: float  # $ a device-hour
    spot: float  # $ a device-hour
    spot_interruptions: float  # a node-hour, for spot nodes
    pue: float  # power of the whole centre over that of its computers
    shared: bool = False  # ranks of a node divide its cores and memory: fewer ranks, faster ones

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.devices_per_node)

    def with_devices(self, devices: int) -> "Cluster":
        """The same machine with another number of devices (of a shared machine: of ranks)."""
        if devices < 1:
            raise ConfigError(f"cluster {self.name} with {devices} devices: give at least 1")
        if not self.shared:
            return dataclasses.replace(self, devices=devices)
        part = min(self.devices, self.devices_per_node) / min(devices, self.devices_per_node)
        return dataclasses.replace(
            self,
            devices=devices,
            device=share(self.device, part),
            on_demand=self.on_demand * part,
            spot=self.spot * part,
        )


DEVICE_KEYS = tuple(field.name for field in dataclasses.fields(Device) if field.name != "name")


def share(device: Device, part: float) -> Device:
    """`part` of the memory and the rates. What a process or an operator costs stays what it was."""

    def scaled(rates: dict[Any, float]) -> dict[Any, float]:
        return {key: rate * part for key, rate in rates.items()}

    return dataclasses.replace(
        device,
        memory=round(device.memory * part),
        peak=scaled(device.peak),
        matmul=scaled(device.matmul),
        attention_forward=scaled(device.attention_forward),
        attention_backward=scaled(device.attention_backward),
        bandwidth=device.bandwidth * part,
        watts=device.watts * part,
    )


def load_cluster(name: str, files: Iterable[str | Path] = (), calibration: Path = CALIBRATION) -> Cluster:
    """The cluster `name`: a machine and how many of its devices ("a100x64", "a100-40x16", "cpu2").

    A machine's name alone is one node of it. `files` are TOML files of the user's, which add machines or
    change keys of known ones. "this" takes its rates from `calibration`, and so does "cpu" where a CPU was
    calibrated. ConfigError, in one line, for what cannot be read or is not known.
    """
    from planning.calibration import calibrated, load_calibration  # here, because it imports the above

    tables: dict[str, Table] = {}
    for file in (MACHINES, *map(Path, files)):
        add_machines(tables, read_machines(file), file)
    machine, devices = split_name(name, [*tables, THIS])
    if machine == THIS or (machine == "cpu" and calibration.exists()):
        measured = load_calibration(calibration)
        if machine == THIS or measured.device_type == "cpu":
            like = machine_known_as(measured.device_name, tables)
            cluster = calibrated(build_cluster(like, tables[like]), measured, devices)
            return dataclasses.replace(cluster, name=machine)
    cluster = build_cluster(machine, tables[machine])
    return cluster if devices is None else cluster.with_devices(devices)


def split_name(name: str, machines: list[str]) -> tuple[str, int | None]:
    """("a100-40", 16) of "a100-40x16", ("cpu", 2) of "cpu2", ("a100", None) of "a100"."""
    if name in machines:
        return name, None
    for pattern in (r"(.+)x(\d+)", r"(.*[^\d])(\d+)"):  # "x" first: "a100" is not 100 devices of "a"
        found = re.fullmatch(pattern, name)
        if found and found[1] in machines:
            return found[1], int(found[2])
    without_number = re.sub(r"x?\d*$", "", name.lower())
    near = difflib.get_close_matches(without_number, machines, 1) or difflib.get_close_matches(
        name.lower(), machines, 1
    )
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"cluster {name!r}: no such machine; {meant}give one of {', '.join(machines)} and how many devices, "
        "as in a100x64"
    )


def machine_known_as(device_name: str, tables: dict[str, Table]) -> str:
    """The machine whose `known_as` has torch's name of this device."""
    for machine, table in tables.items():
        if device_name in table.get("known_as", ()):
            return machine
    fix = f'add a machine with known_as = ["{device_name}"] in a file and give it with --clusters'
    raise ConfigError(f"cluster {THIS!r}: {device_name!r} is none of the machines in {MACHINES.name}; {fix}")


# -- TOML


def read_machines(path: Path) -> dict[str, Table]:
    """Machine -> its keys, as they stand in `path`. ConfigError for what is no TOML or has unknown keys."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--clusters {path}: {error}; give a TOML file of machines") from error
    for machine, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"--clusters {path}: {machine} stands outside a machine; put it below [name]")
        for key, value in table.items():
            _check(f"--clusters {path}: {machine}.{key} = {value!r}", key, value)
    return tables


def add_machines(tables: dict[str, Table], more: dict[str, Table], path: Path) -> None:
    """Into `tables`; a machine that is there, or the one that a new one is `like`, gives what is left out."""
    for machine, table in more.items():
        base = table.get("like", machine)
        if "like" in table and base not in tables:
            known = ", ".join(tables)
            raise ConfigError(
                f"--clusters {path}: {machine}.like = {base!r}: no such machine; one of {known}"
            )
        tables[machine] = tables.get(base, {}) | table
        missing = [key for key in KEYS if key not in tables[machine] and key not in OPTIONAL]
        if missing:
            fix = f"add {', '.join(missing)}, or like = the machine that has the same"
            raise ConfigError(f"--clusters {path}: [{machine}] is not complete; {fix}")


def _check(where: str, key: str, value: Any) -> None:
    """ConfigError unless `value` is what `key` takes."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1)
        raise ConfigError(f"{where}: no such key; " + (f"did you mean {near[0]}?" if near else "remove it"))
    kind, keys = KEYS[key]
    if kind in ("rates", "link"):
        wrong = not isinstance(value, dict) or not all(_positive(v) for v in value.values())
        wrong = wrong or not set(value) <= set(keys) or (kind == "link" and set(value) != set(keys))
        takes = f"a table of positive numbers with the keys {', '.join(keys)}"
    elif kind == "number":
        wrong, takes = not _positive(value) and not (key in MAY_BE_ZERO and value == 0), "a positive number"
    else:
        wrong = not isinstance(value, {"text": str, "names": list, "switch": bool}[kind])
        takes = {"text": "text", "names": "a list of names", "switch": "true or false"}[kind]
    if wrong:
        raise ConfigError(f"{where}: give {takes}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def build_cluster(machine: str, table: Table) -> Cluster:
    """One node of a machine."""
    values = {key: value for key, value in table.items() if key not in ("like", "known_as")}
    for key in ("attention_forward", "attention_backward"):
        values[key] = {int(head_size): rate for head_size, rate in values[key].items()}
    for key in ("inside", "between"):
        values[key] = Link(**values[key])
    for key in WHOLE:
        values[key] = round(values[key])
    device = Device(name=machine, **{key: values.pop(key) for key in DEVICE_KEYS})
    if values.get("shared"):  # as one rank, then as many as there are cores
        return Cluster(name=machine, device=device, devices=1, **values).with_devices(
            values["devices_per_node"]
        )
    return Cluster(name=machine, device=device, devices=values["devices_per_node"], **values)
