"""The metrics of a run: metrics.jsonl, loggers (training/loggers/), and one dense line; and its traces.

Metrics are the machine's; scores are the weather's and come from verification/.
"""

import logging
import math
import os
import re
import resource
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from config import Config
from jobs.durable_files import Journal
from parallelisms.mesh import from_first_rank
from training.batches import Batches
from training.loggers.opening import Loggers, open_loggers
from training.step import Run, StepResult

logger = logging.getLogger(__name__)
# Dense bf16 peaks in TFLOP/s (V100: fp16) by words of a device name, from datasheets; the first match counts.
PEAK_TFLOPS = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H200 NVL": 835.0, "GB200": 2500.0, "B200": 2250.0}
PEAK_TFLOPS |= {"H100": 989.0, "H200": 989.0, "GH200": 989.0, "A100": 312.0, "V100": 125.0}
SCORE = "val/loss"  # a key of every validation record
COMPARED_AFTER = 20  # steps of a start, after which they are compared with the plan
TRACED_STEPS = 3  # show how steps differ, in files that Perfetto opens
WARMUP_STEPS = 1  # starting the profiler is slow: its first step is discarded
SECONDS_BETWEEN_LINES = 2.0  # steps can be faster than lines can be read; metrics.jsonl has every one


def peak_tflops(device: torch.device) -> float:
    """Return the peak of one device, 0 if it is not known: then there is no MFU."""
    if device.type != "cuda":
        return 0.0
    words = set(re.split(r"[ -]", torch.cuda.get_device_name(device)))  # "NVIDIA A100-SXM4-80GB"
    return next((peak for known, peak in PEAK_TFLOPS.items() if words.issuperset(known.split())), 0.0)


def memory_gib(device: torch.device) -> float:
    """Return the peak memory so far: of the CUDA allocator, or of the process without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux gives KiB


class Metrics:
    """Metrics of a run: scalars on the device, read and written by one rank on logging steps only."""

    def __init__(
        self, config: Config, run: Run, batches: Batches, planned: tuple[float, float] | None = None
    ) -> None:
        """Create before the first `restart`. planned: seconds of a step, bytes of a rank on a GPU or 0."""
        self.planned, self.comparison = planned, {}
        self.config, self.steps, self.run, self.batches = config, config.training.steps, run, batches
        self.is_first, self.resume_step = dist.get_rank() == 0, 0
        self.device = run.assembly.model.device
        # Passes count members of an ensemble; a rank has its share of the FLOPs.
        flops = config.training.members * run.assembly.meta_model.flops()
        self.tflop_per_pass = flops / dist.get_world_size() / 1e12
        self.peak_tflops = peak_tflops(self.device)
        self.journal = Journal(config.dump_folder / "metrics.jsonl")
        self.loggers: Loggers | None = None
        self.last_line = 0.0

    def restart(self, step: int) -> None:
        """Forget the records of steps after `step`, which will be repeated."""
        written = from_first_rank(lambda: self.journal.forget_after(step))
        if self.loggers:
            self.loggers.call("restart", step)
        else:
            self.loggers = open_loggers(self.config, step, written)
        self.resume_step = step
        self.start_interval()

    def start_interval(self) -> None:
        """Start the clock of the next logged step: validation and saves before it do not count."""
        self.interval_started, self.data_seconds = time.perf_counter(), 0.0
        self.num_steps = self.passes = 0

    def count_step(self) -> None:
        """Count a step that has been launched, with what this rank waited for data."""
        self.num_steps += 1
        self.passes += self.batches.global_batch * self.batches.passes
        self.data_seconds += self.batches.seconds

    def log_step(self, step: int, result: StepResult) -> None:
        """Wait for the device and write the means since the last logged step. Called by all ranks."""
        # -- the mean loss of all ranks; reading it waits for the device
        loss = result.loss.detach().float()
        dist.all_reduce(loss)
        loss /= self.run.assembly.model.mesh.degrees.dp
        loss, norm = torch.stack([loss, result.grad_norm.detach().float()]).tolist()
        # -- speed since the last logged step
        seconds = (time.perf_counter() - self.interval_started) / self.num_steps
        tflops = self.passes / self.num_steps / seconds * self.tflop_per_pass
        record = {
            "step": step,
            "loss": loss,
            "grad_norm": norm,
            "lr": self.run.learning_rate(step),
            "samples_per_second": self.batches.global_batch / seconds,
            "step_seconds": seconds,
            "data_seconds": self.data_seconds / self.num_steps,
            "memory_gib": memory_gib(self.device),
            "tflops": tflops,
            "mfu": tflops / self.peak_tflops if self.peak_tflops else None,
            "epoch": self.batches.epoch,
            "skipped_steps": self.run.state.bad_steps.skipped,  # since this start
        }
        self.write(record)
        # -- once, the measured time of a step, and memory on a GPU, next to those planned
        if self.planned and not self.comparison and step >= self.resume_step + COMPARED_AFTER:
            planned, size = self.planned
            self.comparison = {"step_seconds": seconds, "planned_step_seconds": planned}
            text = f"{seconds:.3f} s a step measured, {planned:.3f} planned ({seconds / planned:.2f} x)"
            if size:
                peak = memory_gib(self.device)
                self.comparison |= {"memory_gib": peak, "planned_memory_gib": size / 2**30}
                text += f"; {peak:.2f} GiB, {size / 2**30:.2f} planned"
            logger.info(text)
        # -- the line of rank 0
        now = time.monotonic()
        is_due = step == self.steps or now - self.last_line >= SECONDS_BETWEEN_LINES
        if self.is_first and is_due:
            self.last_line = now
            mfu = f"  mfu {record['mfu']:.1%}" if record["mfu"] is not None else ""
            wait = record["data_seconds"] / record["step_seconds"]
            left = timedelta(seconds=round((self.steps - step) * record["step_seconds"]))  # at this rate
            logger.info(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  epoch {record['epoch']:.2f}  {left} left"
                f"  loss {record['loss']:.5f}  grad_norm {record['grad_norm']:.3f}"
                f"  lr {record['lr']:.2e}  {record['samples_per_second']:.1f} samples/s"
                f"  {record['step_seconds']:.3f} s/step"
                f"  data wait {wait:.1%}  {record['memory_gib']:.2f} GiB  {record['tflops']:.3f} TFLOP/s{mfu}"
            )
        self.start_interval()

    def write(self, record: dict[str, Any]) -> None:
        """Write a record into metrics.jsonl, where not-a-number becomes null, and to the loggers."""
        if SCORE in record and record["step"] == self.resume_step:  # written by the start before, too
            from_first_rank(lambda: self.journal.forget_after(self.resume_step, SCORE))
        if self.is_first:
            missing = {k: None for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
            self.journal.write(record | missing)
        assert self.loggers  # since the first `restart`
        self.loggers.call("log", record)

    def close(self) -> None:
        if self.loggers:
            self.loggers.call("close")
        self.journal.close()


class Profiler:
    """Records TRACED_STEPS out of every `profile_freq` steps; does nothing while disabled."""

    def __init__(self, config: Config) -> None:
        settings, self.folder = config.profiling, config.dump_folder / "traces"
        self.step_number, self.profile = 0, nullcontext()
        if not settings.enable_profiling:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Each recording is written and dropped, about which torch warns.
        warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
        # Read at the first recording: otherwise kineto writes a line on stderr at each start and end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        wait = settings.profile_freq - TRACED_STEPS - WARMUP_STEPS
        self.profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
            schedule=schedule(wait=wait, warmup=WARMUP_STEPS, active=TRACED_STEPS),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def __enter__(self) -> "Profiler":
        self.profile.__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.profile.__exit__(kind, error, trace)

    def restart(self, step: int) -> None:
        """Name recordings by the steps of the run."""
        self.step_number = step

    def step(self, number: int) -> None:
        """Mark the end of step `number`."""
        self.step_number = number
        if isinstance(self.profile, profile):
            self.profile.step()

    def _write(self, recording: profile) -> None:
        """Write a recording; called by torch at its end."""
        path = self.folder / f"step-{self.step_number:08d}-rank{dist.get_rank()}.json.gz"
        try:
            recording.export_chrome_trace(str(path))
        except OSError as error:  # a full disk must not end a run
            path.unlink(missing_ok=True)
            logger.warning("%s: the trace is not written: %s", path, error)
