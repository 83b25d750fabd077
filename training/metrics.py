"""What the loop reports: metrics.jsonl, TensorBoard, one dense line, a progress bar. Metrics are the
machine's; scores are the weather's and come from verification/.
"""

import logging
import math
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from traces.profiler import part_times
from training.batches import Batches
from training.journal import Journal

logger = logging.getLogger(__name__)
# Dense bf16 peaks in TFLOP/s, vendors' datasheets. Longest name first: "H100 PCIe" before "H100".
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0, "V100": 125.0}
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
        tensorboard: bool,
        flops_per_sample: float,
        peak: float,
    ) -> None:
        self.is_first = dist.get_rank() == 0
        self.journal = Journal(folder / "metrics.jsonl")
        self.flops_per_sample, self.peak_tflops = flops_per_sample, peak
        self.tensorboard = self.bar = None
        if self.is_first:
            self.journal.forget_after(resume_step)
            if tensorboard:
                self.tensorboard = TensorBoard(folder / "tensorboard", resume_step)
            if sys.stderr.isatty():
                self.bar = tqdm(total=steps, initial=resume_step, unit="step", dynamic_ncols=True)
        self.last_line = 0.0
        self.start_interval()

    def start_interval(self) -> None:
        """The clock of the next logged step starts now: validation and saves before it do not count."""
        self.started, self.data_seconds, self.samples, self.num_steps = time.perf_counter(), 0.0, 0, 0
        self.data_bytes = 0
        part_times.read(1)

    def count(self, samples: int, batches: Batches) -> None:
        """One step has been launched: `samples` over all ranks, with what this rank waited for and got."""
        self.samples += samples
        self.data_seconds += batches.seconds
        self.data_bytes += batches.bytes
        self.num_steps += 1

    def log_step(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float, device: torch.device) -> None:
        """Waits for the device, then writes the means of the steps since the last logged one."""
        values = torch.stack([loss.detach().float(), grad_norm.detach().float()]).tolist()
        seconds = (time.perf_counter() - self.started) / self.num_steps
        rate = self.samples / self.num_steps / seconds
        tflops = rate * self.flops_per_sample / dist.get_world_size() / 1e12
        record = {
            "step": step,
            "loss": values[0],
            "grad_norm": values[1],
            "lr": lr,
            "samples_per_second": rate,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self.num_steps,
            "memory_gib": memory_gib(device),
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            # What the loader gave over what it was waited for: with loader processes, at least its bandwidth.
            "data_gb_per_second": self.data_bytes / self.data_seconds / 1e9 if self.data_seconds else None,
        }
        record |= {f"seconds/{name}": value for name, value in part_times.read(self.num_steps).items()}
        self.write(record)
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
        self._say(record)
        self.start_interval()

    def _say(self, record: dict[str, Any]) -> None:
        now = time.monotonic()
        if self.is_first and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            logger.info(dense_line(record))

    def write(self, record: dict[str, Any]) -> None:
        """One object into metrics.jsonl and its numbers into TensorBoard; not-a-number becomes null."""
        if not self.is_first:
            return
        self.journal.write({k: _finite(v) for k, v in record.items()})
        if self.tensorboard:
            self.tensorboard.write(record)

    def go_back(self, step: int) -> None:
        """The steps after `step` are going to be done again."""
        if self.is_first:
            self.journal.forget_after(step)
        self.start_interval()

    def close(self) -> None:
        for sink in (self.journal, self.tensorboard, self.bar):
            if sink is not None:
                sink.close()


class TensorBoard:
    """Scalars into a folder of their own. A disk that is full costs what it does not take, and no more."""

    def __init__(self, folder: Path, resume_step: int) -> None:
        self.folder, self.resume_step = folder, resume_step
        self.writer: Any = None

    def write(self, record: dict[str, Any]) -> None:
        try:
            self._open()
            for name, value in record.items():
                if name != "step" and value is not None:
                    group = "" if "/" in name else "train/"
                    self.writer.add_scalar(f"{group}{name}", value, record["step"])
        except OSError as error:
            logger.warning("step %d is missing from %s: %s", record["step"], self.folder, error)
            self.writer = None  # its thread has ended; the next step tries another file

    def _open(self) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and not always wanted

            self.writer = SummaryWriter(str(self.folder), purge_step=self.resume_step + 1)

    def close(self) -> None:
        try:
            if self.writer:
                self.writer.close()
        except OSError as error:
            logger.warning("%s: %s", self.folder, error)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dense_line(record: dict[str, Any]) -> str:
    mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
    wait = record["data_seconds"] / record["step_seconds"]
    return (
        f"step {record['step']:>7}  loss {record['loss']:.5f}  grad_norm {record['grad_norm']:.3f}"
        f"  lr {record['lr']:.2e}  {record['samples_per_second']:.1f} samples/s"
        f"  {record['step_seconds']:.3f} s/step"
        f"  data wait {wait:.1%}  {record['memory_gib']:.2f} GiB  {record['tflops']:.3f} TFLOP/s{mfu}"
    )
