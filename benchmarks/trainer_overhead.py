"""Time that train.py adds to a bare loop around the same compiled model, and a save to the steps after it.

    .venv/bin/python benchmarks/trainer_overhead.py [--rounds 5] [--steps 30]
    .venv/bin/python benchmarks/trainer_overhead.py saves [--rounds 7] [--dim 768] [--folder DIR]

The trainer reads, normalises and cuts batches, seeds, judges each step, agrees with other ranks, counts and
logs every tenth step; the bare loop has a batch at hand and does forward, loss, backward, clipping, AdamW and
zero_grad. They take turns, a fresh run each, the first ten steps not counted; medians. Checkpoints,
validation and profiling are off: they have benchmarks of their own. Asked: 1.01 x.

saves: rounds alternate: ten steps of a ViT without a save, then for each mode a save and ten steps. A mode's
excess is the time beyond that of the ten steps without one in the same round; medians. Ends with 1 when the
excess of "async_with_pinned_mem" is above 0.35 x that of plain dcp.async_save.
"""

import argparse
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.nn.utils import clip_grads_with_norm_

from benchmarks.random_run import RandomRun
from benchmarks.results_file import clock, in_turns, parse, record, require, table
from checkpoints.checkpointer import Checkpointer
from config import Checkpoint, Config, Model, Optimizer, Training
from datasets.selection import open_selection
from parallelisms.mesh import start_ranks
from tests.parity import cut
from tests.started_jobs import records
from train import train
from training.config_checks import load_checked
from training.gradients import total_norm
from training.optimizers.build import set_lr
from training.process_settings import retain_memory

LOG_FREQ, LIMIT = 10, 1.01
OPTIONS = (
    "--model.num_layers=6 --model.num_heads=6 --training.local_batch_size=16 --compile.enable "
    "--optimizer.name=AdamW --optimizer.lr=1e-3 "
    "--checkpoint.enable=false --validation.enable=false --profiling.enable_profiling=false"
).split()


def measure_loop(options: argparse.Namespace) -> int:
    steps, rounds, numbers = options.steps, options.rounds or 5, itertools.count()
    require(rounds * (steps // LOG_FREQ), 2, f"intervals of {LOG_FREQ} steps in {rounds} rounds of {steps}")
    with tempfile.TemporaryDirectory() as folder:
        words = [*OPTIONS, f"--model.dim={options.dim or 384}", f"--metrics.log_freq={LOG_FREQ}"]
        words.append(f"--training.steps={steps + LOG_FREQ}")

        def trainer() -> list[float]:
            config = load_checked([*words, f"--job.dump_folder={folder}/{next(numbers)}"])
            train(config)
            rows = records(config.dump_folder)
            return [row["step_seconds"] for row in rows if row.get("step", 0) > LOG_FREQ]

        ways = {"train.py": trainer, "bare loop": lambda: bare_loop(load_checked(words), steps)}
        times = {name: sum(lists, []) for name, lists in in_turns(rounds, ways).items()}
    seconds = {name: statistics.median(values) for name, values in times.items()}
    row = {"seconds": seconds, "ratio": seconds["train.py"] / seconds["bare loop"], "rounds": rounds}
    record("trainer_overhead", [row])
    print(table([seconds | row], *ways, "ratio"))
    print(f"\nseconds a step; asked: a ratio of at most {LIMIT}")
    return 0 if row["ratio"] <= LIMIT else 1


def bare_loop(config: Config, steps: int) -> list[float]:
    """Return the seconds a step of the same intervals of a loop that does nothing else.

    Here, and here alone, the step is written out: what train.py adds to this is what is measured.
    """
    selection = open_selection(config.data, config.model.patch_size, ())
    device = start_ranks(100, "gloo" if not torch.cuda.is_available() else "auto")
    retain_memory(device)
    run = RandomRun(config, selection.archive.grid.shape, len(selection.variables), device)
    model, parameters = run.model, run.model.parameters.values()
    inputs, targets = cut(run.objective, *run.batches[0])
    set_lr(run.state.optimizer, 1e-3)

    def some_steps() -> None:
        for _ in range(LOG_FREQ):
            model.forward_backward(inputs, targets, run.objective.loss_part, 1.0, True)
            clip_grads_with_norm_(parameters, 1.0, total_norm(parameters))
            run.state.optimizer.step()
            model.zero_grad()

    seconds = [clock(some_steps) / LOG_FREQ for _ in range(1 + steps // LOG_FREQ)]
    dist.destroy_process_group()
    return seconds[1:]


STEPS = 10
PLAIN = "plain dcp.async_save"
OURS = ("disabled", "async", "async_with_pinned_mem")


class Saving(RandomRun):
    """A ViT of `dim` on 32 x 64 fields in 8 x 8 patches, two samples a step."""

    def __init__(self, dim: int, device: torch.device) -> None:
        model = Model(patch_size=(8, 8), dim=dim, num_layers=12, num_heads=dim // 64)
        optimizer, training = Optimizer(lr=1e-4), Training(local_batch_size=2)
        config = Config(model=model, optimizer=optimizer, training=training)
        super().__init__(config, (32, 64), 5, device)
        for _ in range(3):
            self.step()

    def ten_steps(self, save: Callable[[], object], wait_for_staging: Callable[[], object]) -> float:
        """Return the seconds of a save and the ten steps after it, each of which gives it time for copies."""
        self.run.checkpointer = SimpleNamespace(wait_for_staging=wait_for_staging)  # type: ignore[assignment]
        started = time.perf_counter()
        save()
        for _ in range(STEPS):
            clock(self.step)  # waits for the device
        return time.perf_counter() - started


def measure_excess(training: Saving, folder: Path, rounds: int) -> tuple[dict[str, float], float]:
    """Return the excess seconds of ten steps after a save by mode, and those of a step without one."""
    own = {m: Checkpointer(folder / m, Checkpoint(async_mode=m, keep_latest_k=1), "", {}) for m in OURS}
    for checkpointer in own.values():
        checkpointer.start_process()
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo"))

    def save_plainly() -> float:
        writer, pending = FileSystemWriter(str(folder / "plain"), sync_files=True), []
        state: Any = training.state.state_dict()
        start = partial(state_dict_saver.async_save, state, storage_writer=writer, process_group=group)
        seconds = training.ten_steps(lambda: pending.append(start()), lambda: None)
        pending[0].result()
        shutil.rmtree(folder / "plain")
        return seconds

    def save(checkpointer: Checkpointer) -> float:
        start = partial(checkpointer.save, training.state.progress.step, training.state.state_dict())
        seconds = training.ten_steps(start, checkpointer.wait_for_staging)
        checkpointer.wait()
        return seconds

    ways = {"": lambda: training.ten_steps(lambda: None, lambda: None), PLAIN: save_plainly}
    times = in_turns(rounds, ways | {mode: partial(save, own[mode]) for mode in OURS}, warm_up=1)
    for checkpointer in own.values():
        assert not checkpointer.last_error
        checkpointer.close()
    base = times.pop("")
    pairs = {mode: zip(seconds, base, strict=True) for mode, seconds in times.items()}
    excess = {mode: statistics.median(s - b for s, b in both) for mode, both in pairs.items()}
    return excess, statistics.median(base) / STEPS


def measure_saves(options: argparse.Namespace) -> int:
    """Use one thread, so that the other core is free for the writer, like host cores on a GPU node."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    device, rounds = start_ranks(600), options.rounds or 7
    torch.manual_seed(0)
    training = Saving(options.dim or 768, device)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        excess, step = measure_excess(training, Path(folder), rounds)
    dist.destroy_process_group()
    record("checkpoint_stall", [{"step_seconds": step, "excess_seconds": excess, "rounds": rounds}])
    print(f"step {step:.3f} s, medians of {rounds} rounds\n")
    rows = [{"mode": m, "excess": s, "x plain": s / excess[PLAIN]} for m, s in excess.items()]
    print(table(rows, "mode", "excess", "x plain"))
    return int(excess["async_with_pinned_mem"] > 0.35 * excess[PLAIN])


if __name__ == "__main__":
    commands = {"loop": measure_loop, "saves": measure_saves}
    options = parse(__doc__, commands, rounds=0, steps=30, dim=0, folder="")
    sys.exit(commands[options.command](options))
