"""Scaling curves: the best layout of each number of devices, the batch growing (weak) or not (strong)."""

import csv
from dataclasses import dataclass
from pathlib import Path

from errors import ConfigError
from planning.clusters import Cluster
from planning.compute import Rates
from planning.report import checkpointing, layout
from planning.search import Plan, best_layouts
from planning.workload import Workload

MAX_DEVICES = 16384


@dataclass(frozen=True)
class Point:
    scaling: str  # "strong": one global batch; "weak": so many samples a device
    devices: int
    plan: Plan
    efficiency: float  # samples a device-second, over those of the smallest number


def sweep(work: Workload, cluster: Cluster, text: str, folder: Path, rates: Rates | None = None) -> str:
    """A table of `gpus=LIST`; writes scaling.csv and scaling.png into `folder`. ConfigError: a bad list."""
    numbers = parse_numbers(text)
    a_device = work.global_batch / cluster.devices
    points: list[Point] = []
    for scaling in ("strong", "weak"):
        first = 0.0
        for devices in numbers:
            batch = work.global_batch if scaling == "strong" else max(round(a_device * devices), 1)
            plans = best_layouts(work.replace(global_batch=batch), cluster.with_devices(devices), rates, 1)
            if plans:
                rate = plans[0].time.samples_per_second / devices
                first = first or rate
                points.append(Point(scaling, devices, plans[0], rate / first))
    if not points:
        raise ConfigError(
            f"--sweep {text!r}: the job fits on none of these; see --layout auto for one of them"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(points, cluster, folder / "scaling.csv")
    plot(points, cluster, folder / "scaling.png")
    return f"{table(points, cluster)}\n\nwritten: {folder / 'scaling.csv'}, {folder / 'scaling.png'}"


def parse_numbers(text: str) -> list[int]:
    """ "gpus=8,16,...,4096": what stands around the dots continues as it began."""
    bad = f"--sweep {text!r}: give gpus=8,16,...,4096 or gpus=8,64,512, ascending, up to {MAX_DEVICES}"
    head, equals, values = text.partition("=")
    parts = values.split(",")
    if head != "gpus" or not equals or not all(part.isdigit() or part == "..." for part in parts):
        raise ConfigError(bad)
    numbers: list[int] = []
    for index, part in enumerate(parts):
        if part != "...":
            numbers.append(int(part))
        elif (
            len(numbers) < 2
            or index != len(parts) - 2
            or numbers[-1] <= numbers[-2]
            or not parts[-1].isdigit()
        ):
            raise ConfigError(bad)
        else:
            factor, step = numbers[-1] / numbers[-2], numbers[-1] - numbers[-2]
            grows = factor == int(factor)
            while (following := int(numbers[-1] * factor) if grows else numbers[-1] + step) < int(parts[-1]):
                numbers.append(following)
    if numbers != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= MAX_DEVICES:
        raise ConfigError(bad)
    return numbers


def row(point: Point, cluster: Cluster) -> dict[str, object]:
    plan, peak = point.plan, cluster.device.peak["bf16"]
    return {
        "scaling": point.scaling,
        "devices": point.devices,
        "global_batch_size": plan.work.global_batch,
        "layout": layout(plan.work),
        "local_batch_size": plan.work.micro_batch,
        "activation_checkpoint": checkpointing(plan.work),
        "step_seconds": plan.time.total,
        "samples_per_second": plan.time.samples_per_second,
        "mfu": plan.time.mfu(plan.work, peak),
        "exposed_share": plan.time.exposed / plan.time.total,
        "efficiency": point.efficiency,
    }


def write_csv(points: list[Point], cluster: Cluster, path: Path) -> None:
    rows = [row(point, cluster) for point in points]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(points: list[Point], cluster: Cluster) -> str:
    lines = [
        f"{'scaling':<8}{'devices':>8}{'batch':>8}  {'layout':<40}{'samples/s':>11}{'MFU':>7}"
        f"{'efficiency':>11}"
    ]
    for point in points:
        time, work = point.plan.time, point.plan.work
        mfu = time.mfu(work, cluster.device.peak["bf16"])
        lines.append(
            f"{point.scaling:<8}{point.devices:>8}{work.global_batch:>8}  {layout(work):<40}"
            f"{time.samples_per_second:>11,.1f}{mfu:>7.1%}{point.efficiency:>11.1%}"
        )
    return "\n".join(lines)


def plot(points: list[Point], cluster: Cluster, path: Path) -> None:
    """Samples/s and efficiency against devices, both scalings in each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, efficiency) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for scaling, marker in (("strong", "o"), ("weak", "s")):
        chosen = [point for point in points if point.scaling == scaling]
        devices = [point.devices for point in chosen]
        rates = [point.plan.time.samples_per_second for point in chosen]
        speed.loglog(devices, rates, marker=marker, label=scaling)
        efficiency.semilogx(devices, [point.efficiency for point in chosen], marker=marker, label=scaling)
    first = points[0]
    ideal = [first.plan.time.samples_per_second * n / first.devices for n in devices_of(points)]
    speed.loglog(devices_of(points), ideal, color="grey", linestyle=":", label="ideal")
    speed.set(xlabel="devices", ylabel="samples/s", title=f"{cluster.device.name}: best layout of each size")
    efficiency.set(xlabel="devices", ylabel="samples a device-second, over the first", ylim=(0, 1.1))
    for axes in (speed, efficiency):
        axes.set_xticks(devices_of(points), [str(n) for n in devices_of(points)], minor=False, rotation=45)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def devices_of(points: list[Point]) -> list[int]:
    return sorted({point.devices for point in points})
