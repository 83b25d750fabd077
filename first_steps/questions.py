"""The six questions: what no option says is asked on a terminal, or has the answer in brackets."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from errors import ConfigError, UserError, nearest, refuse, tell, without_secrets
from first_steps.data import MANY, Found, choose_grid, choose_variables, find
from first_steps.goals import GOALS
from jobs.run_checks import cluster_here
from parallelisms.degrees import num_ranks
from planning.clusters import load_cluster
from planning.hardware import Cluster
from project_folder import SIMULATED

HERE = "here"
T = TypeVar("T")


@dataclass(frozen=True)
class Answers:
    """To the six questions, looked at."""

    found: Found
    variables: list[str]
    shape: tuple[int, int]  # (H, W) to train on
    hardware: str
    cluster: Cluster | None  # None: nobody knows this GPU
    goal: str
    output: Path

    @property
    def is_here(self) -> bool:
        return self.hardware == HERE

    @property
    def is_coarser(self) -> bool:
        """Whether the data have to be regridded first."""
        return self.shape != self.found.shape

    @property
    def data_path(self) -> str:
        """Of the configuration: the data, or the coarser store that datasets.convert is to make of them."""
        if not self.is_coarser:
            return self.found.configured_path
        rows, columns = self.shape
        return os.path.abspath(self.output.with_name(f"{self.found.stem}_{rows}x{columns}.zarr"))


class Questions:
    """One after the other; on a terminal an answer that cannot be is said, and asked for again."""

    def __init__(self, on_terminal: bool) -> None:
        self.on_terminal = on_terminal

    def ask(self, question: str, given: str | None, default: str, read: Callable[[str], T]) -> T:
        """What `read` makes of the answer. Raises what it raises of a given one, or without a terminal."""
        if given is not None or not self.on_terminal:
            return read(default if given is None else given)
        while True:
            print(f"{question} [{default}]: ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                raise ConfigError("the questions were left before the last; nothing is written")
            try:
                return read(line.strip() or default)
            except UserError as error:
                tell(without_secrets(str(error)))


def ask_all(options: Namespace, on_terminal: bool) -> Answers:
    """Options that are wrong are refused before anything is asked. Raises ConfigError, DataError."""
    os.environ.setdefault("NGPU", str(max(torch.cuda.device_count(), 1)))  # as run_train.sh
    asked, given = Questions(on_terminal), options.variables
    for text, read in ((options.hardware, read_cluster), (options.output, read_output)):
        if text is not None:
            read(text)
    found = asked.ask(
        "1. Which data: a Zarr store, NetCDF file, folder, glob or URL",
        options.data,
        SIMULATED if on_terminal else "",
        lambda text: find(text, options.select),
    )
    print(f"\n{found.summary()}\n", flush=True)
    number, (rows, columns) = len(found.weather), found.shape
    variables = asked.ask(
        f'2. Which variables: names, "all" ({number}) or "usual"',
        None if given is None else " ".join(given),
        "all" if number <= MANY else "usual",
        lambda text: choose_variables(found, text.replace(",", " ").split()),
    )
    shape = asked.ask(
        "3. Which resolution: as it is, or coarser",
        options.resolution,
        f"{rows}x{columns}",
        lambda text: choose_grid(found, text),
    )
    hardware, cluster = asked.ask(
        "4. Which hardware: here, or a machine of planning/clusters.toml, such as a100x64",
        options.hardware,
        HERE,
        read_cluster,
    )
    listed = "; ".join(f"{name}: {what}" for name, what in GOALS.items())
    goal = asked.ask(f"5. What for ({listed})", options.goal, "try", read_goal)
    output = asked.ask(
        "6. Where to write the configuration", options.output, f"{found.stem}_{goal}.toml", read_output
    )
    return Answers(found, variables, shape, hardware, cluster, goal, output)


def read_cluster(text: str) -> tuple[str, Cluster | None]:
    """Its name, and what it has. Raises ConfigError."""
    return text, cluster_here("", [], num_ranks()) if text == HERE else load_cluster(text)


def read_goal(text: str) -> str:
    if text not in GOALS:
        refuse("--goal", text, nearest(text, GOALS))
    return text


def read_output(text: str) -> Path:
    """ConfigError: it is there already, or nothing can be written there."""
    path = Path(text)
    if path.suffix != ".toml":
        refuse("--output", text, "a configuration is a .toml file; name one")
    if path.exists():
        refuse("--output", text, "is there already, and nothing is overwritten; name another file")
    if not path.parent.is_dir():
        refuse("--output", text, f"there is no folder {path.parent}; make it, or name another one")
    return path
