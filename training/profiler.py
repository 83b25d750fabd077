"""Torch profiler traces of a run on a schedule, one file a rank and recording (docs/profiling.md)."""

import logging
import os
import warnings
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from config import Config

logger = logging.getLogger(__name__)
# Each recording is written and dropped, about which torch warns.
warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")
WARMUP_STEPS = 1  # starting the profiler is slow: its first step is discarded


class Profiler:
    """Records `profile_steps` steps out of every `profile_freq`; does nothing while disabled."""

    def __init__(self, config: Config) -> None:
        settings, self.folder = config.profiling, config.dump_folder / "traces"
        self.step_number, self.profile = 0, nullcontext()
        if not settings.enable_profiling:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        # Read at the first recording: otherwise kineto writes a line on stderr at each start and end.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        wait = settings.profile_freq - settings.profile_steps - WARMUP_STEPS
        self.profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
            schedule=schedule(wait=wait, warmup=WARMUP_STEPS, active=settings.profile_steps),
            on_trace_ready=self._write,
            record_shapes=True,
        )

    def __enter__(self) -> "Profiler":
        self.profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.profile.__exit__(*error)  # type: ignore[arg-type]

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
