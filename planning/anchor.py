"""A measured run, by which plans of other runs on the same kind of machine are scaled."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from errors import ConfigError
from planning.workload import Workload

KINDS = ("data parallel", "tensor parallel", "context parallel", "pipeline")


@dataclass(frozen=True)
class Anchor:
    """Seconds of a step as measured and as planned, of a layout of one kind."""

    name: str
    kind: str
    measured: float
    planned: float

    @property
    def ratio(self) -> float:
        return self.measured / self.planned

    def factor(self, work: Workload) -> float:
        """Return what planned seconds are multiplied by: 1 for layouts of another kind."""
        return self.ratio if layout_kind(work) == self.kind else 1.0

    def line(self) -> str:
        others = ", ".join(kind for kind in KINDS if kind != self.kind)
        return (
            f"anchor {self.name}: {self.measured:,.3f} s a step measured, {self.planned:,.3f} planned; times "
            f"of {self.kind} layouts are multiplied by {self.ratio:.3f}; no information on {others}"
        )


def layout_kind(work: Workload) -> str:
    """Return the kind of a layout, by the technique whose communication is planned least well."""
    degrees = work.degrees
    axes = {"pipeline": degrees.pp, "context parallel": degrees.cp, "tensor parallel": degrees.tp}
    return next((kind for kind, ranks in axes.items() if ranks > 1), "data parallel")


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
        fix = "name one, or its configuration with --anchor_seconds"
        raise ConfigError(f"--anchor {folder}: {reason}; {fix}") from None
    seconds = [record["step_seconds"] for record in records if record.get("step_seconds")]
    if not seconds:
        raise ConfigError(f"--anchor {folder}: its metrics.jsonl has no step_seconds; train more steps")
    return ranks, statistics.median(seconds[len(seconds) // 2 :])
