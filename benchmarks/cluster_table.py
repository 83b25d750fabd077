"""Table and picture of benchmarks/cluster.sh, from the rows of one run."""

import json
from pathlib import Path
from typing import Any

from command_line import text_table

Row = dict[str, Any]


def rows_of(path: Path, run: str) -> list[Row]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["run"] == run]


def table(path: Path, run: str) -> str:
    rows = rows_of(path, run)
    failed = [f"failed: {row['part']}, {row['what']}: {row['failed']}" for row in rows if "failed" in row]
    measured = [row for row in rows if "failed" not in row]
    parts = [parity_lines(measured), links_table(measured), scaling_table(measured), "\n".join(failed)]
    return "\n\n".join(filter(None, parts))


def parity_lines(rows: list[Row]) -> str:
    found = [row for row in rows if row["part"] == "parity"]
    bad = [f"out of tolerance: {row['what']}" for row in found if not row["good"]]
    return "\n".join([f"{len(found)} layouts against one process, {len(bad)} out of tolerance", *bad])


def links_table(rows: list[Row]) -> str:
    found = [row for row in rows if row["part"] == "links"]
    lines = [
        (row["what"], row["gigabytes_per_second"], 1e6 * row["seconds"], 1e6 * row["planned"])
        for row in found
    ]
    return (
        text_table("<48 >10.3g >12.1f >12.1f", [("link", "GB/s", "us", "planned us"), *lines])
        if found
        else ""
    )


def scaling_table(rows: list[Row]) -> str:
    found = [row for row in rows if row["part"] == "scaling"]
    lines = []
    for kind in ("weak", "strong"):
        of_kind = [row for row in found if kind in row["kinds"]]
        for row in of_kind:
            error = row["planned"] / row["samples_per_second"] - 1
            rates = (row["samples_per_second"], row["planned"], error, efficiency(row, of_kind))
            lines.append((kind, row["ranks"], "  " + row["layout"], *rates))
    head = ("scaling", "ranks", "  layout", "samples/s", "planned", "error", "efficiency")
    return text_table("<8 >6 <34 >11.4g >11.4g >+8.0% >11.1%", [head, *lines]) if lines else ""


def efficiency(row: Row, rows: list[Row]) -> float:
    """Samples/s a rank, over those of the best layout of the fewest ranks."""
    fewest = min(each["ranks"] for each in rows)
    first = max(each["samples_per_second"] / fewest for each in rows if each["ranks"] == fewest)
    return row["samples_per_second"] / row["ranks"] / first


def plot(path: Path, run: str, picture: Path) -> Path:
    """Samples/s of the best layout of each number of ranks, measured and planned."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in rows_of(path, run) if row["part"] == "scaling" and "failed" not in row]
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for axes, kind in zip(panels, ("weak", "strong"), strict=True):
        of_kind = [row for row in rows if kind in row["kinds"]]
        ranks = sorted({row["ranks"] for row in of_kind})
        for name, key, line in (("measured", "samples_per_second", "-"), ("planned", "planned", ":")):
            best = [max(row[key] for row in of_kind if row["ranks"] == n) for n in ranks]
            axes.loglog(ranks, best, line, marker="o", label=name)
        axes.set(xlabel="ranks", title=f"{kind} scaling")
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("samples/s")
    panels[0].legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    plt.close(figure)
    return picture
