"""Time that train.py adds to a bare loop around the same compiled model, and fingerprints or a save to steps.

    .venv/bin/python benchmarks/trainer_overhead.py [--rounds 5] [--steps 30]
    .venv/bin/python benchmarks/trainer_overhead.py fingerprints
    .venv/bin/python benchmarks/trainer_overhead.py saves [--rounds 7] [--dim 768] [--folder DIR]

The trainer reads, normalises and cuts batches, seeds, judges each step, agrees with other ranks, counts and
logs every tenth step; the bare loop has a batch at hand and does forward, loss, backward, clipping, AdamW and
zero_grad. They take turns, a fresh run each, the first ten steps not counted; medians. Checkpoints,
validation and profiling are off: they have benchmarks of their own. Asked: 1.01 x.

fingerprints: two ranks of DDP (all weights are compared) and of tensor parallelism (norms and biases alone)
train the demo's model; steps and comparisons of the weights alternate, medians.

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
from tests.distributed import Ranks
from tests.parity import Layout, SmallRun, cut, replicate, tp
from tests.started_jobs import records
from train import train
from training.bad_steps import FINGERPRINT_STEPS, Fingerprints
from training.config_checks import load_checked
from training.gradients import total_norm
from training.optimizers.build import set_lr
from training.process_settings import retain_memory

LOG_FREQ, LIMIT = 10, 1.01
OPTIONS = (
    "--model.num_layers=6 --model.num_heads=6 --training.local_batch_size=16 --compile.enable "
    "--checkpoint.enable=false --validation.enable=false --profiling.enable_profiling=false"
).split()
COMPARED = (("dim", 192), ("num_layers", 4), ("num_heads", 4), ("mlp_dim", 768), ("patch_size", (4, 4)))


def main() -> int:
    commands = {"loop": measure_loop, "fingerprints": measure_fingerprints, "saves": measure_saves}
    options = parse(__doc__, commands, rounds=0, steps=30, dim=0, folder="")
    rounds = {"loop": 5, "fingerprints": 15, "saves": 7}[options.command]
    return commands[options.command](options, options.rounds or rounds)


def measure_loop(options: argparse.Namespace, rounds: int) -> int:
    steps, numbers = options.steps, itertools.count()
    require(rounds * (steps // LOG_FREQ), 2, f"intervals of {LOG_FREQ} steps in {rounds} rounds of {steps}")
    with tempfile.TemporaryDirectory() as folder:

        def trainer() -> list[float]:
            config = load_checked([*words, f"--job.dump_folder={folder}/{next(numbers)}"])
            train(config)
            rows = records(config.dump_folder)
            return [row["step_seconds"] for row in rows if row.get("step", 0) > LOG_FREQ]

        words = [*OPTIONS, f"--model.dim={options.dim or 384}", f"--metrics.log_freq={LOG_FREQ}"]
        words.append(f"--training.steps={steps + LOG_FREQ}")
        ways = {"train.py": trainer, "bare loop": lambda: bare_loop(load_checked(words), steps)}
        times = {name: sum(found, []) for name, found in in_turns(rounds, ways).items()}
    seconds = {name: statistics.median(found) for name, found in times.items()}
    ratio = seconds["train.py"] / seconds["bare loop"]
    row = {"seconds": seconds, "ratio": ratio, "rounds": rounds}
    record("trainer_overhead", [row])
    print(table([seconds | row], **{"train.py": ">10.4f", "bare loop": ">11.4f"}, ratio=">8.3f"))
    print(f"\nseconds a step; asked: a ratio of at most {LIMIT}")
    return 0 if ratio <= LIMIT else 1


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

    found = [clock(some_steps) / LOG_FREQ for _ in range(1 + steps // LOG_FREQ)]
    dist.destroy_process_group()
    return found[1:]


def measure_fingerprints(_: argparse.Namespace, rounds: int) -> int:
    ranks, rows = Ranks(2), []
    for name, layout in {"2 replicas": replicate(2), "tp 2": tp(2)}.items():
        step, comparison, size = ranks.run(step_and_compare, layout, rounds, timeout=300)[0]
        share = comparison / (FINGERPRINT_STEPS * step)
        rows.append({"layout": name, "step": step, "comparison": comparison, "bytes": size, "share": share})
    ranks.stop()
    record("fingerprints", rows)
    print(f"share of {FINGERPRINT_STEPS} steps:")
    columns = {"layout": "<12", "bytes": ">10", "step": ">10.4f", "comparison": ">12.6f"}
    print(table(rows, **columns, share=">10.4%"))
    return 0


def step_and_compare(layout: dict[str, Any], rounds: int) -> tuple[float, float, int]:
    """Return seconds of a step and of a comparison (medians), and bytes of weights of this rank."""
    run = SmallRun(Layout(2, layout, grid=(32, 64), model=COMPARED))
    fingerprints, numbers = Fingerprints(run.model), itertools.count()
    ways = {
        "step": lambda: clock(lambda: run.step(0)),
        "comparison": lambda: clock(lambda: fingerprints.compare(next(numbers), saves=True)),
    }
    step, comparison = map(statistics.median, in_turns(rounds, ways).values())
    size = sum(p.numel() * p.element_size() for shard in fingerprints.shards.values() for p in shard.values())
    return step, comparison, size


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
    found = in_turns(rounds, ways | {mode: partial(save, own[mode]) for mode in OURS}, warm_up=1)
    for checkpointer in own.values():
        assert not checkpointer.last_error
        checkpointer.close()
    base = found.pop("")
    pairs = {mode: zip(seconds, base, strict=True) for mode, seconds in found.items()}
    excess = {mode: statistics.median(s - b for s, b in both) for mode, both in pairs.items()}
    return excess, statistics.median(base) / STEPS


def measure_saves(options: argparse.Namespace, rounds: int) -> int:
    """Use one thread, so that the other core is free for the writer, like host cores on a GPU node."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    device = start_ranks(600)
    torch.manual_seed(0)
    training = Saving(options.dim or 768, device)
    with tempfile.TemporaryDirectory(dir=options.folder or None) as folder:
        excess, step = measure_excess(training, Path(folder), rounds)
    dist.destroy_process_group()
    record("checkpoint_stall", [{"step_seconds": step, "excess_seconds": excess, "rounds": rounds}])
    print(f"step {step:.3f} s, medians of {rounds} rounds\n")
    rows = [
        {"mode": m, "excess": seconds, "x plain": seconds / excess[PLAIN]} for m, seconds in excess.items()
    ]
    print(table(rows, mode="<24", excess=">9.3f", x_plain=">9.2f"))
    return int(excess["async_with_pinned_mem"] > 0.35 * excess[PLAIN])


if __name__ == "__main__":
    sys.exit(main())
