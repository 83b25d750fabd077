"""Errors of plans of known runs, by kind: planning/error_bands.toml, which benchmarks/planner_published.py
writes and planning/report.py prints next to every predicted time. A kind that is not there has too few runs.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from planning.anchor import layout_kind
from planning.hardware import Cluster
from planning.workload import Workload

BANDS = Path(__file__).with_name("error_bands.toml")
CALIBRATED = "calibrated machines"  # that plan.py --calibrate has measured
ANCHORED = "anchored, "  # before a kind of layout: planned with a measured run of the same kind and machine


@dataclass(frozen=True)
class Band:
    """Seconds of a step as it was, over those planned: ends of four fifths of runs, and the median."""

    runs: int
    fastest: float
    median: float
    slowest: float

    def around(self, seconds: float) -> tuple[float, float]:
        """Between what a step that is planned to take `seconds` may take."""
        return seconds * self.fastest, seconds * self.slowest

    def overlaps(self, first: float, second: float) -> bool:
        """Return True if steps that are planned to take so many seconds may take as long as each other."""
        return max(first, second) * self.fastest <= min(first, second) * self.slowest


def kind_of(work: Workload, cluster: Cluster) -> str:
    """Return the kind of runs that a plan is judged by: anchored, calibrated, or PyTorch's of its layout."""
    kind = layout_kind(work)
    if cluster.anchor and cluster.anchor.kind == kind:
        return ANCHORED + kind
    return CALIBRATED if cluster.measured else kind


@cache
def error_bands() -> dict[str, Band]:
    return {kind: Band(**keys) for kind, keys in tomllib.loads(BANDS.read_text(encoding="utf-8")).items()}


def band_of(work: Workload, cluster: Cluster) -> Band | None:
    """None for a CPU that is not calibrated, and for kinds of which too few runs are known."""
    uncalibrated = cluster.shared and not cluster.measured
    return None if uncalibrated else error_bands().get(kind_of(work, cluster))


def band_line(work: Workload, cluster: Cluster, seconds: float) -> str:
    """In words, for a step that is planned to take `seconds`."""
    band, kind = band_of(work, cluster), kind_of(work, cluster)
    if not band:
        fix = "" if cluster.anchor else "; measure with --calibrate, or use --anchor"
        return f"error band: no run of this kind is known ({kind}){fix}"
    low, high = band.around(seconds)
    return (
        f"error band: {low:,.3f} to {high:,.3f} s a step: four of five known runs ({band.runs}, {kind}) took "
        f"{band.fastest:.2f} to {band.slowest:.2f} times what was planned, median {band.median:.2f}"
    )
