"""Rows of results/*.jsonl, each with the versions and the hardware it was measured on."""

import json
import os
import platform
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
FOLDER_VARIABLE = "ROSSBY_RESULTS"  # environment variable: the folder to record in, in place of results/


def record(benchmark: str, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """Append `rows` to <benchmark>.jsonl in the folder ROSSBY_RESULTS, or in results/ without it.

    packages: distributions of which the versions are recorded, in addition to torch's.
    """
    append(Path(os.environ.get(FOLDER_VARIABLE) or RESULTS) / f"{benchmark}.jsonl", rows, packages)


def append(path: Path, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """Append `rows` to the file `path`, as `record` does."""
    here = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    here |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    here |= {package: version(package) for package in packages}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**here, **row}) + "\n" for row in rows)


def processor() -> str:
    """Return the processor's name where Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    return next(names, platform.machine())


def parser_of(doc: str | None) -> ArgumentParser:
    """Return a parser with the text of a script as its help."""
    return ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)


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
