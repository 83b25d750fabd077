"""Where a relative path begins: at the caller's folder on the command line, at the project's everywhere else.

A configuration file, a default and the simulated data mean the same place whatever folder a verb is called
from. Standard library only: the check of a command line imports this.
"""

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
SIMULATED = "simulated"  # as data.path: no file of that name
PATHS = (  # keys that name a file or a folder; job.config_file is only ever the caller's
    ("job", "dump_folder"),
    ("data", "path"),
    ("data", "static_path"),
    ("checkpoint", "initial_load_path"),
    ("forecast", "path"),
    ("forecast", "checkpoint"),
)


def in_project(path: str) -> str:
    """A path that begins at the project's folder: as it is there, absolute where the caller is elsewhere."""
    return str(PROJECT / path) if _is_relative(path) and Path.cwd() != PROJECT else path


def for_a_file(path: str) -> str:
    """A path of the caller's, as a configuration file in any place would write it."""
    return os.path.abspath(path) if _is_relative(path) and Path.cwd() != PROJECT else path


def in_one_place(path: str) -> str:
    """A path of a configuration file, the same whoever wrote it: absolute and without "..", unless a URL."""
    is_file = _is_relative(path) or os.path.isabs(path)
    return os.path.normpath(PROJECT / path) if is_file else path


def _is_relative(path: str) -> bool:
    is_url = "://" in path or "::" in path  # fsspec's
    return bool(path) and path != SIMULATED and not is_url and not os.path.isabs(path)
