"""Every key of the schema, with values that its type cannot mean: one line each, from the schema itself."""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest

from command_line import split_options
from config import SECTIONS, Range
from errors import ConfigError, without_secrets
from plan import OPTIONS as PLAN
from training.config_checks import load_checked

LONG = "[" + ",".join(["1"] * 20_000) + "]"
NUMBERS = ["1" + "0" * 18, "1" + "0" * 30, "-1" + "0" * 30]
FLOATS = ["nan", "inf", "-inf", "1e309", "1e300"]
TEXTS = ["x" * 300, "a\0b", "a\ud800b", "a\nb", "\x1b[31m"]
LISTS = ["[[1]]", '[["a"]]', LONG, "[", "{}", "[{a = 1}]", "1"]


def kinds() -> Iterator[tuple[str, Any, Range | None]]:
    for section, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            kind, bounds = field.type, None
            assert not isinstance(kind, str)
            if hasattr(kind, "__metadata__"):
                kind, bounds = kind.__origin__, kind.__metadata__[0]
            yield f"{section}.{field.name}", kind, bounds


def bad_values() -> Iterator[tuple[str, str]]:
    for key, kind, bounds in kinds():
        if get_origin(kind) is tuple:
            values = [*LISTS]
            inner = get_args(kind)[0]
            if getattr(inner, "__origin__", inner) is not str:
                values = [*LISTS, *(f"[{number}]" for number in NUMBERS)]
            else:
                values = [*LISTS, f'["{"x" * 300}"]', '["a\\u0000b"]', '["a\\nb"]']
        elif kind is bool:
            values = ["yes", "1", "", "[true]"]
        elif kind is int:
            values = [*NUMBERS, "1.5", "inf", "nan", "", "one", "0x", LONG]
        elif kind is float:
            values = [*FLOATS, "", "one", "[1.0]"]
        elif get_origin(kind) is Literal:
            values = ["", "x" * 300, "a\0b", "a\nb", "[]"]
        else:
            values = [*TEXTS]
        ends = (bounds.low - 1, bounds.low, bounds.high, bounds.high + 1) if bounds else ()
        values += [str(kind(e)) for e in ends if math.isfinite(e) and bounds and not bounds.admits(kind(e))]
        yield from ((key, value) for value in values)


CASES = list(bad_values())


def test_the_schema_is_fuzzed_whole():
    assert len({key for key, _ in CASES}) > 100 and len(CASES) > 500


def test_every_bad_value_is_one_line_and_quick():
    """In one test: a thousand of them take seconds, a thousand tests a minute."""
    accepted, ugly = [], []
    for key, value in CASES:
        began = time.monotonic()
        try:
            load_checked([f"--{key}={value}"])
        except ConfigError as error:
            text = str(error)
            if key.partition(".")[2] not in text or len(text) > 1000 or "\n" in text:
                ugly.append((key, value[:40], text[:200]))
        else:
            accepted.append((key, value[:40]))
        assert time.monotonic() - began < 5, (key, value[:40])
    assert not accepted, accepted
    assert not ugly, ugly


@pytest.mark.parametrize(
    "text",
    [
        "https://user:pa55@example.org/era5.zarr",
        "s3://AKIA123:pa55@bucket/era5.zarr",
        "https://example.org/era5.zarr?X-Amz-Signature=pa55&sig=pa55",
        "az://container/x?sv=2020&sig=pa55",
    ],
)
def test_credentials_of_a_url_are_not_shown(text):
    hidden = without_secrets(f"data.path = '{text}': cannot be read")
    assert "pa55" not in hidden and "AKIA" not in hidden and "***" in hidden
    assert hidden.endswith("cannot be read")


def test_what_is_no_secret_stays():
    text = "gs://weatherbench2/datasets/era5/1959-2022-6h-1440x721.zarr?project=x and a@b"
    assert without_secrets(text) == text


def test_own_options_of_a_verb():
    for argv in (["--world_size", "1" + "0" * 30], ["--world_size", "x"], ["--world_size"]):
        with pytest.raises(ConfigError):
            split_options(argv, PLAN)
    with pytest.raises(ConfigError):
        split_options(["--export"], dict(export=""))
