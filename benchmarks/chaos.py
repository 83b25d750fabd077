"""Kills training jobs at random moments, starts them again, and compares the end with an undisturbed run.

    .venv/bin/python benchmarks/chaos.py --trials 100 [--seed 0]

Every trial is one SIGKILL of the launcher and all its ranks: at any time, or aimed at a save (while it is
copied, written, renamed, while an old one is deleted) or at loading. Runs alternate: one keeps its layout
between restarts, and has to end with the same bits; the next takes a random layout of 1 to 4 ranks each time,
and has to end within 1e-5. A trial is right when the newest checkpoint can be trusted and is at most the
interval and the save in flight behind. Beside every other kill something else goes wrong: a disk that is full
for a while, a second start in the same folder, a truncated file, a link and a stranger among the checkpoints.
Needs no GPU; no disk is filled without the right to mount a small one. Ends with 1 when anything is wrong.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.results_file import record
from checkpoints.files import (
    DELETING,
    INCOMPLETE,
    MANIFEST,
    check_files,
    complete_steps,
    step_folder,
)
from tests.started_jobs import Job, last_step, losses, write_config

STEPS, INTERVAL = 80, 4
AIMS = ("any time", "copying", "writing", "renaming", "deleting", "loading")
TROUBLES = ("full disk", "second start", "truncated file", "link and stranger")
BEGUN = " M parameters, "  # in the log of a run that has its folder to itself
DISK_BYTES = 2**29  # of a run's own disk: some checkpoints of it
TOLERANCE = 1e-5
LAYOUTS: dict[str, tuple[int, str]] = {
    "1 rank": (1, ""),
    "fsdp 2": (2, ""),
    "tp 2": (2, "--parallelism.tensor_parallel_degree 2"),
    "pp 2": (2, "--parallelism.pipeline_parallel_degree 2"),
    "zero-1 2": (2, "--parallelism.data_parallel zero1 --parallelism.data_parallel_replicate_degree 2"),
    "ulysses 2": (2, "--parallelism.context_parallel_degree 2"),
    "fsdp 4": (4, ""),
    "fsdp 2 x tp 2": (4, "--parallelism.tensor_parallel_degree 2"),
}
FIXED = ("1 rank", "fsdp 2")
OPTIONS = (
    f"--training.steps {STEPS} --checkpoint.interval {INTERVAL} --checkpoint.keep_latest_k 2 --model.dim 256 "
    "--model.num_layers 4 --training.local_batch_size 2 --training.global_batch_size 8 --optimizer.eps 1e-4 "
    "--optimizer.lr 1e-4"
).split()


@dataclass
class Tally:
    """What the trials have shown."""

    killed_while: Counter[str] = field(default_factory=Counter)
    troubles: Counter[str] = field(default_factory=Counter)
    lost: list[int] = field(default_factory=list)
    harmed: list[bool] = field(
        default_factory=list
    )  # what a full disk or a truncated file cost is among these
    runs: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    excused: tuple[Path, int] | None = None  # a run whose newest checkpoint may lie further back
    truncated: set[Path] = field(default_factory=set)  # checkpoints that a trial has cut a file of


def start(config: Path, folder: Path, layout: str) -> Job:
    ranks, options = LAYOUTS[layout]
    return Job(config, folder, *OPTIONS, *options.split(), NGPU=str(ranks))


def state_of(checkpoints: Path, aim: str) -> bool:
    """Whether the folder shows the moment that a kill is aimed at."""
    names = [path.name for path in checkpoints.iterdir()] if checkpoints.exists() else []
    if aim == "deleting":
        return any(name.endswith(DELETING) for name in names)
    unfinished = [name for name in names if name.endswith(INCOMPLETE)]
    if aim == "renaming":
        return any((checkpoints / name / MANIFEST).exists() for name in unfinished)
    return bool(unfinished)


def wait_for(aim: str, job: Job, rng: random.Random, start_seconds: float) -> None:
    """Until the moment to kill, or until the job has ended by itself."""
    if aim == "loading":
        end = time.monotonic() + rng.uniform(0.5, 1.1) * start_seconds
        while time.monotonic() < end and job.process.poll() is None:
            time.sleep(0.01)
        return
    began = last_step(job.folder)
    while job.process.poll() is None and (
        last_step(job.folder) == began or job.folder.joinpath("metrics.jsonl").stat().st_mtime < job.started
    ):
        time.sleep(0.01)
    time.sleep(rng.uniform(0.0, 1.0))
    if aim == "copying":
        while job.process.poll() is None and last_step(job.folder) % INTERVAL:
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, 0.03))
    elif aim != "any time":
        while job.process.poll() is None and not state_of(job.folder / "checkpoints", aim):
            time.sleep(0.0005)
        time.sleep(rng.uniform(0.0, 0.02) if aim == "writing" else 0.0)


@contextmanager
def own_disk(folder: Path) -> Iterator[bool]:
    """A run's folder as a small disk in memory; False where this process may not mount one."""
    folder.mkdir(parents=True)
    size = f"size={DISK_BYTES}"
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], capture_output=True)
    mounted = mount.returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", folder], check=True)


def fill_disk(job: Job, rng: random.Random) -> None:
    """Not a byte is left for some seconds, in which checkpoints and metrics are written."""
    ballast = job.folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(2**16)):
            pass
    time.sleep(rng.uniform(0.5, 4.0))
    ballast.unlink()


def start_again(job: Job, config: Path, tally: Tally) -> None:
    """Another start in the folder of a run: refused, and the run goes on, which is held till then: it could
    be at its end before.
    """
    job.signal_all(signal.SIGSTOP)
    second = start(config, job.folder, "1 rank")
    code = second.end(120)
    job.signal_all(signal.SIGCONT)
    if code != 2 or "another run writes there" not in second.output:
        tally.problems.append(f"a second start ended with {code}: {second.output[-300:]}")
    second.log.unlink()


def truncate_something(folder: Path, tally: Tally, rng: random.Random) -> None:
    """A file of the newest of several checkpoints, or one of the run's own."""
    steps = complete_steps(folder / "checkpoints")
    newest = list(step_folder(folder / "checkpoints", steps[-1]).iterdir()) if len(steps) > 1 else []
    files = [path for path in (folder / "statistics.npz", folder / "metrics.jsonl") if path.exists()]
    if not newest + files or list((folder / "checkpoints").glob("*.damaged")):
        return  # one damaged checkpoint a run: the second could be the last
    path = rng.choice(newest or files)
    tally.truncated.add(path.parent)
    size = path.stat().st_size
    os.truncate(path, rng.choice([0, size // 2, max(size - 1, 0)]))


def add_strangers(folder: Path) -> None:
    checkpoints = folder / "checkpoints"
    if not checkpoints.is_dir() or (checkpoints / "step-00009999").is_symlink():
        return
    (checkpoints / "step-00009999").symlink_to(folder)
    (checkpoints / "step-00000001.incomplete").write_text("a file where a folder is expected")
    (checkpoints / "notes.txt").write_text("a stranger")


def hit(job: Job, before: float) -> str:
    """What the kill interrupted, from what it left behind."""
    checkpoints, step = job.folder / "checkpoints", last_step(job.folder)
    for what in ("renaming", "deleting", "writing"):
        if state_of(checkpoints, what):
            return what
    metrics = job.folder / "metrics.jsonl"
    if not metrics.exists() or metrics.stat().st_mtime < before:
        return "loading or starting"
    done = complete_steps(checkpoints)
    return "copying" if step % INTERVAL == 0 and step not in done else "between saves"


def check_trial(folder: Path, tally: Tally, trial: int, full: bool = False) -> None:
    """After a kill: the newest checkpoint is whole and, unless the disk was full, not too far behind.

    One that was truncated may still be there, if nobody came as far as to read it.
    """
    step, every = last_step(folder), complete_steps(folder / "checkpoints")
    steps = [done for done in every if step_folder(folder / "checkpoints", done) not in tally.truncated]
    newest = steps[-1] if steps else 0
    # What a full disk or a truncated file has cost stays lost until the next save.
    full = full or steps != every or tally.excused == (folder, newest)
    tally.excused = (folder, newest) if full else tally.excused
    lost = step - newest
    tally.lost.append(max(lost, 0))
    tally.harmed.append(full)
    if lost > 2 * INTERVAL and not full:
        tally.problems.append(f"trial {trial}: {lost} steps lost")
    for done in steps:
        path = step_folder(folder / "checkpoints", done)
        try:
            check_files(path)
        except ValueError as error:
            tally.problems.append(f"trial {trial}: {error}")


def final_tensors(folder: Path, scratch: Path) -> dict[str, Tensor]:
    """Weights and moments after the last step, read by torch's own tool."""
    dcp_to_torch_save(str(step_folder(folder / "checkpoints", STEPS)), scratch / "whole.pt")
    whole = torch.load(scratch / "whole.pt", weights_only=True)
    return {name: tensor for name, tensor in whole.items() if name.startswith(("model.", "optimizer."))}


def compare(
    folder: Path, reference: tuple[dict[str, Tensor], dict[int, float]], scratch: Path
) -> tuple[bool, float]:
    """Whether all bits and losses are the same; the largest relative difference of a weight's norm."""
    tensors, (expected, expected_losses) = final_tensors(folder, scratch), reference
    same = tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], expected[name]) for name in expected
    )
    weights = [name for name in expected if name.startswith("model.")]
    errors = [
        ((tensors[name] - expected[name]).norm() / expected[name].norm().clamp(min=1e-3)).item()
        for name in weights
    ]
    return same and losses(folder) == expected_losses, max(errors)


def undisturbed(config: Path, folder: Path, layout: str) -> tuple[dict[str, Tensor], dict[int, float]]:
    job = start(config, folder, layout)
    assert job.end(600) == 0, job.output
    return final_tensors(folder, folder), losses(folder)


def one_run(
    config: Path,
    folder: Path,
    fixed: str,
    tally: Tally,
    trials: int,
    rng: random.Random,
    full_disks: bool = False,
) -> tuple[int, list[str]]:
    """Kills a run again and again until it has ended, or `trials` are used up; then lets it end."""
    layouts, killed, start_seconds = [], 0, 8.0
    while True:
        layouts.append(fixed or rng.choice(list(LAYOUTS)))
        job = start(config, folder, layouts[-1])
        if killed < trials:
            wait_for(rng.choice(AIMS), job, rng, start_seconds)
        elif job.end(900) != 0:
            tally.problems.append(f"ended with {job.process.returncode}: {job.output[-500:]}")
            return killed, layouts
        if job.process.poll() is not None:
            if job.process.returncode != 0:
                tally.problems.append(f"ended with {job.process.returncode}: {job.output[-500:]}")
            return killed, layouts
        trouble = rng.choice(TROUBLES) if rng.random() < 0.5 else ""
        if trouble == "full disk" and full_disks:
            fill_disk(job, rng)
        if trouble == "second start" and BEGUN not in job.output:
            trouble = ""  # of two starts at once either may be the first
        if trouble == "second start":
            start_again(job, config, tally)
        if job.process.poll() is not None and job.process.returncode != 0:
            tally.problems.append(f"{trouble}: ended with {job.process.returncode}: {job.output[-500:]}")
            return killed, layouts
        job.kill_all()
        killed += 1
        tally.troubles[trouble or "none"] += 1
        tally.killed_while[hit(job, job.started)] += 1
        check_trial(folder, tally, len(tally.lost), trouble == "full disk")
        print(f"trial {len(tally.lost)}: {layouts[-1]}, step {last_step(folder)} {trouble}", flush=True)
        if trouble == "truncated file":
            truncate_something(folder, tally, rng)
        if trouble == "link and stranger":
            add_strangers(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, tally, began = random.Random(options.seed), Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as text:
        scratch = Path(text)
        config = write_config(scratch)
        references = {name: undisturbed(config, scratch / name.replace(" ", "-"), name) for name in FIXED}
        left, number = options.trials, 0
        while left > 0 and not tally.problems:
            fixed = FIXED[number // 2 % 2] if number % 2 == 0 else ""
            folder = scratch / f"run-{number}"
            with own_disk(folder) as mounted:
                killed, layouts = one_run(config, folder, fixed, tally, left, rng, mounted)
                left, number = left - killed, number + 1
                if tally.problems:
                    break
                same, error = compare(folder, references[fixed or FIXED[0]], scratch)
            if (fixed and not same) or error > TOLERANCE:
                tally.problems.append(f"run {number}: same bits {same}, difference {error:.1e}")
            tally.runs.append({"layout": fixed or "changing", "kills": killed, "same": same, "error": error})
            print(f"run {number}, {fixed or layouts}: same bits {same}, difference {error:.1e}", flush=True)
    return report(tally, time.monotonic() - began)


def report(tally: Tally, seconds: float) -> int:
    trials, saves = len(tally.lost), ("copying", "writing", "renaming", "deleting")
    of_saves = sum(tally.killed_while[what] for what in saves)
    fixed = [run for run in tally.runs if run["layout"] != "changing"]
    changing = [run["error"] for run in tally.runs if run["layout"] == "changing"]
    row = {
        "trials": trials,
        "killed_while": tally.killed_while,
        "troubles": tally.troubles,
        "lost": tally.lost,
        "harmed": tally.harmed,
        "runs": tally.runs,
        "problems": tally.problems,
        "seconds": seconds,
    }
    record("chaos", [row])
    print(f"\n{'trials':44}{trials:>8}")
    print(f"{'kills that hit a save':44}{of_saves:>8}")
    for what, count in sorted(tally.killed_while.items()):
        print(f"  {'while ' + what:42}{count:>8}")
    for what, count in sorted(tally.troubles.items()):
        print(f"  {'beside them: ' + what:42}{count:>8}")
    bound = f"(never more than {INTERVAL} + {INTERVAL})"
    unharmed = [lost for lost, harmed in zip(tally.lost, tally.harmed, strict=True) if not harmed]
    print(f"{'steps lost, most ' + bound:44}{max(unharmed, default=0):>8}")
    print(f"{'  where a disk was full or a file cut short':44}{max(tally.lost, default=0):>8}")
    print(f"{'steps lost, mean':44}{sum(tally.lost) / max(trials, 1):>8.1f}")
    same = f"{sum(run['same'] for run in fixed)} of {len(fixed)}"
    print(f"{'runs on one layout that end in the same bits':44}{same:>8}")
    worst = f"{max(changing, default=0.0):.1e}"
    print(f"{f'worst weights of {len(changing)} runs on changing layouts':44}{worst:>8}")
    print(f"{'seconds':44}{seconds:>8.0f}")
    for problem in tally.problems:
        print(f"WRONG: {problem}")
    return int(bool(tally.problems))


if __name__ == "__main__":
    sys.exit(main())
