"""Rows of results/*.jsonl, each with the versions and the hardware it was measured on."""

import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def record(benchmark: str, rows: list[dict], packages: tuple[str, ...] = ()) -> None:
    """Appends `rows` to results/<benchmark>.jsonl; `packages`: whose versions matter beside torch's."""
    where = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    where |= {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    where |= {package: version(package) for package in packages}
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / f"{benchmark}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**where, **row}) + "\n" for row in rows)


def processor() -> str:
    """Its name where Linux says it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (text.split(":")[1].strip() for text in lines if text.startswith("model name"))
    return next(names, platform.machine())
