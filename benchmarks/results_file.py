"""Rows of results/*.jsonl, each with the versions and the hardware it was measured on."""

import json
import os
import platform
import re
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
FOLDER_VARIABLE = "ROSSBY_RESULTS"  # environment variable: the folder to record in, in place of results/
T = TypeVar("T")


def record(benchmark: str | Path, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """Append `rows` to a file, or to <benchmark>.jsonl in ROSSBY_RESULTS, or in results/ without that.

    packages: distributions of which the versions are recorded, in addition to torch's.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or RESULTS)
    path = benchmark if isinstance(benchmark, Path) else folder / f"{benchmark}.jsonl"
    about = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"model name\s*: (.*)", about.read_text() if about.exists() else "")
    here = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    here |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    here |= {package: version(package) for package in packages}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**here, **row}) + "\n" for row in rows)


def parse(doc: str | None, commands: Iterable[str] = (), **defaults: Any) -> Namespace:
    """Return the words of the command line; an option has the type of its default, False is a flag.

    commands: what the first word may be, the first of them where there is none. A tuple of defaults: some
    such values; an empty one: words without an option.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    if names := [*commands]:
        parser.add_argument("command", nargs="?", choices=names, default=names[0])
    for name, default in defaults.items():
        if default == ():
            parser.add_argument(name, nargs="*")
        elif default is False:
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(f"--{name}", default=default, nargs="+", type=type(default[0]))
        else:
            parser.add_argument(f"--{name}", default=default, type=type(default))
    return parser.parse_args()


def require(number: Any, least: int, what: str) -> None:
    """End with one line and exit code 2 if a size is too small to measure anything."""
    if number < least:
        print(f"{Path(sys.argv[0]).name}: {number} {what}: at least {least} are needed", file=sys.stderr)
        sys.exit(2)


def read_lines(path: Path, **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows of a file that have these values; half a line of a process that was killed is none."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def table(rows: Iterable[dict[str, Any]], *columns: str) -> str:
    """Return these columns of the rows as lines of text, numbers to four digits."""
    frame = pd.DataFrame(rows, columns=[*columns])
    return frame.to_string(index=False, na_rep="", float_format="{:.4g}".format)


def clock(run: Callable[[], Any]) -> float:
    """Return the seconds of a call, with what it gives a GPU to do."""
    started = time.perf_counter()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def in_turns(rounds: int, measures: dict[str, Callable[[], T]], warm_up: int = 0) -> dict[str, list[T]]:
    """Return what each measures, round by round, after rounds that do not count."""
    values: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(-warm_up, rounds):
        for name, measure in measures.items():
            value = measure()
            values[name] += [value] if number >= 0 else []
    return values
