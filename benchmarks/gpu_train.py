"""Part of benchmarks/gpu.sh: train.py as a user starts it, on the GPU and on the CPU.

    .venv/bin/python benchmarks/gpu_train.py train [--rehearse]

Thirty steps and a validation on real winds (simulated ones where neither ../shared/data nor .gpu/data holds
them), on the GPU through NCCL: undisturbed, killed and resumed, and in bf16; beside them on the CPU, whose
losses are what the GPU's are held against.
"""

import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.gpu_session import Session, start_part
from tests.started_jobs import ROOT, Job, losses, records

STEPS, SAVED, KILLED_FROM = 30, 10, 20
WINDS = "gfs_winds_2026/gfs_winds_20260324-20260419_5.625deg.nc"
OPTIONS = f"""
    --training.steps {STEPS} --training.deterministic true --lr_scheduler.warmup_steps 5
    --checkpoint.enable true --checkpoint.interval {SAVED} --validation.interval {KILLED_FROM}
    --metrics.log_freq 1 --metrics.enable_tensorboard false --profiling.enable_profiling false
    --model.name vit --model.dim 128 --model.attention_backend sdpa --optimizer.lr 1e-3
    --training.global_batch_size 8
""".split()
BF16 = ("--training.mixed_precision_param", "bfloat16")
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def configuration() -> tuple[Path, list[str]]:
    """The winds where they are: beside the project, or carried along in it."""
    for folder in (ROOT.parent / "shared" / "data", ROOT / ".gpu" / "data"):
        if (folder / WINDS).exists():
            data = ["--data.path", str(folder / WINDS)]
            static = ["--data.static_path", str(folder / "static" / "landsea.nc")]
            return ROOT / "train_configs" / "gfs_winds.toml", [*data, *static]
    print("  no real winds here: simulated weather", flush=True)
    return ROOT / "train_configs" / "demo.toml", ["--training.local_batch_size", "2"]


def train(session: Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config, data = configuration()
        started = time.perf_counter()

        def start(name: str, *options: str, **environment: str) -> Job:
            return Job(config, Path(folder, name), *data, *OPTIONS, *options, NGPU="1", **environment)

        reference = start("cpu", **ON_CPU)
        jobs = {"undisturbed": start("undisturbed"), "bf16": start("bf16", *BF16)}
        disturbed = start("killed")
        disturbed.wait_for_step(KILLED_FROM, session.left)
        disturbed.kill_all()
        killed_at = max(losses(disturbed.folder))
        jobs["killed"] = start("killed")
        for name, job in {"cpu": reference, **jobs}.items():
            ended = job.end(max(session.left, 1.0))
            if ended:
                print(job.output[-3000:])
            session.add(f"train.py, {name}: exit code", float(ended), "")
        session.add("seconds of four runs and a resume", time.perf_counter() - started, "s")
        session.add("step that the kill came after", float(killed_at), "")
        for name, job in jobs.items():
            session.attempt(f"losses, {name}", lambda name=name, job=job: compare(session, name, job, jobs))
            session.attempt(f"scores, {name}", lambda name=name, job=job: scored(session, name, job))
            about = f"largest difference from the CPU's losses, {name}"
            session.attempt(about, lambda a=about, job=job: session.add(a, apart(job, reference), "of them"))


def compare(session: Session, name: str, job: Job, jobs: dict[str, Job]) -> None:
    """Whether all steps are there, and of the resumed run whether it is the undisturbed one to the bit."""
    found = losses(job.folder)
    session.add(f"train.py, {name}: losses", float(sum(map(math.isfinite, found.values()))), "")
    if name == "killed":
        same = found == losses(jobs["undisturbed"].folder)
        session.add("killed and resumed: the undisturbed run's losses, to the bit", float(same), "")


def scored(session: Session, name: str, job: Job) -> None:
    """RMSE of the last validation over persistence's, a mean over variables, at the first lead."""
    last = next(record for record in reversed(records(job.folder)) if "val/loss" in record)
    ours = {key.split("/")[-1]: rmse for key, rmse in last.items() if key.startswith("val/rmse/")}
    theirs = {key.split("/")[-1]: rmse for key, rmse in last.items() if key.startswith("val/rmse_persist")}
    ratios = [ours[variable] / theirs[variable] for variable in ours if "@" not in variable]
    session.add(f"RMSE after {STEPS} steps, {name}", sum(ratios) / len(ratios), "of persistence's")


def apart(job: Job, reference: Job) -> float:
    ours, theirs = losses(job.folder), losses(reference.folder)
    return max(abs(ours[step] / theirs[step] - 1) for step in theirs)


if __name__ == "__main__":
    start_part(__doc__, {"train": train}, sys.argv[1:])
