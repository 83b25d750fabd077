"""The metrics of a run: metrics.jsonl, loggers (training/loggers/), one dense line, a progress bar.

Metrics are the machine's; scores are the weather's and come from verification/.
"""

import logging
import math
import resource
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from config import Metrics as Settings
from datasets.loader import data_wait_advice
from traces.exposed import exposed
from traces.profiler import part_times
from traces.slow_ranks import SlowRanks
from training.batches import Batches
from training.journal import Journal
from training.loggers.opening import open_loggers
from training.update import Update, UpdateInBackward

logger = logging.getLogger(__name__)
# Dense bf16 peaks in TFLOP/s, vendors' datasheets. Longest name first: "H100 PCIe" before "H100".
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "V100": 125.0}
WAIT_FRACTION = 0.05  # of a step's time, above which waiting for data is reported
WORTH_JUDGING = 0.5  # seconds between logged steps: the first ones wait for what is not there yet
SECONDS_BETWEEN_LINES = 2.0  # steps can be faster than lines can be read; metrics.jsonl has every one


def peak_tflops(device: torch.device) -> float:
    """Of one device, 0 where it is not known: then there is no MFU."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next(
        (peak for known, peak in PEAK_TFLOPS.items() if all(word in name for word in known.split())), 0.0
    )


def memory_gib(device: torch.device) -> float:
    """Peak so far: of the CUDA allocator, or of the process where there is no GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux gives KiB


class Metrics:
    """Collects device scalars without waiting for them; one rank writes them on logging steps."""

    def __init__(
        self,
        folder: Path,
        *,
        resume_step: int,
        steps: int,
        settings: Settings,
        flops_per_pass: float,
        peak: float,
        readers: int = 0,
    ) -> None:
        self.is_first = dist.get_rank() == 0
        self.steps, self.readers, self.began, self.first_step = steps, readers, time.monotonic(), resume_step
        self.journal = Journal(folder / "metrics.jsonl")
        self.flops_per_pass, self.peak_tflops = flops_per_pass, peak
        self.bar = None
        written = self.journal.forget_after(resume_step) if self.is_first else 0
        self.loggers = open_loggers(settings, folder, resume_step, written, steps, self.is_first)
        if self.is_first and sys.stderr.isatty():
            self.bar = tqdm(total=steps, initial=resume_step, unit="step", dynamic_ncols=True)
        self.last_line, self.epoch, self.has_advised = 0.0, 0.0, False
        self.slow_ranks = SlowRanks()
        self.start_interval()

    def start_interval(self) -> None:
        """The clock of the next logged step starts now: validation and saves before it do not count."""
        self.started, self.data_seconds, self.samples, self.num_steps = time.perf_counter(), 0.0, 0, 0
        self.data_bytes = self.passes = 0
        part_times.read(1)

    def count(self, samples: int, batches: Batches) -> None:
        """One step has been launched: `samples` over all ranks, with what this rank waited for and got."""
        self.samples += samples
        self.passes += samples * batches.passes
        self.data_seconds += batches.seconds
        self.data_bytes += batches.bytes
        self.num_steps += 1
        self.epoch, self.by_threads = batches.epoch, batches.loader.dataset.by_threads

    def log_step(
        self,
        step: int,
        loss: Tensor,
        grad_norm: Tensor,
        update: Update | UpdateInBackward,
        device: torch.device,
    ) -> None:
        """Waits for the device, then writes the means of the steps since the last logged one. All ranks."""
        values = torch.stack([loss.detach().float(), grad_norm.detach().float()]).tolist()
        seconds = (time.perf_counter() - self.started) / self.num_steps
        rate = self.samples / self.num_steps / seconds
        passes = self.passes / self.num_steps / seconds
        tflops = passes * self.flops_per_pass / dist.get_world_size() / 1e12
        record = {
            "step": step,
            "loss": values[0],
            "grad_norm": values[1],
            "lr": update.lr,
            "samples_per_second": rate,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self.num_steps,
            "memory_gib": memory_gib(device),
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            # What the loader gave over what it was waited for: with loader processes, at least its bandwidth.
            "data_gb_per_second": self.data_bytes / self.data_seconds / 1e9 if self.data_seconds else None,
            "epoch": self.epoch,
            "critical_batch_size": update.noise.critical_batch() if update.noise else None,
            "skipped_steps": update.run.bad_steps.skipped,  # since this start
        }
        self.slow_ranks.look(self.num_steps, seconds, record["data_seconds"])
        self._advise(seconds * self.num_steps)
        record |= exposed.take()
        record |= {f"seconds/{name}": value for name, value in part_times.read(self.num_steps).items()}
        self.write(record)
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
        self._say(record)
        self.start_interval()

    def _advise(self, seconds: float) -> None:
        """Log once which setting helps a loop that waits for data."""
        fraction = self.data_seconds / seconds
        if self.is_first and fraction > WAIT_FRACTION and seconds > WORTH_JUDGING and not self.has_advised:
            self.has_advised = True
            logger.warning(data_wait_advice(fraction, self.by_threads, self.readers))

    def _say(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.is_first and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            done = max(record["step"] - self.first_step, 1)
            left = (now - self.began) / done * (self.steps - record["step"])
            logger.info(dense_line(record, self.steps, left))

    def write(self, record: dict[str, Any]) -> None:
        """Write a record into metrics.jsonl, where not-a-number becomes null, and to the loggers."""
        if self.is_first:
            self.journal.write({k: _finite(v) for k, v in record.items()})
        self.loggers.call("log", record)

    def log_images(self, step: int, pictures: Mapping[str, Path], scorecard: str) -> None:
        """Log the pictures of a validation by name, and its table. Called on the first rank."""
        self.loggers.call("log_images", step, pictures, scorecard)

    def rollback(self, step: int) -> None:
        """Forget the steps after `step`, which are done again."""
        if self.is_first:
            self.journal.forget_after(step)
        self.loggers.call("rollback", step)
        self.start_interval()

    def close(self) -> None:
        self.loggers.call("close")
        self.journal.close()
        if self.bar is not None:
            self.bar.close()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dense_line(record: dict[str, Any], steps: int, seconds_left: float) -> str:
    mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
    wait = record["data_seconds"] / record["step_seconds"]
    critical = record["critical_batch_size"]
    batch = "" if critical is None else f"  critical batch {critical:.1f}"
    return (
        f"step {record['step']:>{len(str(steps))}}/{steps}  epoch {record['epoch']:.2f}"
        f"  {timedelta(seconds=round(seconds_left))} left"
        f"  loss {record['loss']:.5f}  grad_norm {record['grad_norm']:.3f}"
        f"  lr {record['lr']:.2e}  {record['samples_per_second']:.1f} samples/s"
        f"  {record['step_seconds']:.3f} s/step"
        f"  data wait {wait:.1%}  {record['memory_gib']:.2f} GiB  {record['tflops']:.3f} TFLOP/s{mfu}{batch}"
    )


def output_summary(folder: Path) -> str:
    """Return the last lines of a run: folders and files that it has written."""
    found = [f"the run's folder: {folder}"]
    plots = sorted(path.name for path in (folder / "plots").glob("*.png"))
    found += [f"plots:            {folder / 'plots'}: {', '.join(plots)}"] if plots else []
    if (folder / "tensorboard").exists():
        found.append(f"TensorBoard:      tensorboard --logdir {folder / 'tensorboard'}")
    if (folder / "traces").exists():
        found.append(f"traces:           python -m traces.inspect_trace {folder}")
    return "\n".join(found)
