"""Which learning rate: raised step by step, exponentially, until the loss blows up (Smith 2017).

    .venv/bin/python -m training.optimizers.lr_range train_configs/demo.toml --section.key value

Takes training steps of a configuration on this machine, from its initial weights or those that
checkpoint.initial_load_path names, and prints the loss at each rate and the peak rate that it suggests. The
curve goes into <job.dump_folder>-lr_range; the run's own folder is not touched, and no checkpoint is written.
docs/batch_and_rate.md explains it. Exit codes: 0, 2 bad input.
"""

import logging
import math
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from checkpoints.initial_weights import start_from
from command_line import own_options, split_options, start, text_table
from config import Config
from datasets.selection import Selection
from errors import end_when_interrupted, one_line_errors, refuse
from jobs.log_setup import start_logging
from parallelisms.mesh import from_first_rank, mesh_of, start_ranks
from planning.start_checks import open_checked
from training.assembly import Fields, assemble, build_objective, build_run_state, build_update
from training.batches import build_batches
from training.config_checks import check
from training.determinism import seed_step, set_determinism
from training.no_checkpoints import NoCheckpoints
from training.optimizers.lr_schedules import peak_lr
from training.run_folder import lock_folder
from training.samples import Samples
from training.state import global_batch_of
from training.step import train_step
from verification.plots import build_panels, save

logger = logging.getLogger("rossby")
OPTIONS = own_options(steps=100, lowest=1e-6, highest=1.0)
FEWEST_STEPS = 10
WINDOW = 5  # steps: a loss is the mean of so many
BLOWN_UP = 2.0  # times the lowest loss
MARGIN = 3.0  # a run is longer than a sweep, and its peak rate has to hold: below the best by so much
ROWS = 20  # of the table


@dataclass(frozen=True)
class Sweep:
    """So many steps, from the lowest rate to the highest, each by the same factor above the one before."""

    steps: int
    lowest: float
    highest: float

    def rate(self, step: int) -> float:
        """Of step `step`, 1 is the first."""
        return self.lowest * (self.highest / self.lowest) ** ((step - 1) / (self.steps - 1))


class Trial:
    """A run of train.py's parts that nobody keeps. Made by all ranks together."""

    def __init__(self, config: Config, selection: Selection, device: torch.device) -> None:
        self.seed, parallelism = config.training.seed, config.parallelism
        mesh = mesh_of(parallelism, device)
        dp, self.dp_rank = mesh.degrees.dp, mesh.dp_rank
        samples = Samples(selection, config.data, config.dump_folder)
        train_set = samples.dataset("train", range(1, 1 + config.training.states_ahead))
        assembly = assemble(config, Fields.of(selection, samples.statistics), mesh, device)
        self.model, self.objective = assembly.model, build_objective(config, assembly, samples.area)
        run = build_run_state(config, self.model, self.objective.replay)
        if config.checkpoint.initial_load_path:
            start_from(Path(config.checkpoint.initial_load_path), run.parameters, config)
        self.progress, smallest = run.progress, config.training.local_batch_size * dp
        self.global_batch = global_batch_of(config.training, smallest, self.progress)
        saves, loss_part = NoCheckpoints(), self.objective.loss_part
        self.update = build_update(config, self.model, run, saves, loss_part, self.global_batch)
        self.batches = build_batches(train_set, config, run, (self.dp_rank, dp), self.global_batch, device)
        self.num_parts = dp
        self.model.train()

    def step(self, step: int, rate: float) -> float:
        """The loss over all ranks, before weights changed by this rate."""
        seed_step(self.seed, step, self.dp_rank)
        self.update.rate = lambda _: rate
        taken = train_step(step, self.batches, self.objective, self.model, self.update)
        self.progress.advance(self.batches.samples)
        dist.all_reduce(taken.loss)
        return taken.loss.item() / self.num_parts


def for_a_sweep(config: Config) -> Config:
    """In a folder of its own, with nothing that outlives it; of rollouts the longest alone: a loss that
    changes its meaning on the way says nothing of the rate. Of a ramp the last batch.
    """
    one_stage: dict[str, Any] = {"rollout_steps": (max(config.training.rollout_steps),), "batch_ramp": ()}
    one_stage |= {"rollout_from_step": (), "batch_ramp_from_step": ()}
    return replace(
        config,
        job=replace(config.job, dump_folder=f"{config.dump_folder}-lr_range"),
        training=replace(config.training, spike_threshold=0.0, ema_decay=0.0, **one_stage),
        checkpoint=replace(config.checkpoint, enable=False),
        validation=replace(config.validation, enable=False),
    )


def smoothed(losses: list[float]) -> list[float]:
    """The mean of WINDOW steps around each; of fewer at the ends."""
    around = [losses[max(i - WINDOW // 2, 0) : i + WINDOW // 2 + 1] for i in range(len(losses))]
    return [sum(window) / len(window) for window in around]


def has_blown_up(losses: list[float]) -> bool:
    """Whether the last of them, on average, lie far above the lowest before; the same on all ranks."""
    if not math.isfinite(losses[-1]):
        return True
    return len(losses) > WINDOW and smoothed(losses)[-1 - WINDOW // 2] > BLOWN_UP * min(smoothed(losses))


def sweep_losses(trial: Trial, sweep: Sweep) -> list[float]:
    """The losses of the steps that were taken, all finite."""
    losses: list[float] = []
    for step in range(1, sweep.steps + 1):
        losses.append(trial.step(step, sweep.rate(step)))
        if has_blown_up(losses):
            logger.info(f"the loss blows up at step {step}, at a rate of {sweep.rate(step):.1e}")
            break
    return [loss for loss in losses if math.isfinite(loss)]


def suggestion(rates: list[float], losses: list[float], complete: bool) -> tuple[float | None, str]:
    """The peak rate, and what there is to say. complete: the highest rate was reached."""
    smooth = smoothed(losses)
    best = smooth.index(min(smooth)) if smooth else 0
    if best == 0:
        return None, "the loss never fell: lower --lowest, or raise --steps"
    if complete and best >= len(smooth) - WINDOW:
        return None, "the loss still falls at the highest rate: raise --highest"
    return rates[best] / MARGIN, f"the lowest loss, at a rate of {rates[best]:.1e}, over {MARGIN:.0f}"


def scaling(config: Config, global_batch: int) -> float:
    """What `optimizer.lr` is multiplied by for this batch."""
    own = config.optimizer
    return peak_lr(1.0, own.lr_scaling, own.lr_reference_batch_size, global_batch, math.inf)


def table(rates: list[float], losses: list[float]) -> str:
    """Every so many steps: rate, and the smoothed loss."""
    every = max(len(rates) // ROWS, 1)
    rows = list(zip(range(1, len(rates) + 1), rates, smoothed(losses), strict=True))[::every]
    return text_table(">6d >10.1e >12.5f", [("step", "lr", "loss"), *rows])


def draw(rates: list[float], losses: list[float], suggested: float | None, title: str, target: Path) -> None:
    """Loss against rate, of each step and smoothed."""
    figure, (axes,) = build_panels(1, title, size=(7.0, 4.2))
    axes.plot(rates, losses, ".", color="0.7", label="each step")
    axes.plot(rates, smoothed(losses), color="C3", label=f"mean of {WINDOW} steps")
    if suggested:
        axes.axvline(suggested, color="C0", linestyle="--", label=f"suggested: {suggested:.1e}")
    axes.set(xlabel="learning rate", ylabel="loss (normalised units)", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    save(figure, target)


def report(config: Config, rates: list[float], losses: list[float], complete: bool, batch: int) -> None:
    suggested, reason = suggestion(rates, losses, complete)
    target = config.dump_folder / "lr_range.png"
    title = f"{Path(config.job.config_file).stem}: {config.optimizer.name}, global batch {batch}"
    draw(rates, losses, suggested, title, target)
    print(table(rates, losses))
    if suggested:
        print(f"\nsuggested: --optimizer.lr {suggested / scaling(config, batch):.1e}  ({reason})")
    else:
        print(f"\nno rate is suggested: {reason}")
    print(f"written: {target}")


def run(config: Config, sweep: Sweep) -> None:
    """All ranks together. ConfigError, DataError."""
    config = for_a_sweep(config)
    selection = open_checked(config)
    device = start_ranks(config.comm.timeout_seconds)
    lock: list[IO[str]] = []
    try:
        from_first_rank(lambda: lock.append(lock_folder(config.dump_folder)))
        set_determinism(config.training.deterministic, config.training.tf32)
        trial = Trial(config, selection, device)
        losses = sweep_losses(trial, sweep)
        if dist.get_rank() == 0:
            rates = [sweep.rate(step) for step in range(1, len(losses) + 1)]
            report(config, rates, losses, len(losses) == sweep.steps, trial.global_batch.at(1))
    finally:
        lock.clear()
        dist.destroy_process_group()


def parse(argv: list[str]) -> tuple[Config, Sweep]:
    """Raises ConfigError."""
    own, rest = split_options(argv, OPTIONS)
    if rest and not rest[0].startswith("-"):
        rest = ["--job.config_file", *rest]
    config = start(rest, __doc__, check)
    if own.steps < FEWEST_STEPS:
        refuse("--steps", own.steps, f"at least {FEWEST_STEPS} expected")
    if not 0 < own.lowest < own.highest:
        refuse("--lowest", own.lowest, f"a rate above 0 and below --highest = {own.highest} expected")
    return config, Sweep(own.steps, own.lowest, own.highest)


def main(argv: list[str]) -> None:
    with one_line_errors():
        config, sweep = parse(argv)
        start_logging(is_first=os.environ.get("RANK", "0") == "0")
        run(config, sweep)


if __name__ == "__main__":
    end_when_interrupted()
    main(sys.argv[1:])
