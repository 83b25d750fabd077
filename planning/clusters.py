"""Machines that runs can be planned for: planning/clusters.toml, a user's own files, a calibration."""

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from config import in_project
from errors import ConfigError
from planning.calibration import calibrated, load_calibration
from planning.hardware import Cluster, Device, Link

MACHINES = Path(__file__).with_name("clusters.toml")
MOST_DEVICES = 1_000_000
CALIBRATION = Path(in_project("outputs/calibration.json"))
THIS = "this"  # the machine that was calibrated
Table = dict[str, Any]  # one machine of a TOML file
PRECISIONS = ("bf16", "fp32", "fp8")  # "fp32" means TF32 where the device has it
HEAD_SIZES = ("32", "48", "64", "80", "96", "128", "256")  # TOML's keys are text
LINK = ("latency", "bandwidth")
NEEDED = {PRECISIONS: ("bf16", "fp32"), LINK: LINK}  # of the keys of such tables
DEVICE_KEYS = tuple(field.name for field in dataclasses.fields(Device) if field.name != "name")
# Key of a machine -> what it takes: a type, or a table with these keys; (): a number.
KEYS: dict[str, type | tuple[str, ...]] = {
    "like": str,  # a machine that has the rest
    "known_as": list,  # torch's names of the device
    **dict.fromkeys(("memory", "reserved", "bandwidth", "watts"), ()),
    **dict.fromkeys(("peak", "matmul"), PRECISIONS),
    **dict.fromkeys(("attention_forward", "attention_backward"), HEAD_SIZES),
    **dict.fromkeys(("hopper_forward", "hopper_backward"), HEAD_SIZES),
    **dict.fromkeys(("inside", "between"), LINK),
    **dict.fromkeys(("devices_per_node", "host_memory", "host_bandwidth", "host_link", "storage"), ()),
    "cores": (),
    **dict.fromkeys(("on_demand", "spot", "spot_interruptions", "failures", "pue"), ()),
    "shared": bool,
    "float32_attention": (),
}
OPTIONAL = ("like", "known_as", "shared", "cores", "float32_attention", "hopper_forward", "hopper_backward")
MAY_BE_ZERO = ("reserved", "on_demand", "spot", "spot_interruptions", "failures")
WHOLE = ("memory", "reserved", "devices_per_node", "host_memory")


def load_cluster(name: str, files: Iterable[str | Path] = (), calibration: Path = CALIBRATION) -> Cluster:
    """The cluster `name`: a machine and how many of its devices ("a100x64", "a100-40x16", "cpu2").

    A machine's name alone is one node of it. `files` are TOML files of the user's, which add machines or
    change keys of known ones. "this" takes its rates from `calibration`, and so does "cpu" where a CPU was
    calibrated. ConfigError, in one line, for what cannot be read or is not known.
    """
    tables = all_machines(files)
    machine, devices = split_name(name, [*tables, THIS])
    if machine == THIS or (machine == "cpu" and calibration.exists()):
        measured = load_calibration(calibration)
        if machine == THIS or measured.device_type == "cpu":
            like = machine_known_as(measured.device_name, files)
            if not like:
                fix = f'add one with known_as = ["{measured.device_name}"] in a file given with --clusters'
                raise ConfigError(f"cluster {THIS!r}: no machine is a {measured.device_name!r}; {fix}")
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
            if int(found[2]) > MOST_DEVICES:
                raise ConfigError(f"cluster {name!r}: give at most {MOST_DEVICES:,} devices")
            return found[1], int(found[2])
    spellings = (re.sub(r"x?\d*$", "", name.lower()), name.lower())
    near = [match for text in spellings for match in difflib.get_close_matches(text, machines, 1)]
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"cluster {name!r}: no such machine; {meant}give one of {', '.join(machines)} and how many devices, "
        "as in a100x64"
    )


def machine_known_as(device_name: str, files: Iterable[str | Path] = ()) -> str | None:
    """Return the machine that has torch's name of this device in `known_as`."""
    tables = all_machines(files)
    return next((name for name, keys in tables.items() if device_name in keys.get("known_as", ())), None)


# -- TOML


def all_machines(files: Iterable[str | Path] = ()) -> dict[str, Table]:
    """Machines of clusters.toml and, over it, of the user's files. Raises ConfigError."""
    tables: dict[str, Table] = {}
    for file in (MACHINES, *map(Path, files)):
        add_machines(tables, read_machines(file), file)
    return tables


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
        where, base = f"--clusters {path}", table.get("like", machine)
        if "like" in table and base not in tables:
            known = ", ".join(tables)
            raise ConfigError(f"{where}: {machine}.like = {base!r}: no such machine; one of {known}")
        tables[machine] = tables.get(base, {}) | table
        if missing := [key for key in KEYS if key not in tables[machine] and key not in OPTIONAL]:
            fix = f"add {', '.join(missing)}, or like = the machine that has the same"
            raise ConfigError(f"{where}: [{machine}] is not complete; {fix}")


def _check(where: str, key: str, value: Any) -> None:
    """ConfigError unless `value` is what `key` takes."""
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, 1)
        raise ConfigError(f"{where}: no such key; " + (f"did you mean {near[0]}?" if near else "remove it"))
    takes = KEYS[key]
    if isinstance(takes, type):
        right = isinstance(value, takes)
        what = {str: "text", list: "a list of names", bool: "true or false"}[takes]
    elif takes:
        right = isinstance(value, dict) and all(map(_positive, value.values())) and set(value) <= set(takes)
        needed = NEEDED.get(takes, ())
        right = right and bool(value) and set(needed) <= set(value)
        what = f"a table of positive numbers with the keys {', '.join(takes)}"
        what += f" (at least {', '.join(needed)})" if needed else ""
    else:
        right, what = _positive(value) or (key in MAY_BE_ZERO and value == 0), "a positive number"
    if not right:
        raise ConfigError(f"{where}: give {what}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def build_cluster(machine: str, table: Table) -> Cluster:
    """One node of a machine."""
    values = {key: value for key, value in table.items() if key not in ("like", "known_as")}
    for key, takes in KEYS.items():
        if takes is HEAD_SIZES:
            values[key] = {int(head_size): rate for head_size, rate in values.get(key, {}).items()}
        elif takes is LINK:
            values[key] = Link(**values[key])
        elif key in WHOLE:
            values[key] = round(values[key])
    device = Device(machine, **{key: values.pop(key) for key in DEVICE_KEYS if key in values})
    devices = values["devices_per_node"]
    if values.get("shared"):  # as one rank, then as many as there are cores
        return Cluster(machine, device, 1, **values).with_devices(devices)
    return Cluster(machine, device, devices, **values)
