"""Errors of plans of known runs, by class: planning/error_bands.toml, which
benchmarks/planner_published.py writes and planning/report.py prints next to every predicted time.
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
LONG = 16_384  # tokens of a sample: above it, and with context parallelism, contexts are long
TF32_PEAK = 300e12  # FLOP/s: Hopper and what came after multiply TF32 faster, an A100 at 156e12


@dataclass(frozen=True)
class Band:
    """Seconds of a step as it was, over those planned: of the fastest, the median and the slowest run."""

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


def classes_of(work: Workload, cluster: Cluster) -> list[str]:
    """Return all classes that apply: each adds its errors. None for a CPU that is not calibrated."""
    if cluster.anchor and cluster.anchor.kind == layout_kind(work):
        return [ANCHORED + layout_kind(work)]
    if cluster.measured:
        return [CALIBRATED]
    if cluster.shared:
        return []
    found = {
        "vision transformers": not work.model.reads_words,
        "long context": work.degrees.cp > 1 or work.model.tokens > LONG,
        "tensor parallel": work.degrees.tp > 1,
    }
    base = "PyTorch on H100" if cluster.device.peak["fp32"] > TF32_PEAK else "language models on A100"
    return [kind for kind, applies in found.items() if applies] or [base]


@cache
def error_bands() -> dict[str, Band]:
    return {kind: Band(**keys) for kind, keys in tomllib.loads(BANDS.read_text(encoding="utf-8")).items()}


def band_of(work: Workload, cluster: Cluster) -> Band | None:
    """The widest of its classes."""
    found = [error_bands()[kind] for kind in classes_of(work, cluster)]
    if not found:
        return None
    ends = (min(b.fastest for b in found), max(b.median for b in found), max(b.slowest for b in found))
    return Band(sum(b.runs for b in found), *ends)


def band_line(work: Workload, cluster: Cluster, seconds: float) -> str:
    """In words, for a step that is planned to take `seconds`."""
    band = band_of(work, cluster)
    if not band:
        return "error band: unknown, no published run is of such a machine; measure it with --calibrate"
    low, high = band.around(seconds)
    kinds = ", ".join(f"{error_bands()[kind].runs} of {kind}" for kind in classes_of(work, cluster))
    return (
        f"error band: {low:,.3f} to {high:,.3f} s a step: known runs ({kinds}) took {band.fastest:.2f} to "
        f"{band.slowest:.2f} times what was planned, median {band.median:.2f}"
    )
