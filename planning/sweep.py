"""Scaling curves: the best layout of each number of devices, the batch growing (weak) or not (strong)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

from command_line import text_table
from errors import ConfigError
from planning.error_bands import band_of
from planning.hardware import Cluster
from planning.report import checkpointing, layout
from planning.search import best_layouts
from planning.workload import Workload

MAX_DEVICES = 16384


def sweep(work: Workload, cluster: Cluster, text: str, folder: Path) -> str:
    """A table of `gpus=LIST`; writes scaling.csv and scaling.png into `folder`. ConfigError: a bad list."""
    rows = list(scaling_rows(work, cluster, parse_numbers(text)))
    if not rows:
        raise ConfigError(
            f"--sweep {text!r}: the job fits on none of these; see --layout auto for one of them"
        )
    table = pd.DataFrame(rows)
    speed: Any = table["samples_per_second"] / table["devices"]
    table["efficiency"] = speed / speed.groupby(table["scaling"]).transform("first")
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "scaling.csv", index=False)
    plot(table, cluster, folder / "scaling.png")
    heads = ("scaling", "devices", "batch", "  layout", "samples/s", "at worst", "MFU", "efficiency")
    columns = ["scaling", "devices", "global_batch_size", "layout", "samples_per_second", "at_worst", "mfu"]
    lines = table.assign(layout="  " + table["layout"])[[*columns, "efficiency"]].itertuples(index=False)
    shown = text_table("<8 >8 >8 <42 >11,.1f >9,.1f >7.1% >11.1%", [heads, *lines])
    return f"{shown}\n\nwritten: {folder / 'scaling.csv'}, {folder / 'scaling.png'}"


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


def scaling_rows(work: Workload, cluster: Cluster, numbers: list[int]) -> Iterator[dict[str, Any]]:
    """Columns of scaling.csv for the best layout of each number of devices; none where nothing fits."""
    strong = dict.fromkeys(numbers, work.global_batch)
    weak = {devices: max(round(work.global_batch * devices / cluster.devices), 1) for devices in numbers}
    for scaling, batches in (("strong", strong), ("weak", weak)):
        for devices, batch in batches.items():
            for plan in best_layouts(work.replace(global_batch=batch), cluster.with_devices(devices), 1):
                band = band_of(plan.work, cluster)
                yield {
                    "scaling": scaling,
                    "devices": devices,
                    "global_batch_size": batch,
                    "layout": layout(plan.work),
                    "local_batch_size": plan.work.micro_batch,
                    "activation_checkpoint": checkpointing(plan.work),
                    "step_seconds": plan.time.total,
                    "samples_per_second": plan.time.samples_per_second,
                    "at_worst": plan.time.samples_per_second / band.slowest if band else None,
                    "mfu": plan.time.mfu(plan.work, cluster.device.peak["bf16"]),
                    "exposed_fraction": plan.time.exposed / plan.time.total,
                }


def plot(table: Any, cluster: Cluster, path: Path) -> None:
    """Samples/s and efficiency against devices, both scalings in each."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (scaling, rows), marker in zip(table.groupby("scaling"), "os", strict=False):
        speed.loglog(rows["devices"], rows["samples_per_second"], marker=marker, label=scaling)
        efficiency.semilogx(rows["devices"], rows["efficiency"], marker=marker, label=scaling)
    numbers, first = sorted(set(table["devices"])), table.iloc[0]
    ideal = [first["samples_per_second"] * n / first["devices"] for n in numbers]
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
