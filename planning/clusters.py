"""Machines that runs can be planned for: planning/clusters.toml, and a user's own files."""

import dataclasses
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from errors import ConfigError, nearest
from planning.hardware import Cluster, Device, Link

MACHINES = Path(__file__).with_name("clusters.toml")
MOST_DEVICES = 1_000_000
Table = dict[str, Any]  # one machine of a TOML file
LINK = ("latency", "bandwidth")
# Keys of a machine that are no numbers -> a type, or the keys that a table of numbers needs.
OTHERS: dict[str, type | tuple[str, ...]] = {
    "like": str,  # a machine that has the rest
    "known_as": list,  # torch's names of the device
    "shared": bool,
    **dict.fromkeys(("peak", "matmul"), ("bf16", "fp32")),  # and fp8; "fp32" means TF32 where there is TF32
    **dict.fromkeys(("inside", "between"), LINK),
}
# By head size, which is text in TOML.
OTHERS |= {f"{kind}_{way}": () for kind in ("attention", "hopper") for way in ("forward", "backward")}
TABLE_KEYS = (*LINK, "bf16", "fp32", "fp8", "32", "48", "64", "80", "96", "128", "256")
DEVICE_KEYS = [field.name for field in dataclasses.fields(Device) if field.name != "name"]
CLUSTER_KEYS = [field.name for field in dataclasses.fields(Cluster)]
NO_KEYS = ("name", "device", "devices", "anchor")
KEYS = ["like", "known_as", *DEVICE_KEYS, *(key for key in CLUSTER_KEYS if key not in NO_KEYS)]
OPTIONAL = ("like", "known_as", "shared", "float32_attention", "hopper_forward", "hopper_backward")
MAY_BE_ZERO = ("reserved", "on_demand", "spot", "spot_interruptions", "failures")


def load_cluster(name: str, files: Iterable[str | Path] = ()) -> Cluster:
    """The cluster `name`: a machine and how many of its devices ("a100x64", "a100-40x16", "cpu2").

    A machine's name alone is one node of it. `files` are TOML files of the user's, which add machines or
    change keys of known ones. ConfigError, in one line, for what cannot be read or is not known.
    """
    tables = all_machines(files)
    machine, devices = split_name(name, list(tables))
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
    hint = nearest(re.sub(r"x?\d*$", "", name.lower()), machines)
    raise ConfigError(f"cluster {name!r}: no such machine; {hint} (its devices follow, as in a100x64)")


def machine_known_as(device_name: str, files: Iterable[str | Path] = ()) -> str | None:
    """Return the machine that has torch's name of this device in `known_as`."""
    tables = all_machines(files)
    return next((name for name, keys in tables.items() if device_name in keys.get("known_as", ())), None)


# -- TOML


def all_machines(files: Iterable[str | Path] = ()) -> dict[str, Table]:
    """Machines of clusters.toml and, over it, of the user's files. Raises ConfigError.

    A machine that is there, or the one that a new one is `like`, gives what is left out.
    """
    tables: dict[str, Table] = {}
    for path in (MACHINES, *map(Path, files)):
        where = f"--clusters {path}"
        for machine, table in read_machines(path).items():
            base = table.get("like", machine)
            if "like" in table and base not in tables:
                reason = f"no such machine; {nearest(base, tables)}"
                raise ConfigError(f"{where}: {machine}.like = {base!r}: {reason}")
            tables[machine] = tables.get(base, {}) | table
            if missing := [key for key in KEYS if key not in tables[machine] and key not in OPTIONAL]:
                fix = f"add {', '.join(missing)}, or like = the machine that has the same"
                raise ConfigError(f"{where}: [{machine}] is not complete; {fix}")
    return tables


def read_machines(path: Path) -> dict[str, Table]:
    """Machine -> its keys, as in `path`. ConfigError for what is no TOML or has unknown keys."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--clusters {path}: {error}; give a TOML file of machines") from error
    for machine, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"--clusters {path}: {machine} is outside a machine; put it below [name]")
        for key, value in table.items():
            if fix := what_is_wrong(key, value):
                raise ConfigError(f"--clusters {path}: {machine}.{key} = {value!r}: {fix}")
    return tables


def what_is_wrong(key: str, value: Any) -> str:
    """Return "" if `value` is what `key` takes, or else what to do."""
    if key not in KEYS:
        return f"no such key; {nearest(key, KEYS)}"
    takes = OTHERS.get(key)
    if takes is None:
        right = is_positive(value) or (key in MAY_BE_ZERO and value == 0)
        return "" if right else "give a positive number"
    if isinstance(takes, type):
        return "" if isinstance(value, takes) else f"give a {takes.__name__}"
    right = isinstance(value, dict) and all(map(is_positive, value.values()))
    if right and value and set(takes) <= set(value) <= set(TABLE_KEYS):
        return ""
    return f"give a table of positive numbers with the keys {', '.join(takes) or 'of head sizes'}"


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def build_cluster(machine: str, table: Table) -> Cluster:
    """Return one node of a machine; of one that ranks share, divided among as many as it has cores."""
    values = {key: value for key, value in table.items() if key not in ("like", "known_as")}
    for key, takes in OTHERS.items():
        if takes == ():
            values[key] = {int(head_size): rate for head_size, rate in values.get(key, {}).items()}
        elif takes is LINK:
            values[key] = Link(**values[key])
    device = Device(machine, **{key: values.pop(key) for key in DEVICE_KEYS if key in values})
    devices = values["devices_per_node"] = round(values["devices_per_node"])
    one = Cluster(machine, device, 1 if values.get("shared") else devices, **values)
    return one.with_devices(devices)
