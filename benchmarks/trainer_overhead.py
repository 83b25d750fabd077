"""Time that train.py adds to a bare loop around the same compiled model, or that fingerprints add to a step.

    .venv/bin/python benchmarks/trainer_overhead.py [--rounds 5] [--steps 30]
    .venv/bin/python benchmarks/trainer_overhead.py fingerprints

The trainer reads, normalises and cuts batches, seeds, judges each step, agrees with other ranks, counts and
logs every tenth step; the bare loop has a batch at hand and does forward, loss, backward, clipping, AdamW and
zero_grad. They take turns, a fresh run each, the first ten steps not counted; medians. Checkpoints,
validation and profiling are off: they have benchmarks of their own. Asked: 1.01 x.

fingerprints: two ranks of DDP (all weights are compared) and of tensor parallelism (norms and biases alone)
train the demo's model; steps and comparisons of the weights alternate, medians.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from benchmarks.random_run import RandomRun
from benchmarks.results_file import parser_of, record, require
from command_line import text_table
from config import Config
from config import Training as TrainingSection
from datasets.selection import open_selection
from parallelisms.mesh import start_ranks
from tests.distributed import Ranks
from tests.parity import Layout, SmallRun, replicate, tp
from train import train
from training.config_checks import load_checked
from training.fingerprints import Fingerprints
from training.gradients import clip, total_norm
from training.optimizers.build import set_lr
from training.process_settings import retain_memory

LOG_FREQ, LIMIT = 10, 1.01
OPTIONS = (
    "--model.num_layers=6 --model.num_heads=6 --training.local_batch_size=16 --compile.enable "
    "--checkpoint.enable=false --validation.enable=false --profiling.enable_profiling=false"
).split()
COMPARED = (("dim", 192), ("num_layers", 4), ("num_heads", 4), ("mlp_dim", 768), ("patch_size", (4, 4)))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("what", nargs="?", choices=("loop", "fingerprints"), default="loop")
    parser.add_argument("--rounds", type=int, default=0, help="default: 5, of fingerprints 15")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dim", type=int, default=384)
    options = parser.parse_args()
    if options.what == "fingerprints":
        return measure_fingerprints(options.rounds or 15)
    return measure_loop(options.rounds or 5, options.steps, options.dim)


# -- train.py against a bare loop


def measure_loop(rounds: int, steps: int, dim: int) -> int:
    require(rounds * (steps // LOG_FREQ), 2, f"intervals of {LOG_FREQ} steps in {rounds} rounds of {steps}")
    times: dict[str, list[float]] = {"bare loop": [], "train.py": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            own = [f"--job.dump_folder={folder}/{number}", f"--model.dim={dim}"]
            own += [f"--training.steps={steps + LOG_FREQ}", f"--metrics.log_freq={LOG_FREQ}"]
            config = load_checked([*OPTIONS, *own])
            times["train.py"] += trainer(config)
            times["bare loop"] += bare_loop(config, steps)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    ratio = seconds["train.py"] / seconds["bare loop"]
    spread = {name: statistics.quantiles(found, n=4) for name, found in times.items()}
    row = {"seconds": seconds, "quartiles": spread, "ratio": ratio, "rounds": rounds}
    record("trainer_overhead", [row])
    lines: list[tuple] = [("", "s a step", "quartiles", "x bare")]
    for name, value in seconds.items():
        quartiles = f"{spread[name][0]:.4f} to {spread[name][2]:.4f}"
        lines.append((name, value, quartiles, value / seconds["bare loop"]))
    print(text_table("<12 >10.4f >20 >9.3f", lines) + f"\n\nasked: at most {LIMIT}")
    return 0 if ratio <= LIMIT else 1


def trainer(config: Config) -> list[float]:
    """Return the seconds a step of each logged interval but the first."""
    train(config)
    rows = [json.loads(line) for line in (config.dump_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if row.get("step", 0) > LOG_FREQ]


def bare_loop(config: Config, steps: int) -> list[float]:
    """Return the seconds a step of the same intervals of a loop that does nothing else.

    Here, and here alone, the step is written out: what train.py adds to this is what is measured.
    """
    selection = open_selection(config.data, config.model.patch_size, ())
    device = start_ranks(100, "gloo" if not torch.cuda.is_available() else "auto")
    retain_memory(device)
    run = RandomRun(config, selection.archive.grid.shape, len(selection.variables), device)
    model, parameters = run.model, run.model.parameters.values()
    inputs, targets = run.objective.cut(*run.batches[0])
    set_lr(run.state.optimizer, 1e-3)

    def step() -> None:
        model.forward_backward(inputs, targets, run.objective.loss_part, 1.0, True)
        clip(parameters, 1.0, total_norm(parameters))
        run.state.optimizer.step()
        model.zero_grad()

    found = [seconds_of(step, LOG_FREQ, device) for _ in range(1 + steps // LOG_FREQ)]
    dist.destroy_process_group()
    return found[1:]


def seconds_of(step: Callable[[], None], number: int, device: torch.device) -> float:
    started = time.perf_counter()
    for _ in range(number):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / number


# -- comparisons of the weights that replicas have alike


def measure_fingerprints(rounds: int) -> int:
    interval = TrainingSection().fingerprint_steps
    ranks, rows = Ranks(2), []
    lines: list[tuple] = [("layout", "MB", "step ms", "comparison ms", f"of {interval} steps")]
    for name, layout in {"2 replicas": replicate(2), "tp 2": tp(2)}.items():
        step, comparison, size = ranks.run(step_and_compare, layout, rounds, timeout=300)[0]
        share = comparison / (interval * step)
        rows.append({"layout": name, "step": step, "comparison": comparison, "bytes": size, "share": share})
        lines.append((name, size / 1e6, 1e3 * step, 1e3 * comparison, share))
    ranks.stop()
    record("fingerprints", rows)
    print(text_table("<12 >8.1f >10.1f >15.2f >14.4%", lines))
    return 0


def step_and_compare(layout: dict[str, Any], rounds: int) -> tuple[float, float, int]:
    """Return seconds of a step and of a comparison (medians), and bytes of weights of this rank."""
    run = SmallRun(Layout(2, layout, grid=(32, 64), model=COMPARED))
    fingerprints = Fingerprints(run.model, interval=1)
    steps, comparisons = [], []
    for number in range(rounds):
        began = time.perf_counter()
        run.step(number % 3)
        stepped = time.perf_counter()
        fingerprints.compare(number, saves=True)
        steps.append(stepped - began)
        comparisons.append(time.perf_counter() - stepped)
    size = sum(p.numel() * p.element_size() for part in fingerprints.parts.values() for p in part.values())
    return statistics.median(steps), statistics.median(comparisons), size


if __name__ == "__main__":
    sys.exit(main())
