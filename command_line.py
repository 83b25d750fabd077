"""Read a configuration strictly from TOML files and a command line.

A schema maps each section to a frozen dataclass with fields of type bool, int, float, str, Literal, tuples of
these, or numbers with a `Range`. Anything wrong raises a `ConfigError` of one line. torch is not imported, so
that help and a misspelt key are answered at once.
"""

import dataclasses
import difflib
import gc
import math
import os
import re
import sys
import textwrap
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

import tomli
import tomli_w

from config import DEFAULT_CONFIG, MOST, PATHS, PROJECT, SECTIONS, Config, Range, for_a_file, in_project
from errors import ConfigError, format_value, nearest, one_line_errors, require, without_secrets

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
            # Perhaps a key without its section or without dashes.
            word = token.lstrip("-").partition("=")[0]
            options = {
                f"{s}.{field.name}": field.name for s in schema for field in dataclasses.fields(schema[s])
            }
            close = [option for option, known in options.items() if known == word]
            close = close or difflib.get_close_matches(word, options, 1, cutoff=0.8)
            hint = "options are --section.key value, such as --job.config_file run.toml (see --help)"
            hint = f"did you mean --{close[0]}?" if close else hint
            raise ConfigError(f"{token}: not an option; {hint}")
        kind = _field(schema, section, key, where="the command line").type
        values.setdefault(section, {})[key] = _option_value(name, kind, text if has_value else None, tokens)
    return values


def split_options(argv: list[str], own: dict[str, Any]) -> tuple[Namespace, list[str]]:
    """Return the options of an entry point besides those of the configuration, and the remaining arguments.

    own: default of each; a boolean is a flag, a list may be given several times. Raises ConfigError.
    """
    values, rest, tokens = {**own}, [], list(argv)
    kinds = {bool: bool, int: Annotated[int, Range(-MOST, MOST)], str: str, list: str}
    while tokens:
        token = tokens.pop(0)
        name, has_value, text = token.removeprefix("--").partition("=")
        if name not in own or not token.startswith("--"):
            rest.append(token)
            continue
        value = _option_value(name, kinds[type(own[name])], text if has_value else None, tokens)
        values[name] = [*values[name], value] if isinstance(own[name], list) else value
    return Namespace(**values), rest


def _option_value(name: str, kind: Any, text: str | None, tokens: list[str]) -> Any:
    """Return the value of an option from its text or, without one, from the next token."""
    if text is None:
        is_bare = not tokens or tokens[0].startswith("--")
        if is_bare and kind is not bool:
            raise ConfigError(f"--{name}: a value is missing ({type_name(kind)} expected)")
        text = "true" if is_bare else tokens.pop(0)
    # The value as TOML would give it; strings need no quotes on the command line.
    base, value = _unwrap(kind)[0], text
    if base is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif base is not str and get_origin(base) is not Literal:
        with suppress(ValueError, RecursionError):
            parsed = tomli.loads(f"value = {text}")
            value = parsed["value"] if len(parsed) == 1 else text  # several lines could set further keys
    return _convert(name, value, kind)


def read_toml(
    name: str | Path, schema: Schema, named_by: str = "job.config_file", seen: tuple[str, ...] = ()
) -> Values:
    """Return the checked values of a TOML file, merged over those of the file that it `extends`.

    named_by: the key that names the file; seen: the files that have led to it. Raises ConfigError.
    """
    if not str(name):
        raise ConfigError(f"{named_by} = '': the name of a TOML file expected")
    path, name = Path(name), f"{named_by} = {name}"
    # Devices and pipes may never end; what a shell writes as <(...) does.
    piped = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    try:
        if path.exists() and not (path.is_file() or path.is_dir() or piped):
            raise ConfigError(f"{name}: a device or a pipe; a TOML file expected")
        text = path.read_text(encoding="utf-8-sig")
    except ConfigError:
        raise  # a ValueError too
    except UnicodeDecodeError:
        raise ConfigError(f"{name}: not UTF-8 text; save it as UTF-8, or name a TOML file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.toml")], 1)
        candidates, hint = [path.parent / near[0]] if near else [PROJECT / path], ""
        with suppress(OSError, ValueError):  # a name too long, or with a null byte
            hint = "".join(f"; did you mean {path}?" for path in candidates if path.is_file())
            hint = "; name a TOML file in it" if path.is_dir() else hint or "; name a file that exists"
            hint += ", next to this one or in the project" * bool(seen)
        raise ConfigError(f"{name}: {getattr(error, 'strerror', None) or error}{hint}") from None
    # -- a table of sections, and perhaps the file that it extends
    if not text.strip():
        raise ConfigError(f"{name}: the file is empty; a TOML configuration expected")
    try:
        raw = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # all that tomli raises; endless digits, endless brackets
        fixes = {
            "Unescaped": "; write paths with / or in single quotes",
            "Invalid value": "; write true or false, and text in quotes",
        }
        fix = next((fix for start, fix in fixes.items() if str(error).startswith(start)), "")
        raise ConfigError(f"{name}: not TOML: {error}{fix}") from None
    real, extended = os.path.realpath(path), raw.pop("extends", None)
    if real in seen:
        chain = " -> ".join(os.path.basename(name) for name in (*seen, real))
        raise ConfigError(f"{name}: a circle of extends: {chain}; remove one of them")
    if extended is not None and not isinstance(extended, str):
        raise ConfigError(f"{path}: extends = {format_value(extended)}: the name of one TOML file expected")
    # -- every key by its section, with the type of its field
    values: Values = {}
    for section, keys in raw.items():
        if not isinstance(keys, dict):
            homes = [known for known in schema if section in _section(schema, known, str(path))]
            hint = f"write it below [{homes[0]}]" if homes else nearest(section, schema)
            reason = f"is outside any section in {path}; {hint}"
            if section in schema:
                reason = f"a section in {path} is a table; write [{section}] and its keys below"
            raise ConfigError(f"{section} = {format_value(keys)}: {reason}")
        _section(schema, section, str(path))
        values[section] = {
            key: _convert(f"{section}.{key}", value, _field(schema, section, key, str(path)).type)
            for key, value in keys.items()
        }
    # -- values of this file replace those of the file that it extends
    if extended is None:
        return values
    adjacent, ours = path.parent / extended, PROJECT / extended  # next to the file, or in the project
    base = (ours if ours.exists() and not adjacent.exists() else adjacent) if extended else ""
    return merge(read_toml(base, schema, f"{path}: extends", (*seen, real)), values)


def merge(base: Values, over: Values) -> Values:
    return {name: {**base.get(name, {}), **over.get(name, {})} for name in {**base, **over}}


def _section(schema: Schema, section: str, where: str) -> dict[str, dataclasses.Field]:
    if section not in schema:
        raise ConfigError(f"{section}: unknown section in {where}; {nearest(section, schema)}")
    return {field.name: field for field in dataclasses.fields(schema[section])}


def _field(schema: Schema, section: str, key: str, where: str) -> dataclasses.Field:
    fields = _section(schema, section, where)
    if key not in fields:
        elsewhere = [f"{s}.{key}" for s in schema if key in _section(schema, s, where)]
        is_known = len(elsewhere) == 1  # "enable" is in several sections
        valid = f"did you mean {elsewhere[0]}?" if is_known else nearest(key, fields, prefix=f"{section}.")
        raise ConfigError(f"{section}.{key}: unknown key in {where}; {valid}")
    return fields[key]


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Return a value of TOML as one of the type of its field. Raises ConfigError."""
    base, bounds = _unwrap(kind)
    if get_origin(base) is Literal:
        require(value in get_args(base), name, value, nearest(str(value), get_args(base)))
        return value
    # -- lists, whose items are of one type
    if get_origin(base) is tuple:
        items = get_args(base)
        first = _unwrap(items[0])[0]
        example = "[1, 2]" if first in (int, float) else "[[1, 2]]" if get_origin(first) else '["a", "b"]'
        require(isinstance(value, list | tuple), name, value, f"a list expected, for example '{example}'")
        if items[-1] is not Ellipsis:
            reason = f"a list of {len(items)} expected, not of {len(value)}"
            require(len(value) == len(items), name, list(value), reason)
        reason = f"{len(value)} items; at most {LONGEST_LIST} expected"
        require(len(value) <= LONGEST_LIST, name, list(value), reason)
        return tuple(_convert(f"{name}[{i}]", v, items[0]) for i, v in enumerate(value))
    if base is float and type(value) is int and abs(value) <= sys.float_info.max:
        value = float(value)
    # -- a type that is not the field's, named as a user of TOML knows it
    kinds = {
        bool: "a boolean",
        int: "a whole number",
        float: "one with decimals",
        dict: "a table",
        list: "a list",
    }
    found = (kinds | {str: "text"}).get(type(value), "a bare date; put it in quotes")
    reason = f"{type_name(kind)} expected, not {found}"
    require(type(value) is base, name, value, reason)
    # -- text that is a name or a path: what no file system takes is refused here, not after an hour
    if base is str:
        text, reason = str(value), "a text without control characters expected"
        require(not UNPRINTABLE.search(text), name, value, reason)
        is_short = "://" in text or max(len(part.encode()) for part in text.split("/")) <= LONGEST_NAME
        reason = f"too long: names have at most {LONGEST_NAME} bytes, and paths {LONGEST_TEXT}"
        require(is_short and len(text) <= LONGEST_TEXT, name, value, reason)
    require(base is not float or math.isfinite(value), name, value, "a finite number expected")
    require(bounds is None or bounds.admits(value), name, value, f"must be {bounds}")
    return value


def _unwrap(kind: Any) -> tuple[Any, Range | None]:
    return (kind.__origin__, kind.__metadata__[0]) if get_origin(kind) is Annotated else (kind, None)


def type_name(kind: Any) -> str:
    base, bounds = _unwrap(kind)
    args = get_args(base)
    if get_origin(base) is Literal:
        return " | ".join(args)
    if get_origin(base) is tuple:
        is_any = args[-1] is Ellipsis
        return f"list of {type_name(args[0])}" if is_any else f"[{', '.join(map(type_name, args))}]"
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
        for key, field in _section(schema, section, where="help").items():
            default = (
                tomli_w.dumps({"v": field.default}, multiline_strings=False).removeprefix("v = ").strip()
            )
            default = re.sub(r"\s+", " ", default).replace("[ ", "[").replace(", ]", "]")
            lines.append(f"  --{section}.{key}  ({type_name(field.type)}; default {default})")
            lines.append(textwrap.indent(textwrap.fill(field.metadata["help"], 100), 6 * " "))
    return "\n".join(lines)


# -- configuration of an entry point


def load_config(argv: list[str]) -> Config:
    """Return the configuration that `argv` (without the program's name) asks for. Raises ConfigError.

    Relative paths are relative to the current folder. If only job.dump_folder is given, the config.toml in it
    is read. training/config_checks.py checks combinations, not this function.
    """
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to one that is there") from None
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


class OneLineParser(ArgumentParser):
    """Parser of the options of a module, `python -m module`, that raises ConfigError."""

    def __init__(self, module: str, doc: str | None) -> None:
        as_written = RawDescriptionHelpFormatter
        super().__init__(f"python -m {module}", None, doc, formatter_class=as_written, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.replace('argument ', '')}; --help lists the options")


def start(argv: list[str], doc: str | None, check: Callable[[Config], None] | None) -> Config:
    """Answer --help, or return the configuration. Raises ConfigError.

    check: raises ConfigError for a configuration that cannot work; None: the caller checks later.
    """
    if not gc.isenabled():
        gc.freeze()  # exclude the objects of imported modules from later collections
        gc.enable()
    if {"--help", "-h"} & set(argv):
        named = {section: SECTIONS[section] for section in SECTIONS if section in argv}
        # Last what is the program's own: a terminal shows the end of what is printed.
        print(help_text(named or SECTIONS))
        print("" if named else f"\n{doc}\n--help SECTION prints the keys of a section.")
        sys.exit(0)
    config = load_config(argv)
    if check:
        check(config)
    return config


def answer_early(
    doc: str | None, check: Callable[[Config], None] | None, own: dict[str, Any] | None = None
) -> None:
    """Answer help and bad input before an entry point imports torch, which takes seconds. What is checked
    here is not checked again.
    """
    with one_line_errors():
        start(split_options(sys.argv[1:], own or {})[1], doc, check)
    gc.disable()  # until `start` in main: imports create millions of objects and no garbage


def text_table(formats: str, rows: Iterable[Iterable[object]]) -> str:
    """Return rows as lines of text; `formats` has a specification for each column: "<34 >10.2f >9.1%".

    Text, such as the head of a column, takes only alignment and width; None is an empty cell.
    """

    def cell(value: object, specification: str) -> str:
        if isinstance(value, int | float):
            return format(value, specification)
        width = re.match(r"[<>]?\d+", specification.replace("+", ""))
        return format(value or "", width[0] if width else "")

    return "\n".join("".join(map(cell, row, formats.split())).rstrip() for row in rows)
