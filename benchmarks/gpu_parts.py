"""Runs the parts of benchmarks/gpu.sh one after the other and prints one table.

    benchmarks/gpu.sh [--rehearse] [--only steps,planner] [--minutes 8]

All timings share a process, so that torch and CUDA start once; what would disturb them has one of its own. A
part that fails or takes too long leaves one line and the rows it has; the others go on. Every row is written
when it is measured: to $OUT/gpu.jsonl where OUT is set, else to results/gpu.jsonl (of a rehearsal:
outputs/gpu/gpu.jsonl); calibrated rates likewise to $OUT/calibration.json or outputs/calibration.json. Ends
with 1 when a part failed, and with 2 without a GPU.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.gpu_session import Rows, Session
from benchmarks.gpu_table import describe, table
from benchmarks.results_file import RESULTS

ROOT = Path(__file__).parent.parent
SLOW_CPU = 4  # times as long may a part take in a rehearsal, on a machine that does other things too
KILL_AFTER = 10  # seconds beyond its time that a part has to end by itself
SHARED = "gpu_timings.py"  # parts of this script run in the process that all timings share


@dataclass(frozen=True)
class Part:
    """What runs, and the seconds it may take."""

    name: str
    script: str
    seconds: float
    spare: bool = False  # takes what time the others have left, if any

    def command(self, rows: Rows, seconds: float, rehearse: bool) -> list[str]:
        if self.script == "pytest":
            compiles = "compiled or graphs"
            which = compiles if self.name == "compiled" else f"not rehearsal and not ({compiles})"
            return [sys.executable, "-m", "pytest", "-vv", "tests/test_gpu.py", "-k", which]
        options = ["--rows", str(rows.path), "--run", rows.run, "--seconds", f"{seconds:.0f}"]
        script, part = self.script, self.name.split()[0]
        return [sys.executable, f"benchmarks/{script}", part, *options, *["--rehearse"] * rehearse]


# In the order of what is worth most; 480 s with what is spare.
PARTS = (
    Part("train", "gpu_train.py", 75),
    Part("steps", SHARED, 130),
    Part("attention", SHARED, 25),
    Part("tests", "pytest", 40),
    Part("ranks", "gpu_ranks.py", 50),
    Part("save", SHARED, 20),
    Part("loader", SHARED, 20),
    Part("peers", SHARED, 25),
    Part("rollout", SHARED, 20),
    Part("planner", SHARED, 25),
    Part("products", SHARED, 10),
    Part("optimizers", SHARED, 10),
    Part("activations", SHARED, 10),
    Part("first cold", "gpu_step.py", 40),
    Part("first warm", "gpu_step.py", 25),
    Part("compiled", "pytest", 40),
    Part("more steps", SHARED, 600, spare=True),
)


def main() -> int:
    options = read_options()
    if not options.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu.sh: no GPU here; --rehearse runs it on the CPU", file=sys.stderr)
        return 2
    end = time.perf_counter() + 60 * options.minutes
    path = folder_of_rows(options.rehearse) / "gpu.jsonl"
    rows = Rows(path, time.strftime("%Y-%m-%dT%H:%M:%S"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # past the `finally` below
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(rows, Path(folder), end, options.rehearse)
        try:
            failed = [part.name for part in PARTS if part.name in options.only and not runner.run(part)]
        finally:
            runner.close()
    found = rows.read()
    print(f"\nrows: {path}\n{describe(found)}\n\n{table(found)}")
    for name in failed:
        print(f"part {name}: failed")
    for row in found:
        if row["what"].startswith("a step's attention") and not row["value"]:
            print(f"warning: attention ran on {row['attention']}: none of Hopper's kernels was the fastest")
    return 1 if failed else 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU, in four minutes")
    parser.add_argument("--only", default=names, type=lambda text: text.split(","), help="names of parts")
    parser.add_argument("--minutes", type=float, default=8.0, help="that all parts together may take")
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(names)}")
    if options.rehearse:
        options.minutes *= SLOW_CPU
    return options


def folder_of_rows(rehearse: bool) -> Path:
    """Where the caller says; figures of a rehearsal mean nothing and are not kept among the results."""
    return Path(os.environ.get("OUT") or (ROOT / "outputs" / "gpu" if rehearse else RESULTS))


class Runner:
    """Runs parts, each in its time."""

    def __init__(self, rows: Rows, folder: Path, end: float, rehearse: bool) -> None:
        self.rows, self.folder, self.end, self.rehearse = rows, folder, end, rehearse
        self.shared: SpawnProcess | None = None
        self.connection: Any = None
        self.alone: subprocess.Popen | None = None
        if rehearse:
            os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(self, part: Part) -> bool:
        """Whether it ended well, in its time."""
        seconds = min(part.seconds * (SLOW_CPU if self.rehearse else 1), self._left())
        print(f"== {part.name}", flush=True)
        if seconds <= 5:
            print("  no time left")
            return part.spare
        self._point_caches(part)
        started = time.perf_counter()
        good = (self._together if part.script == SHARED else self._by_itself)(part, seconds)
        print(f"  {time.perf_counter() - started:.0f} s{'' if good else ', not well'}", flush=True)
        return good

    def _left(self) -> float:
        return self.end - time.perf_counter() - KILL_AFTER

    def _point_caches(self, part: Part) -> None:
        """Compilations are kept for this run only; a first step finds nothing but what the last one left."""
        kept = "first" if part.name.startswith("first") else "others"
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[name] = str(self.folder / f"{kept}-{name.split('_')[0].lower()}")

    def _by_itself(self, part: Part, seconds: float) -> bool:
        command = part.command(self.rows, seconds, self.rehearse)
        self.alone = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            return self.alone.wait(seconds + KILL_AFTER) == 0
        except subprocess.TimeoutExpired:
            print(f"  stopped: {part.name} took more than {seconds:.0f} s", flush=True)
            return False
        finally:
            end_session(self.alone.pid)  # its loader's or compiler's workers, too
            self.alone.wait()

    def _together(self, part: Part, seconds: float) -> bool:
        """In the process that is there, or in a new one where the last part ended it."""
        if not self.shared or not self.shared.is_alive():
            self.connection, theirs = get_context("spawn").Pipe()
            self.shared = SpawnProcess(target=serve, args=(theirs, self.rows, self.rehearse))
            self.shared.start()
            theirs.close()
        self.connection.send((part.name, seconds))
        try:
            if not self.connection.poll(seconds + KILL_AFTER):
                print(f"  stopped: {part.name} took more than {seconds:.0f} s", flush=True)
            elif self.connection.recv():
                return True
        except (EOFError, ConnectionError):
            print("  the process of all timings ended", flush=True)
        self._end_shared()
        return False

    def _end_shared(self) -> None:
        if self.shared and self.shared.pid:
            end_session(self.shared.pid)
            self.shared.join()

    def close(self) -> None:
        self._end_shared()
        if self.alone:
            end_session(self.alone.pid)


def end_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass


def serve(connection: Any, rows: Rows, rehearse: bool) -> None:
    """The process of all timings: runs the parts that it is told to, until nobody tells it any more."""
    os.setsid()  # so that it can be ended together with the processes it starts
    from benchmarks.gpu_timings import PARTS_BY_NAME

    while True:
        try:
            name, seconds = connection.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        session = Session(name.split()[-1], rows, seconds, rehearse)
        try:
            PARTS_BY_NAME[session.part](session)
            good = True
        except Exception:
            traceback.print_exc()
            good = False
        connection.send(good)  # one that is not good ends this process: it may have left the GPU in any state


if __name__ == "__main__":
    sys.exit(main())
