"""Checkpoints of one run: save with torch.distributed.checkpoint (DCP), find, check and load.

A save copies this rank's tensors into host memory that later saves reuse, and writes them in the background
(checkpoints/writer.py). At most one is in flight: the next save waits for it.
"""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.tensor import DTensor

from checkpoints.files import (
    DAMAGED,
    INCOMPLETE,
    MANIFEST,
    Damaged,
    Missing,
    Unreadable,
    candidates,
    check_files,
    clear_leftovers,
    complete_steps,
    is_checkpoint,
    lock,
    prune,
    read_manifest,
    read_tensors,
    remove_after,
    set_aside,
    step_folder,
)
from checkpoints.writer import CheckpointProcess, CheckpointWriter
from config import Checkpoint
from errors import DataError, refuse
from jobs.durable_files import sync_folder
from parallelisms.mesh import cpu_group, from_first_rank, on_all_ranks

logger = logging.getLogger(__name__)
RETRY_SECONDS = (1, 2, 4, 8, 16)  # before each further attempt at the last save
READ_SECONDS = (1, 4, 15)  # before each further attempt to read what the disk or the network does not give
SHARED_MEMORY = "/dev/shm"  # the checkpoint process reads the tensors from there


class Checkpointer:
    """Saves and loads the checkpoints of one run. Made, and each method called, by all ranks together.

    async_mode: "disabled" writes before `save` returns; "async" copies before it returns and writes in a
    thread; "async_with_pinned_mem" copies until `wait_for_staging` and writes in a process.
    about: entries of every manifest, among them what the weights mean (checkpoints/identity.py).
    """

    def __init__(self, folder: Path, settings: Checkpoint, config_toml: str, about: dict[str, Any]) -> None:
        self.folder, self.mode, self.keep = folder.absolute(), settings.async_mode, settings.keep_latest_k
        self.config_toml = config_toml
        self.about = {**about, "ranks": dist.get_world_size(), "versions": {"torch": torch.__version__}}
        self.group = cpu_group()  # its own, so that a saving thread does not mix with training's collectives
        self.process = CheckpointProcess() if self.mode == "async_with_pinned_mem" else None
        self.stager: DefaultStager | None = None
        self.in_flight: tuple[int, Future] | None = None
        self.staging: Future | None = None
        self.saved_step, self.failed_step, self.last_error = -1, -1, ""
        self.last_seconds = 0.0  # from the start of the last save until it was complete
        self.size = 0  # bytes of a checkpoint
        from_first_rank(self._open_folder)

    def _open_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            clear_leftovers(self.folder)
        except OSError as error:
            raise DataError(str(error)) from None

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Start the checkpoint of `step`, after the one before it is complete or has failed."""
        self.wait()
        if step == self.saved_step:
            return
        if step == self.failed_step and from_first_rank(lambda: self._is_there(step)):
            self.saved_step, self.failed_step, self.last_error = step, -1, ""
            return
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())  # of all ranks
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"step": step, "saved_at": now, **self.about}
        writer = CheckpointWriter(step_folder(self.folder, step), about, self.config_toml, self.keep)
        started = time.monotonic()
        future = self._start(tensors, writer)
        future.add_done_callback(lambda _: setattr(self, "last_seconds", time.monotonic() - started))
        self.in_flight = (step, future)

    def _is_there(self, step: int) -> bool:
        """Return True for a step whose save failed after it had given the checkpoint its name."""
        folder = step_folder(self.folder, step)
        try:
            if is_checkpoint(folder):
                check_files(folder)
                sync_folder(self.folder)
                logger.info("%s is complete", folder)
                return True
        except Damaged as error:
            logger.warning("%s; set aside as %s", error, set_aside(folder))
        except (Unreadable, OSError) as error:
            logger.warning("%s: %s", folder, error)
        return False

    def _start(self, tensors: dict[str, Tensor], writer: CheckpointWriter) -> Future:
        """Start writing; if that fails, the future has the error."""
        # Plans are cached: ranks exchange them again only when a shape has changed. Before torch 2.13, if the
        # first save fails, all later ones fail too, because the plan was never completed.
        caching = torch.__version__ >= "2.13"
        planner = DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=caching)
        options = {"storage_writer": writer, "planner": planner, "process_group": self.group}
        if self.mode == "disabled":
            future: Future = Future()
            try:
                future.set_result(state_dict_saver.save(tensors, **options))
            except (OSError, RuntimeError, CheckpointException) as error:
                future.set_exception(error)
            return future
        self._prepare([t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()])
        kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
        response = state_dict_saver.async_save(
            tensors, async_checkpointer_type=kind, async_stager=self.stager, **options
        )
        if not isinstance(response, AsyncSaveResponse):
            return response
        self.staging = response.staging_completion
        return cast(Future, response.upload_completion)

    def _prepare(self, tensors: list[Tensor]) -> None:
        """Allocate memory for copies at the first save, and replace a checkpoint process that was killed."""
        size = sum(tensor.nbytes for tensor in tensors)
        if self.process and not self.stager and (problem := first_problem(lack_of_shared_memory(size))):
            if dist.get_rank() == 0:
                logger.warning(f"{problem}; checkpoints are written in a thread, which slows training")
            self.process = self.process.close()
        if self.process and not all_agree(self.process.is_alive):
            self.process.close()
            self.process = CheckpointProcess()
        on_gpu = any(tensor.is_cuda for tensor in tensors)
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # torch's stager copies on a stream of its own
        shared = self.process is not None
        if not self.stager:
            self.stager = DefaultStager(StagingOptions(on_gpu, shared, shared, on_gpu))
            # torch 2.11 and 2.12 close it after every copy, and then cannot copy again.
            self.stager._state_dict_stager.close = lambda: None

    def wait_for_staging(self) -> None:
        """Wait until the tensors are copied: to be called before the weights change."""
        if self.staging:
            self.staging.exception()  # `wait` reports it
            self.staging = None

    def poll(self) -> None:
        """Log the result of the current save if it has ended on all ranks."""
        if self.in_flight and all_agree(self.in_flight[1].done()):
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight; an error is logged, and `last_error` has it."""
        if self.in_flight is None:
            return
        self.wait_for_staging()
        (step, future), self.in_flight = self.in_flight, None
        self.last_error = first_problem(problem_of_save(future))
        self.failed_step = step if self.last_error else -1
        if not self.last_error:
            self.saved_step = step
            logger.info("saved %s", step_folder(self.folder, step))
            self._prune()
        elif dist.get_rank() == 0:
            unfinished = step_folder(self.folder, step)
            shutil.rmtree(unfinished.with_name(unfinished.name + INCOMPLETE), ignore_errors=True)
            logger.warning(f"the checkpoint of step {step} {self._failure()}; training goes on")

    def _prune(self) -> None:
        """Remove older checkpoints that the save could not remove; if it fails, retry after the next save."""
        try:
            if dist.get_rank() == 0:
                prune(self.folder, self.keep)
        except OSError as error:
            logger.warning(f"older checkpoints are not removed, until after the next save: {error}")

    def _failure(self) -> str:
        """Describe why the last save failed, the free and needed space, and the last complete checkpoint."""
        steps, free = complete_steps(self.folder), shutil.disk_usage(self.folder).free
        newest = step_folder(self.folder, steps[-1]) if steps else "none"
        return (
            f"could not be written: {self.last_error} ({free / 1e6:,.0f} MB free in {self.folder}, a "
            f"checkpoint takes {self.size / 1e6:,.0f} MB); the last complete one: {newest}"
        )

    def finish(self, step: int, tensors: dict[str, Tensor]) -> str:
        """Try the save of the last step again where it failed, for half a minute, and close.

        Returns one line about a checkpoint that is missing, the same on all ranks, or "".
        """
        self.wait()
        for pause in RETRY_SECONDS:
            if self.failed_step != step:
                break
            if dist.get_rank() == 0:
                logger.warning(f"the last checkpoint is tried again in {pause} s")
            time.sleep(pause)
            self.save(step, tensors)
            self.wait()
        self.close()
        if self.failed_step != step:
            return ""
        start_again = "start again from there once the cause is removed"
        return f"{self.folder}: the last checkpoint, of step {step}, {self._failure()}; {start_again}"

    def close(self) -> None:
        """Wait for the last save, and free the process and the memory of the copies."""
        self.wait()
        if self.process:
            self.process.close()
        if self.stager:
            self.stager.close()
            self.stager = None

    # -- loading -----------------------------------------------------------------------------------------

    def newest(self, at_most: float = math.inf) -> int | None:
        """Return the step of the newest undamaged checkpoint.

        Damaged ones are logged and set aside. Raises DataError if only damaged ones are left, because the
        user has to decide to start over, and if there is no permission to read one.
        """
        self.wait()
        found = find_undamaged(lambda: self._until(at_most), set_aside)
        return int(found.folder.name.removeprefix("step-")) if found else None

    def oldest(self) -> int | None:
        """Return the step of the oldest undamaged checkpoint."""
        self.wait()
        found = find_undamaged(lambda: self._until(math.inf)[::-1], set_aside)
        return int(found.folder.name.removeprefix("step-")) if found else None

    def _until(self, step: float) -> list[Path]:
        """Return the checkpoints up to a step, the newest first."""
        if steps := [each for each in complete_steps(self.folder) if each <= step]:
            return [step_folder(self.folder, each) for each in reversed(steps)]
        if names := [path.name for path in sorted(self.folder.glob(f"step-*{DAMAGED}*"))]:
            raise DataError(
                f"{self.folder}: no checkpoint is left that can be trusted; damaged ones are set aside "
                f"({', '.join(names)}); remove them to start over, or choose another job.dump_folder"
            )
        return []

    def restart(self, step: int) -> None:
        """Remove the checkpoints of steps after `step`, so that no run resumes from them."""
        self.wait()
        from_first_rank(lambda: remove_after(self.folder, step))
        self.saved_step = step or -1

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Fill tensors from the checkpoint of `step`, whatever layout wrote it. Raises DataError."""
        folder = step_folder(self.folder, step)
        on_all_ranks(lambda: read_tensors(folder, tensors))


class Found(NamedTuple):
    """A checkpoint that is not damaged; until `lock` is closed no run removes it."""

    folder: Path
    lock: AbstractContextManager  # rank 0's


def find_undamaged(
    list_candidates: Callable[[], Iterable[Path]], set_aside: Callable[[Path], Path] | None = None
) -> Found | None:
    """Return the first of the candidates that is not damaged, the same on all ranks; None: there is none.

    Called by all ranks together. Rank 0 lists the candidates, and again after a damaged one, because a run
    may still be writing there. Each rank checks a part of the files of a checkpoint. Raises DataError.
    """
    tried: set[Path] = set()
    locks: list[AbstractContextManager] = [nullcontext()]

    def choose() -> Path | None:
        while fresh := [folder for folder in list_candidates() if folder not in tried]:
            for folder in fresh:
                tried.add(folder)
                with suppress(Damaged, Unreadable):  # which the check reports
                    locks.append(lock(folder))
                if is_checkpoint(folder):  # else it was removed meanwhile
                    return folder
        return None

    while folder := from_first_rank(choose):
        try:
            check_together(folder)
            return Found(folder, locks[-1])
        except Damaged as error:
            aside = f"; set aside as {from_first_rank(partial(set_aside, folder))}" if set_aside else ""
            logger.warning("%s%s; taking the one before", error, aside)
    return None


def check_together(folder: Path) -> None:
    """Check the files of a checkpoint on all ranks together, again after errors that may pass.

    Raises Damaged, on all ranks; Unreadable where the errors stay, or a file is missing on some ranks only.
    """
    for pause in (*READ_SECONDS, None):
        try:
            return on_all_ranks(partial(check_files, folder, dist.get_rank(), dist.get_world_size()))
        except Missing as error:
            try:
                names = [MANIFEST, *read_manifest(folder)["files"]]
            except (Damaged, Unreadable):
                names = [MANIFEST]
            missing: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(missing, [name for name in names if not (folder / name).exists()])
            if set.intersection(*map(set, missing)):
                raise
            problem = f"{error} on some ranks, and there on others: is the folder shared by all nodes?"
        except Unreadable as error:
            problem = str(error)
        if pause is None:
            raise Unreadable(problem)
        logger.warning("%s; reading it again in %d s", problem, pause)
        time.sleep(pause)


def find_checkpoint(key: str, text: str) -> Found:
    """Return the checkpoint that a key of the configuration names, or the newest in a folder of them.

    Called by all ranks together. Raises ConfigError.
    """
    if found := find_undamaged(lambda: candidates(Path(text))):
        return found
    refuse_without_checkpoint(key, text)


def expect_checkpoint(key: str, text: str) -> None:
    """Raise ConfigError if a folder that a key names has no checkpoint, damaged or not."""
    if not any(candidates(Path(text))):
        refuse_without_checkpoint(key, text)


def refuse_without_checkpoint(key: str, text: str) -> NoReturn:
    reason = "no checkpoint there, or damaged ones only; name the folder of a run with checkpoint.enable"
    refuse(key, text, f"{reason}, or a step-... in it")


def lack_of_shared_memory(size: int) -> str:
    """Return a problem if the copies of this host's ranks, `size` bytes each, do not fit; "" if they fit."""
    needed = size * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = shutil.disk_usage(SHARED_MEMORY).free
    numbers = f"{free / 1e6:,.0f} MB free, a checkpoint needs {needed / 1e6:,.0f} MB there"
    return f"{SHARED_MEMORY} has {numbers} (docker run --shm-size)" if needed > free else ""


def all_agree(answer: bool) -> bool:
    """Return whether all ranks answer yes."""
    return not first_problem("" if answer else "no")


def first_problem(problem: str) -> str:
    """Return the problem of the lowest rank that has one, on all ranks."""
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next(filter(None, problems), "")


def problem_of_save(future: Future) -> str:
    """Return why a save failed, "" if it did not. Raises errors that are not caused by disk or processes."""
    try:
        future.result()
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if not isinstance(failure, OSError | RuntimeError):
                raise
        failures = list(error.failures.items())[:3]
        return "; ".join(f"rank {rank}: {failure}" for rank, (failure, _) in failures)
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""
