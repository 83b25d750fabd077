"""The one table of benchmarks/gpu.sh: what was measured beside the best known, the floor and the goal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Row = dict[str, Any]
Found = Callable[[list[Row]], float | None]
APART = "largest difference from the CPU's losses, "


@dataclass(frozen=True)
class Target:
    """A line of the table; `known` and `limit` as text, the goal as a number to be above or below."""

    what: str
    value: Found
    known: str
    limit: str
    goal: float | None
    above: bool = True
    form: str = "{:.3g}"

    def line(self, rows: list[Row]) -> str:
        value = self.value(rows)
        shown = "not measured" if value is None else self.form.format(value)
        goal = "" if self.goal is None else f"{'>=' if self.above else '<='} {self.form.format(self.goal)}"
        verdict = ""
        if value is not None and self.goal is not None:
            verdict = "met" if (value >= self.goal if self.above else value <= self.goal) else "missed"
        return f"{self.what:<46}{shown:>14}{self.known:>14}{self.limit:>12}{goal:>12}  {verdict}"


def rows_of(rows: list[Row], **wanted: Any) -> list[Row]:
    """Measured rows that have all of these values."""
    return [row for row in rows if "failed" not in row and all(row.get(k) == v for k, v in wanted.items())]


def named(what: str, part: str = "") -> Found:
    """The value of the first row whose name begins so, of a part where one is given."""

    def find(rows: list[Row]) -> float | None:
        found = rows_of(rows, part=part) if part else rows_of(rows)
        return next((row["value"] for row in found if row["what"].startswith(what)), None)

    return find


def best_step(rows: list[Row], length: int, head: int, precision: str = "bf16", mode: str = "") -> Row | None:
    """The fastest step at a number of tokens and a head size, by their places in Sizes."""
    wanted = {"length": length, "head": head, "precision": precision} | ({"mode": mode} if mode else {})
    return max(rows_of(rows, part="steps", **wanted), key=lambda row: row["value"], default=None)


def mfu(length: int, head: int) -> Found:
    def find(rows: list[Row]) -> float | None:
        row = best_step(rows, length, head)
        return row["mfu"] if row else None

    return find


def float8_gain(length: int) -> Found:
    """Samples/s in float8 over those in bf16."""

    def find(rows: list[Row]) -> float | None:
        ours, plain = (best_step(rows, length, 0, precision) for precision in ("float8", "bf16"))
        return ours["value"] / plain["value"] if ours and plain else None

    return find


def selective_slower(rows: list[Row]) -> float | None:
    """Seconds a sample with selective checkpointing over those without, less 1, each at its own batch."""
    selective, none = (best_step(rows, 0, 0, mode=mode) for mode in ("selective", "none"))
    return none["value"] / selective["value"] - 1 if selective and none else None


def worst(kind: str, mean: bool = False) -> Found:
    """The planner's largest or mean error of time or memory."""

    def find(rows: list[Row]) -> float | None:
        errors = [abs(row["value"]) for row in rows_of(rows, part="planner", kind=kind)]
        if not errors:
            return None
        return sum(errors) / len(errors) if mean else max(errors)

    return find


def nth_rollout(nth: int) -> Found:
    def find(rows: list[Row]) -> float | None:
        found = sorted(rows_of(rows, part="rollout"), key=lambda row: row["tokens"])
        return 1e3 * found[nth]["value"] if nth < len(found) else None

    return find


def lead_over(peer: str) -> Found:
    """Samples/s of the fastest bf16 step over those of a peer."""

    def find(rows: list[Row]) -> float | None:
        ours, theirs = best_step(rows, 0, 0), named(peer, "peers")(rows)
        return ours["value"] / theirs if ours and theirs else None

    return find


def loader_over_step(rows: list[Row]) -> float | None:
    """Samples that the loader gives over those that the fastest bf16 step takes: below 1 the GPU waits."""
    given, step = named("samples that the loader gives")(rows), best_step(rows, 0, 0)
    return given / step["value"] if given and step else None


def worst_of_ranks(kind: str) -> Found:
    """The planner's largest error of a rank's time or memory, in layouts of 8 and 64."""

    def find(rows: list[Row]) -> float | None:
        return max((abs(row["error"]) for row in rows_of(rows, part="ranks", kind=kind)), default=None)

    return find


SHARE, TINY = "{:.1%}", "{:.1e}"
TARGETS = (
    Target("losses beside the CPU's, float32", named(f"{APART}undist", "train"), "", "", 1e-3, False, TINY),
    Target("losses beside the CPU's, bf16", named(f"{APART}bf16", "train"), "", "", 3e-2, False, TINY),
    Target("resumed to the bit (1: yes)", named("killed and resumed", "train"), "", "", 1),
    Target("bf16 step, 4,096 tokens, head 64: MFU", mfu(0, 0), "~50%", "58.9%", 0.55, form=SHARE),
    Target("bf16 step, 8,192 tokens, head 64: MFU", mfu(1, 0), "37.7%", "54.3%", 0.50, form=SHARE),
    Target("bf16 step, 4,096 tokens, head 128: MFU", mfu(0, 1), "", "65%", 0.60, form=SHARE),
    Target("bf16 step, 8,192 tokens, head 128: MFU", mfu(1, 1), "", "63%", 0.57, form=SHARE),
    Target("float8 over own bf16, 4,096 tokens", float8_gain(0), "1.18 (1 B)", "1.18", 1.15),
    Target("float8 over own bf16, 8,192 tokens", float8_gain(1), "", "1.12", 1.08),
    Target("selective checkpointing slower by", selective_slower, "", "", 0.03, above=False, form=SHARE),
    Target(
        "units of T d kept, selective",
        named("units of T d kept, selective"),
        "16 (none)",
        "9-10",
        10.05,
        False,
        "{:.2f}",
    ),
    Target("first step, cold (s)", named("first step, cold"), "420", "", 60, above=False),
    Target("first step, warm (s)", named("first step, warm"), "", "", 15, above=False),
    Target("rollout step, 4,096 tokens (ms)", nth_rollout(0), "1000", "26", 32, above=False),
    Target("rollout step, 8,192 tokens (ms)", nth_rollout(1), "1000", "71", 85, above=False),
    Target("planner's time, mean error", worst("time", True), "3.3-5%", "1%", 0.03, False, SHARE),
    Target("planner's time, worst error", worst("time"), "", "", 0.06, False, SHARE),
    Target("planner's peak memory, worst error", worst("memory"), "", "", 0.02, False, SHARE),
    Target("a rank of 8 and 64, time, worst error", worst_of_ranks("time"), "", "", 0.06, False, SHARE),
    Target("a rank of 8 and 64, memory, worst error", worst_of_ranks("memory"), "", "", 0.02, False, SHARE),
    Target(
        "excess over 10 steps after a save (s)",
        named("excess of ten steps after a save, async_with"),
        *("1.3", "0", 0.05),
        above=False,
    ),
    Target("loader (GB/s)", named("loader,", "loader"), "4.2", "", None),
    Target("loader over what a step takes", loader_over_step, "", "", 1.0),
    Target("fused AdamW, whole model (s)", named("AdamW fused", "optimizers"), "", "", None),
    Target("step over the tutorial's way", lead_over("tutorial's way"), "", "", None),
    Target("step over timm's", lead_over("timm"), "", "", None),
)


def table(rows: list[Row]) -> str:
    head = f"{'':<46}{'measured':>14}{'best known':>14}{'limit':>12}{'goal':>12}"
    return "\n".join([head, *(target.line(rows) for target in TARGETS)])


def describe(rows: list[Row]) -> str:
    """Where, and what failed."""
    gpu = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else "a CPU: a rehearsal, whose figures mean nothing"
    )
    failed = [f"failed: {row['what']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join([f"on {gpu}, torch {torch.__version__}; {len(rows) - len(failed)} figures", *failed])
