"""Scaling curves: the best layout of each number of devices, the batch growing (weak) or not (strong)."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from errors import ConfigError
from planning.hardware import Cluster
from planning.report import checkpointing, layout
from planning.search import best_layouts
from planning.workload import Workload
from text_tables import text_table

MAX_DEVICES = 16384
Row = dict[str, Any]  # column of scaling.csv -> value


def sweep(work: Workload, cluster: Cluster, text: str, folder: Path) -> str:
    """A table of `gpus=LIST`; writes scaling.csv and scaling.png into `folder`. ConfigError: a bad list."""
    numbers, a_device = parse_numbers(text), work.global_batch / cluster.devices
    strong = dict.fromkeys(numbers, work.global_batch)
    weak = {devices: max(round(a_device * devices), 1) for devices in numbers}
    rows = [
        *scaling_rows("strong", strong, work, cluster),
        *scaling_rows("weak", weak, work, cluster),
    ]
    if not rows:
        raise ConfigError(
            f"--sweep {text!r}: the job fits on none of these; see --layout auto for one of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "scaling.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    plot(rows, cluster, folder / "scaling.png")
    return f"{table(rows)}\n\nwritten: {folder / 'scaling.csv'}, {folder / 'scaling.png'}"


def parse_numbers(text: str) -> list[int]:
    """ "gpus=8,16,...,4096": what stands before the dots continues as it began. ConfigError."""
    numbers = [int(digits) for digits in re.findall(r"\d+", text)]
    ascending = numbers == sorted(set(numbers)) and all(1 <= number <= MAX_DEVICES for number in numbers)
    if not ascending or not re.fullmatch(r"gpus=\d+(,\d+)*|gpus=\d+(,\d+)+,\.\.\.,\d+", text):
        raise ConfigError(
            f"--sweep {text!r}: give gpus=8,16,...,4096 or gpus=8,64,512, ascending, up to {MAX_DEVICES}"
        )
    return [*numbers[:-1], *between(*numbers[-3:]), numbers[-1]] if "..." in text else numbers


def between(before: int, now: int, end: int) -> Iterator[int]:
    """The numbers after the first two and below `end`: by their factor where it is whole, else their step."""
    factor, step = now / before, now - before
    while (now := int(now * factor) if factor.is_integer() else now + step) < end:
        yield now


def scaling_rows(scaling: str, batches: dict[int, int], work: Workload, cluster: Cluster) -> list[Row]:
    """The best layout of each number of devices with its global batch; none where nothing fits."""
    rows: list[Row] = []
    for devices, batch in batches.items():
        for plan in best_layouts(work.replace(global_batch=batch), cluster.with_devices(devices), 1):
            speed = plan.time.samples_per_second
            first = rows[0]["samples_per_second"] / rows[0]["devices"] if rows else speed / devices
            rows.append(
                {
                    "scaling": scaling,
                    "devices": devices,
                    "global_batch_size": batch,
                    "layout": layout(plan.work),
                    "local_batch_size": plan.work.micro_batch,
                    "activation_checkpoint": checkpointing(plan.work),
                    "step_seconds": plan.time.total,
                    "samples_per_second": speed,
                    "mfu": plan.time.mfu(plan.work, cluster.device.peak["bf16"]),
                    "exposed_fraction": plan.time.exposed / plan.time.total,
                    "efficiency": speed / devices / first,
                }
            )
    return rows


def table(rows: list[Row]) -> str:
    heads = ("scaling", "devices", "batch", "  layout", "samples/s", "MFU", "efficiency")
    columns = ("samples_per_second", "mfu", "efficiency")
    lines = [
        (
            row["scaling"],
            row["devices"],
            row["global_batch_size"],
            f"  {row['layout']}",
            *map(row.get, columns),
        )
        for row in rows
    ]
    return text_table("<8 >8 >8 <42 >11,.1f >7.1% >11.1%", [heads, *lines])


def plot(rows: list[Row], cluster: Cluster, path: Path) -> None:
    """Samples/s and efficiency against devices, both scalings in each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for scaling, marker in (("strong", "o"), ("weak", "s")):
        chosen = [row for row in rows if row["scaling"] == scaling]
        devices = [row["devices"] for row in chosen]
        speed.loglog(devices, [row["samples_per_second"] for row in chosen], marker=marker, label=scaling)
        efficiency.semilogx(devices, [row["efficiency"] for row in chosen], marker=marker, label=scaling)
    numbers = sorted({row["devices"] for row in rows})
    ideal = [rows[0]["samples_per_second"] * n / rows[0]["devices"] for n in numbers]
    speed.loglog(numbers, ideal, color="grey", linestyle=":", label="ideal")
    speed.set(xlabel="devices", ylabel="samples/s", title=f"{cluster.device.name}: best layout of each size")
    efficiency.set(xlabel="devices", ylabel="samples a device-second, over the first", ylim=(0, 1.1))
    for axes in (speed, efficiency):
        axes.set_xticks(numbers, [str(n) for n in numbers], minor=False, rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
