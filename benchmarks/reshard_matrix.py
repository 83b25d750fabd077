"""Eight kinds of layouts, saved and loaded by every other: 64 cells.

    .venv/bin/python benchmarks/reshard_matrix.py

A cell is right when every tensor of the run that loads (weights, moments, averages, progress), gathered, has
the bits of the run that saved, and its next two losses are those of the run that was not stopped. Needs no
GPU: ranks are gloo processes, at most 4 at once. Ends with 1 when a cell is wrong.
"""

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from tests.distributed import Ranks
from tests.resharding import KINDS, differences, load, save, tolerance


def main() -> int:
    started, groups = time.perf_counter(), {n: Ranks(n) for n in sorted({k.ranks for k in KINDS.values()})}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        saved = {}
        for name, kind in KINDS.items():
            path = Path(folder) / name.replace(" ", "-")
            saved[name] = (path, *groups[kind.ranks].run(save, kind, path, "async_with_pinned_mem")[0])
        for target, kind in KINDS.items():
            for source, (path, tensors, losses) in saved.items():
                loaded, next_losses = groups[kind.ranks].run(load, kind, path)[0]
                wrong = differences(tensors, loaded)
                error = max(abs(a / b - 1) for a, b in zip(next_losses, losses, strict=True))
                limit = tolerance(KINDS[source], kind)
                row = {"saved": source, "loaded": target, "tensors": len(tensors), "unequal": len(wrong)}
                good = not wrong and error <= limit
                rows.append(row | {"loss": error, "tolerance": limit, "good": good})
                print(f"{source} -> {target}: {'good' if rows[-1]['good'] else rows[-1]}", flush=True)
    for group in groups.values():
        group.stop()
    record("reshard_matrix", rows)
    print(table(rows))
    bad, seconds = sum(not row["good"] for row in rows), time.perf_counter() - started
    unequal, tensors = (sum(row[key] for row in rows) for key in ("unequal", "tensors"))
    same = max(row["loss"] for row in rows if row["tolerance"] == 1e-5)
    print(f"\n{len(rows)} cells, {bad} wrong; {unequal} of {tensors} tensors with other bits")
    print(f"next losses within {same:.1e} in the same precision; {seconds:.0f} s")
    return 1 if bad else 0


def table(rows: list[dict]) -> str:
    """Relative difference of the next losses; `!` behind it where a cell is wrong."""
    names = list(KINDS)
    cells = {(row["saved"], row["loaded"]): row for row in rows}
    lines = ["\nnext losses, relative difference; saved by (down), loaded by (across)", " " * 32]
    lines[-1] += "".join(f"{i + 1:>10}" for i in range(len(names)))
    for i, saved in enumerate(names):
        values = [cells[saved, loaded] for loaded in names]
        marked = (f"{row['loss']:.1e}" + ("" if row["good"] else "!") for row in values)
        lines.append(f"{i + 1} {saved:<30}" + "".join(f"{text:>10}" for text in marked))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
