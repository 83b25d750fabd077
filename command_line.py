"""Read a configuration strictly from TOML files and a command line.

A schema maps each section to a frozen dataclass with fields of type bool, int, float, str, Literal, tuples of
these, or numbers with a `Range`. Anything wrong raises a `ConfigError` of one line. torch is not imported, so
that help and a misspelt key are answered at once.
"""

import argparse
import dataclasses
import difflib
import gc
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import tomli
import tomli_w

from config import DEFAULT_CONFIG, MOST, PATHS, PROJECT, SECTIONS, Config, Range, for_a_file, in_project
from errors import (
    ConfigError,
    format_value,
    nearest,
    one_line_errors,
    refuse,
    without_secrets,
)

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, halves of a pair
LONGEST_LIST, LONGEST_TEXT, LONGEST_NAME = 1000, 4096, 255  # Linux: of a path and of a name in it
Schema = dict[str, type]
Values = dict[str, dict[str, Any]]


def parse_command_line(argv: list[str], schema: Schema) -> Values:
    """Return the values of `--section.key value`, `--section.key=value` or, for a boolean, the bare flag.

    A later option replaces an earlier one. Raises ConfigError.
    """
    values: Values = {}
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        name, has_value, text = token.removeprefix("--").partition("=")
        section, dot, key = name.partition(".")
        if not token.startswith("--") or not dot:
            raise ConfigError(f"{token}: not an option; {_nearest_option(token, schema)}")
        spec = _field(schema, section, key, where="the command line")
        if not has_value:
            is_bare = not tokens or tokens[0].startswith("--")
            if is_bare and spec.type is not bool:
                raise ConfigError(f"--{name}: a value is missing ({type_name(spec.type)} expected)")
            text = "true" if is_bare else tokens.pop(0)
        values.setdefault(section, {})[key] = _convert(name, _from_text(text, spec.type), spec.type)
    return values


def _nearest_option(token: str, schema: Schema) -> str:
    """Return a hint for a word that is not an option: a key without its section or without dashes."""
    name = token.lstrip("-").partition("=")[0]
    options = {
        f"{section}.{f.name}": f.name for section in schema for f in dataclasses.fields(schema[section])
    }
    same = [option for option, key in options.items() if key == name]
    close = same or difflib.get_close_matches(name, options, 1, cutoff=0.8)
    general = "options are --section.key value, such as --job.config_file run.toml (see --help)"
    return f"did you mean --{close[0]}?" if close else general


def read_toml(
    path: str | Path, schema: Schema, named_by: str = "job.config_file", seen: tuple[str, ...] = ()
) -> Values:
    """Return the checked values of a TOML file, merged over those of the file that it `extends`."""
    if not str(path):
        raise ConfigError(f"{named_by} = '': the name of a TOML file expected")
    path = Path(path)
    raw = _parse_toml(path, named_by)
    real = os.path.realpath(path)
    if real in seen:
        chain = " -> ".join(os.path.basename(name) for name in (*seen, real))
        raise ConfigError(f"{named_by} = {path}: a circle of extends: {chain}; remove one of them")
    base = raw.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: extends = {format_value(base)}: the name of one TOML file expected")
    values = _check_values(raw, schema, where=str(path))
    if base is None:
        return values
    adjacent, ours = path.parent / base, PROJECT / base  # next to the file, or in the project
    base_path = (ours if ours.exists() and not adjacent.exists() else adjacent) if base else ""
    return merge(read_toml(base_path, schema, f"{path}: extends", (*seen, real)), values)


def _is_endless(path: Path) -> bool:
    """Return True for a device or a pipe, which may never end; not for a shell's <(...), which ends."""
    piped = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    return path.exists() and not (path.is_file() or path.is_dir() or piped)


def _parse_toml(path: Path, named_by: str) -> dict[str, Any]:
    try:
        if _is_endless(path):
            raise ConfigError(f"{named_by} = {path}: a device or a pipe; a TOML file expected")
        text = path.read_text(encoding="utf-8-sig")
    except ConfigError:
        raise  # a ValueError too
    except UnicodeDecodeError:
        raise ConfigError(f"{named_by} = {path}: not a text file; a TOML configuration expected") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        meant = path.parent / near[0] if near else PROJECT / path
        hint = f"; did you mean {meant}?" if near or _is_file(meant) else ""
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{named_by} = {path}: {reason}{hint}") from None
    if not text.strip():
        raise ConfigError(f"{named_by} = {path}: the file is empty; a TOML configuration expected")
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError) as error:  # all that tomli raises; endless digits, endless brackets
        raise ConfigError(f"{named_by} = {path}: not TOML: {error}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _check_values(raw: dict[str, Any], schema: Schema, where: str) -> Values:
    values: Values = {}
    for section, keys in raw.items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{section} = {format_value(keys)}: {_outside_section(section, schema, where)}")
        _section(schema, section, where)
        values[section] = {}
        for key, value in keys.items():
            spec = _field(schema, section, key, where)
            values[section][key] = _convert(f"{section}.{key}", value, spec.type)
    return values


def _outside_section(name: str, schema: Schema, where: str) -> str:
    if name in schema:
        return f"a section in {where} is a table; write [{name}] and its keys below"
    homes = [section for section in schema if name in _section(schema, section, where)]
    hint = f"write it below [{homes[0]}]" if homes else nearest(name, schema)
    return f"is outside any section in {where}; {hint}"


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


def _from_text(text: str, kind: Any) -> Any:
    """Return a command-line value as TOML would give it; strings need no quotes on the command line."""
    base, _ = _unwrap(kind)
    if base is str or get_origin(base) is Literal:
        return text
    if base is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        parsed = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text  # text of several lines could set further values


def _convert(name: str, value: Any, kind: Any) -> Any:
    base, bounds = _unwrap(kind)
    if get_origin(base) is tuple:
        return _convert_list(name, value, get_args(base))
    if get_origin(base) is Literal:
        if value not in get_args(base):
            raise ConfigError(f"{name} = {format_value(value)}: {nearest(str(value), get_args(base))}")
        return value
    if base is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    if type(value) is not base:
        raise ConfigError(
            f"{name} = {format_value(value)}: {type_name(kind)} expected, not {_kind_of(value)}"
        )
    if base is str and (problem := _text_problem(str(value))):
        raise ConfigError(f"{name} = {format_value(value)}: {problem}")
    if base is float and not math.isfinite(value) and not (value == math.inf and bounds and bounds.infinite):
        raise ConfigError(f"{name} = {value!r}: a finite number expected")
    if bounds and not bounds.admits(value):
        raise ConfigError(f"{name} = {value!r}: must be {bounds}")
    return value


def _text_problem(text: str) -> str:
    """Return why a text can be neither a name nor a path, "" if it can."""
    if UNPRINTABLE.search(text):
        return "a text without control characters expected"
    longest = max(len(part.encode()) for part in text.split("/"))
    if len(text) > LONGEST_TEXT or (longest > LONGEST_NAME and "://" not in text):
        return f"too long: names have at most {LONGEST_NAME} bytes, and paths {LONGEST_TEXT}"
    return ""


def _convert_list(name: str, value: Any, items: tuple) -> tuple:
    if not isinstance(value, list | tuple):
        kind = _unwrap(items[0])[0]
        example = "[1, 2]" if kind in (int, float) else "[[1, 2]]" if get_origin(kind) else '["a", "b"]'
        raise ConfigError(f"{name} = {format_value(value)}: a list expected, for example '{example}'")
    if items[-1] is not Ellipsis and len(value) != len(items):
        refuse(name, list(value), f"a list of {len(items)} expected, not of {len(value)}")
    if len(value) > LONGEST_LIST:
        refuse(name, list(value), f"{len(value)} items; at most {LONGEST_LIST} expected")
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
    if isinstance(value, date | time):
        return "a bare date; put it in quotes"
    return names[type(value)]


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
    """Return every key with type, default and meaning, after the usage of the program that runs."""
    program = Path(sys.argv[0]).absolute()
    module = f"-m {program.parent.name}.{program.stem}" if program.parent.parent == PROJECT else program.name
    command = "./run_train.sh" if program.name == "train.py" else f".venv/bin/python {module}"
    lines = [f"Usage: {command} [--job.config_file FILE] [--section.key value ...]", ""]
    for section in schema:
        lines.append(f"[{section}]")
        for key, spec in _section(schema, section, where="help").items():
            lines.append(f"  --{section}.{key}  ({type_name(spec.type)}; default {_show(spec.default)})")
            lines.append(textwrap.indent(textwrap.fill(spec.metadata["help"], 100), 6 * " "))
    return "\n".join(lines)


def _show(value: Any) -> str:
    text = tomli_w.dumps({"v": value}, multiline_strings=False).removeprefix("v = ").strip()
    return re.sub(r"\s+", " ", text).replace("[ ", "[").replace(", ]", "]")


# -- configuration of an entry point


def load_config(argv: list[str]) -> Config:
    """Return the configuration that `argv` (without the program's name) asks for. Raises ConfigError.

    Relative paths are relative to the current folder. If only job.dump_folder is given, the config.toml in it
    is read. training/config_checks.py checks combinations, not this function.
    """
    overrides = _with_paths(parse_command_line(argv, SECTIONS), os.path.expanduser)
    job = overrides.get("job", {})
    folder = job.get("dump_folder", "")
    of_run = Path(folder, "config.toml")
    default = str(of_run) if folder and of_run.is_file() else in_project(DEFAULT_CONFIG)
    config_file = os.path.expanduser(job.get("config_file", default))
    file = _with_paths(read_toml(config_file, SECTIONS), in_project)
    if "config_file" in file.get("job", {}):
        reason = f"is in {config_file} itself; name another file with extends, or on the command line"
        raise ConfigError(f"job.config_file = {file['job']['config_file']!r}: {reason}")
    values = merge(file, overrides)
    config = Config(**{name: cls(**values.get(name, {})) for name, cls in SECTIONS.items()})
    return dataclasses.replace(config, job=dataclasses.replace(config.job, config_file=config_file))


def _with_paths(values: Values, convert: Callable[[str], str]) -> Values:
    """Return the values with each path replaced by `convert(path)`."""
    found = merge(values, {})
    for section, key in PATHS:
        if key in found.get(section, {}):
            named = found[section][key]
            found[section][key] = convert(named) if isinstance(named, str) else tuple(map(convert, named))
    return found


def to_toml(config: Config) -> str:
    """Return the resolved configuration without secrets; running it, from any folder, repeats the run."""
    values = dataclasses.asdict(config)
    values["job"] = {"dump_folder": str(config.dump_folder)}
    return without_secrets(tomli_w.dumps(_with_paths(values, for_a_file)))


class OneLineParser(argparse.ArgumentParser):
    """Parser of the options of a module, `python -m module`, that raises ConfigError."""

    def __init__(self, module: str, doc: str | None) -> None:
        as_written = argparse.RawDescriptionHelpFormatter
        named = f"python -m {module}"
        super().__init__(prog=named, description=doc, formatter_class=as_written, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.replace('argument ', '')}; --help lists the options")


def own_options(**defaults: Any) -> argparse.ArgumentParser:
    """Return a parser of the options of an entry point besides those of the configuration.

    The type of a default is the type of the option: a boolean is a flag, a list may be given several times.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, default in defaults.items():
        known: dict[type, dict[str, Any]] = {bool: {"action": "store_true"}, list: {"action": "append"}}
        kind = known.get(type(default), {"type": _own_type(type(default))})
        parser.add_argument(f"--{name}", default=default, **kind)
    return parser


def _own_type(kind: type) -> Callable[[str], Any]:
    """Return the converter that argparse calls, which adds the name of the option to an error."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{format_value(text)}: {type_name(kind)} expected") from None
        number = kind is not str
        problem = "out of range" if number and not abs(value) <= MOST else _text_problem(text)
        if problem:
            raise argparse.ArgumentTypeError(f"{format_value(text)}: {problem}")
        return value

    return read


def split_options(argv: list[str], own: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the own options of an entry point and the remaining arguments. Raises ConfigError."""
    try:
        return own.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error).replace("argument ", "")) from error


def start(argv: list[str], doc: str | None, check: Callable[[Config], None] | None) -> Config:
    """Answer --help, or return the configuration. Raises ConfigError.

    check: raises ConfigError for a configuration that cannot work; None: the caller checks later.
    """
    if not gc.isenabled():
        gc.freeze()  # exclude the objects of imported modules from later collections
        gc.enable()
    if {"--help", "-h"} & set(argv):
        print(f"{doc}\n{help_text(SECTIONS)}")
        sys.exit(0)
    config = load_config(argv)
    if check:
        check(config)
    return config


def answer_early(
    doc: str | None, check: Callable[[Config], None] | None, own: argparse.ArgumentParser | None = None
) -> None:
    """Answer help and bad input before an entry point imports torch, which takes seconds."""
    with one_line_errors():
        start(split_options(sys.argv[1:], own or own_options())[1], doc, check)
    gc.disable()  # until `start` in main: imports create millions of objects and no garbage


def text_table(formats: str, rows: Iterable[Iterable[object]]) -> str:
    """Return rows as lines of text; `formats` has a specification for each column: "<34 >10.2f >9.1%".

    Text, such as the head of a column, takes only alignment and width; None is an empty cell.
    """
    columns = formats.split()
    lines = ["".join(map(_cell, row, columns)).rstrip() for row in rows]
    return "\n".join(lines)


def _cell(value: object, specification: str) -> str:
    if isinstance(value, int | float):
        return format(value, specification)
    width = re.match(r"[<>]?\d+", specification.replace("+", ""))
    return format(value or "", width[0] if width else "")
