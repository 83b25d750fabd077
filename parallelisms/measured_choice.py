"""What is chosen by measurement when a run starts, and kept in its folder: a resumed run has to repeat the
bits of one that was not stopped.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def kept_or_measured(
    path: Path, key: dict[str, Any], measure: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What stands in `path`, where it was found for the same `key`, else what `measure` finds."""
    if path.exists():
        found = json.loads(path.read_text())
        if {name: found.get(name) for name in key} == key:
            return found
    found = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(key | found, indent=1) + "\n")
    return found


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
