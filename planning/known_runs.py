"""Known runs with which plans are compared and scaled: published runs, and a run of the user (--anchor).

planning/error_bands.toml has the errors of plans of known runs by kind, as benchmarks/planner_published.py
writes them; planning/report.py prints them next to every predicted time. A kind that is not there has too few
runs.
"""

import json
import statistics
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from errors import ConfigError
from planning.clusters import Cluster
from planning.workload import Workload

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


def run_record(folder: Path) -> tuple[int, float]:
    """Return the ranks of a run and its median seconds a step, from status.json and metrics.jsonl.

    The first half of the logged steps is left out: they warm up. Raises ConfigError.
    """
    try:
        ranks = json.loads((folder / "status.json").read_text(encoding="utf-8"))["ranks"]
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"not the folder of a run with status.json and metrics.jsonl ({error!r})"
        raise ConfigError(f"--anchor {folder}: {reason}") from None
    seconds = [record["step_seconds"] for record in records if record.get("step_seconds")]
    if not seconds:
        raise ConfigError(f"--anchor {folder}: its metrics.jsonl has no step_seconds; train more steps")
    return ranks, statistics.median(seconds[len(seconds) // 2 :])


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
        fix = "" if cluster.anchor else "; measure steps with --calibrate, and use --anchor"
        return f"no run of this kind is known ({kind}){fix}"
    return (
        f"band: four of five known runs ({band.runs}, {kind}) took {band.fastest:.2f} to {band.slowest:.2f} "
        f"times what was planned, median {band.median:.2f}"
    )
