"""How the loss on dates that were not seen falls with FLOPs: five sizes of model, and a power law.

    .venv/bin/python benchmarks/scaling.py [--steps 128] [--plot docs/scaling.png]

ViTs of two blocks and five widths on the demo's weather, in batches of 16, all with the same samples; the
rate is 0.256 / width after a warm-up and then constant, so that every validation is the end of a shorter run.
The lower envelope of all curves is what a budget of FLOPs reaches; the law loss = a FLOPs^-b is fitted to it
in logarithms, and again without each size in turn, which gives the range. What it says of vit1b.toml's FLOPs
is an extrapolation over many orders of magnitude, to another model and other data, and is labelled so.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.results_file import record
from benchmarks.time_to_skill import ROOT, Task, records_of
from command_line import text_table
from verification.plots import build_panels, save

WIDTHS = (32, 64, 96, 128, 192)
TASK = Task("demo", ("geopotential:300",), (6,), "persistence")
MODEL = "--model.patch_size=[8,8] --model.num_layers=2 --lr_scheduler.decay_type=constant".split()
VALIDATIONS = 4
VIT1B = 126.8e12 * 350_000 * 50  # FLOPs of a sample x samples of an epoch x epochs (train_configs/vit1b.toml)
Law = tuple[float, float]  # exponent and logarithm of the factor: log loss = b log FLOPs + log a


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--plot", type=Path, default=ROOT / "docs/scaling.png")
    options = parser.parse_args()
    rows = [row for width in WIDTHS for row in curve(width, options.steps)]
    best = envelope(rows)
    law, others = fitted(best), [fitted(envelope([r for r in rows if r["width"] != w])) for w in WIDTHS]
    record("scaling", rows)
    draw(rows, best, law, options.plot)
    print(table(rows))
    print(report(law, others, best))
    print(f"written: {options.plot}")
    return 0


def curve(width: int, steps: int) -> list[dict]:
    """Validations of one run: FLOPs of training so far, and the loss over that of persistence's scale."""
    words = [*MODEL, f"--model.dim={width}", f"--optimizer.lr={0.256 / width}", f"--training.steps={steps}"]
    records = records_of(TASK, [*words, f"--validation.interval={steps // VALIDATIONS}"], 0)
    flops, rows = 0.0, []
    for each in records:
        flops += each["tflops"] * each["step_seconds"] * 1e12 if "step_seconds" in each else 0.0
        if "val/loss" in each:
            rows.append({"width": width, "step": each["step"], "flops": flops, "loss": each["val/loss"]})
    print(rows[-1], flush=True)
    return rows


def envelope(rows: list[dict]) -> list[dict]:
    """Those that nothing with fewer FLOPs has reached."""
    found: list[dict] = []
    for row in sorted(rows, key=lambda row: row["flops"]):
        if not found or row["loss"] < found[-1]["loss"]:
            found.append(row)
    return found


def fitted(rows: list[dict]) -> Law:
    """Least squares in logarithms."""
    flops, losses = (np.log([row[key] for row in rows]) for key in ("flops", "loss"))
    slope, intercept = np.polyfit(flops, losses, 1)
    return float(slope), float(intercept)


def at(law: Law, flops: float) -> float:
    return float(np.exp(law[0] * np.log(flops) + law[1]))


def report(law: Law, others: list[Law], best: list[dict]) -> str:
    errors = [row["loss"] / at(law, row["flops"]) - 1 for row in best]
    far, slopes = sorted(at(each, VIT1B) for each in others), sorted(-each[0] for each in others)
    orders = np.log10(VIT1B / best[-1]["flops"])
    spread = f"(without a size: {slopes[0]:.3f} to {slopes[-1]:.3f})"
    return (
        f"loss = {np.exp(law[1]):.3g} FLOPs^-{-law[0]:.3f} {spread} "
        f"from {best[0]['flops']:.1e} to {best[-1]['flops']:.1e} FLOPs; points within "
        f"{min(errors):+.0%} and {max(errors):+.0%}; ten times the FLOPs take {1 - 10 ** law[0]:.0%} off\n"
        f"EXTRAPOLATED over {orders:.1f} orders of magnitude to vit1b.toml's {VIT1B:.1e} FLOPs: "
        f"{at(law, VIT1B):.1e} ({far[0]:.1e} to {far[-1]:.1e}), if no floor came before, which there is"
    )


def table(rows: list[dict]) -> str:
    """The last validation of each size."""
    lines: list[list] = [["width", "steps", "FLOPs", "loss"]]
    for width in WIDTHS:
        last = [row for row in rows if row["width"] == width][-1]
        lines.append([width, last["step"], last["flops"], last["loss"]])
    return text_table(">5 >6 >9.2e >9.4f", lines)


def draw(rows: list[dict], best: list[dict], law: Law, target: Path) -> None:
    figure, (axes,) = build_panels(1, "simulated weather: loss against FLOPs of training", size=(7.0, 4.2))
    for width in WIDTHS:
        own = [row for row in rows if row["width"] == width]
        axes.plot([r["flops"] for r in own], [r["loss"] for r in own], ".-", label=f"width {width}")
    ends = np.array([best[0]["flops"], 10 * best[-1]["flops"]])
    axes.plot(ends, [at(law, flops) for flops in ends], "k--", label=f"FLOPs^{law[0]:.2f}")
    axes.set(xlabel="FLOPs of training", ylabel="validation loss (normalised)", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, target)


if __name__ == "__main__":
    sys.exit(main())
