"""What a run has left in its folder: configuration, starts, metrics, and what the steps have cost so far."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from errors import DataError
from planning.clusters import load_cluster, machine_known_as
from training.journal import read_records

HOUR = 3600.0


@dataclass(frozen=True)
class Run:
    """records, starts: the lines of metrics.jsonl and starts.jsonl; settings: config.toml, flat."""

    name: str
    folder: Path
    settings: dict[str, Any]
    records: list[dict[str, Any]]
    starts: list[dict[str, Any]]

    @property
    def logged(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record.get("step_seconds") is not None]

    @property
    def validations(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "val/loss" in record]

    @property
    def steps(self) -> int:
        return max((record["step"] for record in self.records), default=0)

    @property
    def steps_asked(self) -> int:
        return int(self.settings["training.steps"])

    @property
    def ended(self) -> str:
        """When the last line was written, in UTC."""
        written = (self.folder / "metrics.jsonl").stat().st_mtime
        return datetime.fromtimestamp(written, UTC).isoformat(timespec="seconds")

    @property
    def seconds(self) -> float:
        """Of the steps that count: not of those that were done again, of validations or of saves."""
        steps = [0, *(record["step"] for record in self.logged)]
        taken = zip(steps, self.logged, strict=False)
        return sum((record["step"] - before) * record["step_seconds"] for before, record in taken)

    @property
    def seconds_to_the_end(self) -> float:
        """At the speed of the last logged steps."""
        return (self.steps_asked - self.steps) * self.logged[-1]["step_seconds"] if self.logged else 0.0

    @property
    def steps_lost(self) -> int:
        """Logged before a start, and done again after it."""
        return sum(max(start["reached"] - start["step"], 0) for start in self.starts[1:])

    @property
    def skipped(self) -> int:
        """Bad steps: each start counts its own, so a count that falls is the next one's."""
        counts = [record.get("skipped_steps") or 0 for record in self.logged]
        pairs = pairwise([0, *counts])
        return sum(now if now < before else now - before for before, now in pairs)

    def dollars_an_hour(self, cluster: str) -> float | None:
        """Of all ranks on demand: of the cluster that is named, or the known machine that the run was on.
        None where nobody knows; ranks on processors share a machine that may be anyone's.
        """
        if not self.starts or (self.starts[-1]["device"] == "cpu" and not cluster):
            return None
        machine = cluster or machine_known_as(self.starts[-1]["device"])
        return load_cluster(machine).on_demand * self.starts[-1]["ranks"] if machine else None


def open_run(folder: Path) -> Run:
    """DataError: it is no run's folder, or nothing was logged."""
    config, records = folder / "config.toml", read_records(folder / "metrics.jsonl")
    if not config.exists():
        raise DataError(f"{folder}: has no config.toml; name a run's folder, such as outputs/demo")
    if not records:
        raise DataError(f"{folder}: metrics.jsonl has no line yet; wait for the first logged step")
    try:
        settings = flat(tomllib.loads(config.read_text()))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{config}: {error}; is it a run's folder?") from None
    return Run(folder.resolve().name, folder, settings, records, read_records(folder / "starts.jsonl"))


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Under names of their own: their paths, where two folders have the same name. DataError: as `open_run`,
    or a folder stands twice.
    """
    runs = [open_run(folder) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise DataError(f"{', '.join(map(str, folders))}: a folder stands twice; name each run once")
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [replace(run, name=str(run.folder)) for run in runs]


def flat(tables: dict[str, Any]) -> dict[str, Any]:
    """{"data": {"path": p}} -> {"data.path": p}."""
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Keys that not all runs have alike, with the value of each; the run's own folder aside."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    table = [(key, [run.settings.get(key) for run in runs]) for key in keys if key != "job.dump_folder"]
    return [(key, values) for key, values in table if any(value != values[0] for value in values)]
