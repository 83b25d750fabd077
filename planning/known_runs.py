"""Known runs with which plans are compared and scaled: published runs, and a run of the user (--anchor).

planning/error_bands.toml has the errors of plans of known runs by kind, as benchmarks/planner_published.py
writes them; planning/report.py prints them next to every predicted time. A kind that is not there has too few
runs.
"""

import statistics
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from config import in_project
from errors import ConfigError
from jobs.durable_files import read_records
from planning.clusters import Cluster
from planning.workload import Workload

RUNS = Path(in_project("outputs"))
BANDS = Path(__file__).with_name("error_bands.toml")
ANCHORED = "anchored, "  # before a kind of layout: planned with a measured run of the same kind and machine


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says of its last start."""

    ranks: int
    seconds: float  # of a step, the median of the second half of its logged steps: the others warm up
    device: str  # torch's name, or "cpu"


def run_record(folder: Path) -> RunRecord:
    """Read starts.jsonl and metrics.jsonl of a run. Raises ConfigError."""
    starts, metrics = (read_records(folder / name) for name in ("starts.jsonl", "metrics.jsonl"))
    last = starts[-1] if starts else {}
    ranks, device = last.get("ranks"), last.get("device")
    if not (isinstance(ranks, int) and isinstance(device, str)):
        reason = "not the folder of a run: its starts.jsonl has no line with ranks and device"
        raise ConfigError(f"--anchor {folder}: {reason}")
    seconds = [record["step_seconds"] for record in metrics if record.get("step_seconds")]
    if not seconds or not all(isinstance(value, int | float) for value in seconds):
        raise ConfigError(f"--anchor {folder}: its metrics.jsonl has no step_seconds; train more steps")
    return RunRecord(ranks, statistics.median(seconds[len(seconds) // 2 :]), device)


def newest_run(cluster: Cluster) -> Path | None:
    """Return the folder in outputs/ of the run that was trained last on the devices of this machine."""
    files = sorted(RUNS.glob("*/metrics.jsonl"), key=lambda file: file.stat().st_mtime, reverse=True)
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


ERROR_BANDS = {name: Band(**keys) for name, keys in tomllib.loads(BANDS.read_text(encoding="utf-8")).items()}


def kind_of(work: Workload, cluster: Cluster) -> str:
    """Return the kind of known runs for a plan: PyTorch's with its kind of layout, anchored or not."""
    return ANCHORED + work.kind if cluster.anchor == work.kind else work.kind


def band_of(work: Workload, cluster: Cluster) -> Band | None:
    """None for a CPU without an anchor, and for kinds of which too few runs are known."""
    kind = kind_of(work, cluster)
    unknown = cluster.shared and not kind.startswith(ANCHORED)
    return None if unknown else ERROR_BANDS.get(kind)


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
