"""Known runs with which plans are compared and scaled: published runs, and a run of the user (--anchor).

planning/error_bands.toml has the errors of plans of known runs by kind, as benchmarks/planner_published.py
writes them; planning/report.py prints them next to every predicted time. A kind that is not there has too few
runs.
"""

import json
import statistics
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from config import in_project
from errors import ConfigError
from planning.clusters import Cluster
from planning.workload import Workload

RUNS = Path(in_project("outputs"))
FARTHEST = 2.0  # between measured and planned seconds of an anchor: beyond, something else differs
BANDS = Path(__file__).with_name("error_bands.toml")
ANCHORED = "anchored, "  # before a kind of layout: planned with a measured run of the same kind and machine


def layout_kind(work: Workload) -> str:
    """Return the kind of a layout, named by the technique with the least accurate plans."""
    degrees = work.degrees
    axes = {"pipeline": degrees.pp, "context parallel": degrees.cp, "tensor parallel": degrees.tp}
    return next((kind for kind, ranks in axes.items() if ranks > 1), "data parallel")


@dataclass(frozen=True)
class Anchor:
    """Seconds of a step as measured and as planned, of a layout of one kind."""

    name: str
    kind: str
    measured: float
    planned: float

    def factor(self, work: Workload) -> float:
        """Return the factor of planned seconds: 1 for layouts of another kind."""
        return self.measured / self.planned if layout_kind(work) == self.kind else 1.0

    def line(self) -> str:
        times = f"{self.measured:,.3f} s a step measured, {self.planned:,.3f} planned"
        return f"anchor {self.name}: {times}; {self.kind} layouts x {self.measured / self.planned:.3f}"


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says of its last start."""

    ranks: int
    seconds: float  # of a step, the median of the second half of its logged steps: the others warm up
    device: str  # torch's name, or "cpu"; "": not known


def run_record(folder: Path) -> RunRecord:
    """Read status.json, metrics.jsonl and starts.jsonl of a run. Raises ConfigError."""

    def lines(name: str) -> list[dict[str, Any]]:
        text = (folder / name).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    try:
        ranks = json.loads((folder / "status.json").read_text(encoding="utf-8"))["ranks"]
        seconds = [record["step_seconds"] for record in lines("metrics.jsonl") if record.get("step_seconds")]
        starts = lines("starts.jsonl") if (folder / "starts.jsonl").exists() else []
        if not (isinstance(ranks, int) and all(isinstance(value, int | float) for value in seconds)):
            raise TypeError("numbers are text")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"not the folder of a run with status.json and metrics.jsonl ({error!r})"
        raise ConfigError(f"--anchor {folder}: {reason}") from None
    if not seconds:
        raise ConfigError(f"--anchor {folder}: its metrics.jsonl has no step_seconds; train more steps")
    device = str(starts[-1].get("device", "")) if starts else ""
    return RunRecord(ranks, statistics.median(seconds[len(seconds) // 2 :]), device)


def newest_run(cluster: Cluster) -> Path | None:
    """Return the folder in outputs/ of the run that was trained last on the devices of this machine."""
    files = sorted(RUNS.glob("*/status.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        with suppress(ConfigError):
            if run_record(file.parent).device in cluster.known_as:
                return file.parent
    return None


@dataclass(frozen=True)
class Band:
    """Measured over planned seconds of a step: limits of four fifths of the runs, and the median."""

    runs: int
    fastest: float
    median: float
    slowest: float

    def around(self, seconds: float) -> tuple[float, float]:
        """Return the limits of the time of a step that is planned to take `seconds`."""
        return seconds * self.fastest, seconds * self.slowest


def kind_of(work: Workload, cluster: Cluster) -> str:
    """Return the kind of known runs for a plan: PyTorch's with its kind of layout, anchored or not."""
    kind = layout_kind(work)
    return ANCHORED + kind if cluster.anchor and cluster.anchor.kind == kind else kind


@cache
def error_bands() -> dict[str, Band]:
    return {kind: Band(**keys) for kind, keys in tomllib.loads(BANDS.read_text(encoding="utf-8")).items()}


def band_of(work: Workload, cluster: Cluster) -> Band | None:
    """None for a CPU without an anchor, and for kinds of which too few runs are known."""
    kind = kind_of(work, cluster)
    unknown = cluster.shared and not kind.startswith(ANCHORED)
    return None if unknown else error_bands().get(kind)


def band_line(work: Workload, cluster: Cluster) -> str:
    """Return the band in words."""
    band, kind = band_of(work, cluster), kind_of(work, cluster)
    if not band:
        fix = "" if cluster.anchor else "; train 20 steps with --data.path random, and use --anchor"
        return f"no run of this kind is known ({kind}){fix}"
    return (
        f"band: of {band.runs} published runs ({kind}) 80 % took {band.fastest:.2f} to {band.slowest:.2f} "
        f"times their planned time, median {band.median:.2f}"
    )
