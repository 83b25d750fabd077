"""What train.py costs over a bare loop around the same compiled model.

    .venv/bin/python benchmarks/trainer_overhead.py [--rounds 5] [--steps 30]

The trainer reads, normalises and cuts batches, seeds, judges each step, agrees with other ranks, counts and
logs every tenth step; the bare loop has a batch at hand and does forward, loss, backward, clipping, AdamW and
zero_grad. They take turns, a fresh run each, the first ten steps not counted; medians. Checkpoints,
validation and profiling are off: they have benchmarks of their own. Asked: 1.01 x.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

from benchmarks.random_run import RandomRun
from benchmarks.results_file import record
from config import Config
from datasets.selection import open_selection
from parallelisms.mesh import start_ranks
from train import train
from training.config_checks import load_checked
from training.gradients import clip, total_norm
from training.optimizers.build import set_lr
from training.process_settings import retain_memory

LOG_FREQ, LIMIT = 10, 1.01
MODEL = {
    "model.dim": "384",
    "model.num_layers": "6",
    "model.num_heads": "6",
    "training.local_batch_size": "16",
}
OFF = {"checkpoint.enable": "false", "validation.enable": "false", "profiling.enable_profiling": "false"}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    times: dict[str, list[float]] = {"bare loop": [], "train.py": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            config = configuration(Path(folder) / str(number), options.steps + LOG_FREQ)
            times["train.py"] += trainer(config)
            times["bare loop"] += bare_loop(config, options.steps)
    seconds = {name: statistics.median(found) for name, found in times.items()}
    ratio = seconds["train.py"] / seconds["bare loop"]
    spread = {name: statistics.quantiles(found, n=4) for name, found in times.items()}
    row = {"seconds": seconds, "quartiles": spread, "ratio": ratio, "rounds": options.rounds}
    record("trainer_overhead", [row])
    print(f"{'':<12}{'s a step':>10}{'quartiles':>20}{'x bare':>9}")
    for name, value in seconds.items():
        quartiles = f"{spread[name][0]:.4f} to {spread[name][2]:.4f}"
        print(f"{name:<12}{value:>10.4f}{quartiles:>20}{value / seconds['bare loop']:>9.3f}")
    print(f"\nasked: at most {LIMIT}")
    return 0 if ratio <= LIMIT else 1


def configuration(folder: Path, steps: int) -> Config:
    named = MODEL | OFF | {"training.steps": str(steps), "metrics.log_freq": str(LOG_FREQ)}
    named |= {"compile.enable": "true", "job.dump_folder": str(folder)}
    return load_checked([f"--{key}={value}" for key, value in named.items()])


def trainer(config: Config) -> list[float]:
    """Seconds a step of each logged interval but the first."""
    train(config)
    rows = [json.loads(line) for line in (config.dump_folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step_seconds"] for row in rows if row.get("step", 0) > LOG_FREQ]


def bare_loop(config: Config, steps: int) -> list[float]:
    """The same intervals of a loop that does nothing else; seconds a step of each.

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


if __name__ == "__main__":
    sys.exit(main())
