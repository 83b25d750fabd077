"""Runs the parts of benchmarks/gpu.sh one after the other, each in a process and a time of its own, then
prints one table.

    benchmarks/gpu.sh [--rehearse] [--only steps,planner] [--minutes 8.8]

A part that fails or takes too long leaves one line and the rows it has; the others go on. Rows go to
results/gpu.jsonl (not those of a rehearsal). Ends with 1 when a part failed, or attention on Hopper was not a
kernel of Hopper's own, and with 2 without a GPU.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu_session import read_rows
from benchmarks.gpu_table import describe, table
from benchmarks.results_file import record

ROOT = Path(__file__).parent.parent
SLOW_CPU = 4  # times as long may a part take in a rehearsal, on a machine that does other things too
KILL_AFTER = 10  # seconds beyond its time that a part has to end by itself


@dataclass(frozen=True)
class Part:
    """A command and the seconds it may take."""

    name: str
    script: str
    seconds: float
    part: str = ""  # of the script, where it is not the name
    spare: bool = False  # takes what time the others have left, if any

    def command(self, rows: Path, seconds: float, rehearse: bool) -> list[str]:
        if self.script == "pytest":
            return [sys.executable, "-m", "pytest", "tests/test_gpu.py", "-k", "not rehearsal"]
        options = ["--rows", str(rows), "--seconds", f"{seconds:.0f}", *(["--rehearse"] if rehearse else [])]
        return [sys.executable, f"benchmarks/{self.script}", self.part or self.name, *options]


# In the order of what answers most; 520 s in all.
PARTS = (
    Part("tests", "pytest", 45),
    Part("attention", "gpu_kernels.py", 30),
    Part("steps", "gpu_step.py", 165),
    Part("first step cold", "gpu_step.py", 45, "first"),
    Part("first step warm", "gpu_step.py", 30, "first"),
    Part("rollout", "gpu_step.py", 25),
    Part("planner", "gpu_step.py", 35),
    Part("alone", "gpu_kernels.py", 60, "products,activations,optimizers"),
    Part("save", "gpu_data.py", 25),
    Part("loader", "gpu_data.py", 25),
    Part("peers", "gpu_peers.py", 35),
    Part("more steps", "gpu_step.py", 600, "steps", spare=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU, in two minutes")
    parser.add_argument("--only", default="", help="names of parts, with commas between them")
    parser.add_argument("--minutes", type=float, default=8.8, help="that all parts together may take")
    options = parser.parse_args()
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no GPU here; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    names = [part.name for part in PARTS]
    wanted = options.only.split(",") if options.only else names
    if unknown := set(wanted) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(names)}")
    chosen = [part for part in PARTS if part.name in wanted]
    end = time.perf_counter() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.jsonl")
        failed = [part.name for part in chosen if not run(part, rows, end, options.rehearse)]
        found = read_rows(rows)
    if not options.rehearse:
        record("gpu", found)
    print(f"\n{describe(found)}\n\n{table(found)}")
    foreign = [row for row in found if row["what"].startswith("a step's attention") and not row["value"]]
    for name in failed:
        print(f"part {name}: failed")
    for row in foreign:
        print(f"attention ran on {row['attention']}: none of Hopper's kernels")
    return 1 if failed or foreign else 0


def run(part: Part, rows: Path, end: float, rehearse: bool) -> bool:
    """Whether the part ended well, in its time; caches of compilations are this run's own, empty at first."""
    seconds = min(part.seconds, end - time.perf_counter() - KILL_AFTER)
    print(f"== {part.name}", flush=True)
    if seconds <= 5:
        print("  no time left")
        return part.spare
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    if not part.name.startswith("first"):  # which shall find nothing but what it leaves itself
        caches = {name: f"{folder}-others" for name, folder in caches.items()}
    environment = os.environ | {name: str(rows.parent / folder) for name, folder in caches.items()}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if rehearse else {}
    seconds *= SLOW_CPU if rehearse else 1
    started = time.perf_counter()
    command = part.command(rows, seconds, rehearse)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds + KILL_AFTER)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and its loader's or compiler's workers
        process.wait()
        print(f"  stopped: {part.name} took more than {seconds:.0f} s", flush=True)
        return False
    print(f"  {time.perf_counter() - started:.0f} s{'' if code == 0 else f', exit code {code}'}", flush=True)
    return code == 0


if __name__ == "__main__":
    sys.exit(main())
