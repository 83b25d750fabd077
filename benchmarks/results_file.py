"""Rows of results/*.jsonl, each with the versions and the hardware it was measured on."""

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def record(benchmark: str, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """Appends `rows` to results/<benchmark>.jsonl; `packages`: whose versions matter beside torch's."""
    append(RESULTS / f"{benchmark}.jsonl", rows, packages)


def append(path: Path, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """As `record`, to any file."""
    here = where(packages)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**here, **row}) + "\n" for row in rows)


def where(packages: tuple[str, ...] = ()) -> dict[str, Any]:
    """Versions and hardware, now."""
    found = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    found |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return found | {package: version(package) for package in packages}


def processor() -> str:
    """Its name where Linux says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    return next(names, platform.machine())
