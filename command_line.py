"""Strict reading of sections of dataclasses from TOML files and a command line.

Knows nothing of Rossby's keys: a schema maps each section to a frozen dataclass whose field types are bool,
int, float, str, Literal, tuples of these, or numbers with a `Range`. Everything wrong ends in a `ConfigError`
of one line.
"""

import dataclasses
import difflib
import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli
import tomli_w

Schema = dict[str, type]
Values = dict[str, dict[str, Any]]


class ConfigError(ValueError):
    """What the user asked for cannot be done: one line that names key, value, reason and fix. Exit code 2."""


@dataclass(frozen=True)
class Range:
    """Bounds of a number, both inclusive unless `above` (then the lower one is not)."""

    low: float
    high: float = math.inf
    above: bool = False

    def admits(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high

    def __str__(self) -> str:
        lower = f"{'above' if self.above else 'at least'} {self.low:g}"
        return lower if self.high == math.inf else f"{lower} and at most {self.high:g}"


def parse_command_line(argv: list[str], schema: Schema) -> Values:
    """`--section.key value`, `--section.key=value`, or the bare flag for a boolean."""
    values: Values = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if not token.startswith("--") or "." not in token.split("=")[0]:
            raise ConfigError(f"{token}: not an option; options are --section.key value (see --help)")
        name, has_value, text = token[2:].partition("=")
        section, key = name.split(".", 1)
        spec = _field(schema, section, key, where="the command line")
        if not has_value:
            is_flag = spec.type is bool and (not tokens or tokens[0].lower() not in ("true", "false"))
            if not is_flag and (not tokens or tokens[0].startswith("--")):
                raise ConfigError(f"--{name}: a value is missing ({type_name(spec.type)} expected)")
            text = "true" if is_flag else tokens.pop(0)
        values.setdefault(section, {})[key] = _convert(
            f"{section}.{key}", _from_text(text, spec.type), spec.type
        )
    return values


def read_toml(path: str | Path, schema: Schema, seen: tuple[Path, ...] = ()) -> Values:
    """Checked values of one TOML file, over those of the file it `extends` (relative to it)."""
    path = Path(path)
    if path.resolve() in seen:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p.name) for p in seen)}")
    raw = _parse_toml(path)
    base = raw.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: extends = {base!r}: the name of a TOML file expected")
    values = _check_values(raw, schema, where=str(path))
    return (
        values
        if base is None
        else merge(read_toml(path.parent / base, schema, (*seen, path.resolve())), values)
    )


def _parse_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file; a TOML configuration expected") from None
    except OSError as error:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise ConfigError(f"job.config_file = {path}: {error.strerror or error}{hint}") from None
    if not text.strip():
        raise ConfigError(f"{path}: the file is empty; a TOML configuration expected")
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _check_values(raw: dict[str, Any], schema: Schema, where: str) -> Values:
    values: Values = {}
    for section, keys in raw.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{section}: stands outside any section in {where}; write it as [section] key")
        _section(schema, section, where)
        values[section] = {}
        for key, value in keys.items():
            spec = _field(schema, section, key, where)
            values[section][key] = _convert(f"{section}.{key}", value, spec.type)
    return values


def merge(base: Values, over: Values) -> Values:
    return {name: {**base.get(name, {}), **over.get(name, {})} for name in {**base, **over}}


def _section(schema: Schema, section: str, where: str) -> dict[str, dataclasses.Field]:
    if section not in schema:
        raise ConfigError(f"{section}: unknown section in {where}; {nearest(section, schema)}")
    return {f.name: f for f in dataclasses.fields(schema[section])}


def _field(schema: Schema, section: str, key: str, where: str) -> dataclasses.Field:
    fields = _section(schema, section, where)
    if key not in fields:
        elsewhere = [f"{s}.{key}" for s in schema if key in _section(schema, s, where)]
        valid = f"did you mean {elsewhere[0]}?" if elsewhere else nearest(key, fields, prefix=f"{section}.")
        raise ConfigError(f"{section}.{key}: unknown key in {where}; {valid}")
    return fields[key]


def nearest(name: str, valid: Any, prefix: str = "") -> str:
    """'did you mean X?' for a typo, else the list of valid names."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(name, names, 1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else f"valid: {', '.join(names)}"


def _from_text(text: str, kind: Any) -> Any:
    """A command-line value as TOML would give it; strings need no quotes there."""
    base, _ = _unwrap(kind)
    if base is str or get_origin(base) is Literal:
        return text
    if base is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return text


def _convert(name: str, value: Any, kind: Any) -> Any:
    base, bounds = _unwrap(kind)
    if get_origin(base) is tuple:
        return _convert_list(name, value, get_args(base))
    if get_origin(base) is Literal:
        if value not in get_args(base):
            raise ConfigError(f"{name} = {value!r}: {nearest(str(value), get_args(base))}")
        return value
    if base is float and type(value) is int:
        value = float(value)
    if type(value) is not base:
        raise ConfigError(f"{name} = {value!r}: {type_name(kind)} expected, not {_kind_of(value)}")
    if base is float and math.isnan(value):
        raise ConfigError(f"{name} = nan: a number expected")
    if bounds and not bounds.admits(value):
        raise ConfigError(f"{name} = {value!r}: must be {bounds}")
    return value


def _convert_list(name: str, value: Any, items: tuple) -> tuple:
    if not isinstance(value, list | tuple):
        raise ConfigError(f'{name} = {value!r}: a list expected, for example "[1, 2]" or \'["a", "b"]\'')
    if items[-1] is not Ellipsis and len(value) != len(items):
        raise ConfigError(f"{name} = {list(value)!r}: a list of {len(items)} expected, not of {len(value)}")
    return tuple(_convert(f"{name}[{i}]", v, items[0]) for i, v in enumerate(value))


def _unwrap(kind: Any) -> tuple[Any, Range | None]:
    return (kind.__origin__, kind.__metadata__[0]) if get_origin(kind) is Annotated else (kind, None)


def _kind_of(value: Any) -> str:
    names = {
        str: "text",
        bool: "a boolean",
        int: "a whole number",
        float: "a number",
        dict: "a table",
        list: "a list",
    }
    return names.get(type(value), type(value).__name__)


def type_name(kind: Any) -> str:
    base, bounds = _unwrap(kind)
    if get_origin(base) is Literal:
        return " | ".join(get_args(base))
    if get_origin(base) is tuple:
        args = get_args(base)
        return (
            f"list of {type_name(args[0])}"
            if args[-1] is Ellipsis
            else f"[{', '.join(map(type_name, args))}]"
        )
    names = {int: "whole number", float: "number", str: "text", bool: "true | false"}
    return names[base] + (f" {bounds}" if bounds else "")


def help_text(schema: Schema) -> str:
    """Every key with type, default and meaning; the meaning is the comment in the source above."""
    lines = ["Usage: ./run_train.sh [--job.config_file FILE] [--section.key value ...]", ""]
    for section, cls in schema.items():
        lines.append(f"[{section}]")
        meanings = _comments(cls)
        for key, spec in _section(schema, section, where="help").items():
            lines.append(f"  --{section}.{key}  ({type_name(spec.type)}; default {_show(spec.default)})")
            lines.append(f"      {meanings[key]}")
    return "\n".join(lines)


def _comments(cls: type) -> dict[str, str]:
    meanings, above = {}, ""
    for line in inspect.getsource(cls).splitlines():
        if line.strip().startswith("#"):
            above = line.strip("# ")
        elif match := re.match(r"\s+(\w+): .*?(?:  # (.*))?$", line):
            meanings[match[1]] = match[2] or above
            above = ""
    return meanings


def _show(value: Any) -> str:
    text = tomli_w.dumps({"v": value}, multiline_strings=False).removeprefix("v = ").strip()
    return re.sub(r"\s+", " ", text)
