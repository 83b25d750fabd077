"""Asynchronous checkpoints of a run through torch.distributed.checkpoint, and the newest that can be trusted.

A save is: copy this rank's part into host memory that every save reuses (during the next forward and
backward), write it from another process, gather what was written, and let rank 0 complete the folder
(checkpoints/files.py). At most one is in flight: the next waits for it.
"""

import logging
import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from checkpoints.files import (
    DAMAGED,
    INCOMPLETE,
    Damaged,
    check_files,
    clear_leftovers,
    complete_steps,
    read_manifest,
    read_tensors,
    reading,
    remove,
    set_aside,
    step_folder,
)
from checkpoints.save_plan import plan_of, plan_together
from checkpoints.writer import (
    Arena,
    Copying,
    Files,
    Finish,
    Finisher,
    WriterProcess,
    Written,
    write_tensors,
)
from config import Checkpoint
from errors import DataError
from jobs.rank_tree import RankTree

logger = logging.getLogger(__name__)
RETRIES = (1, 2, 4, 8, 16)  # seconds before the last save is tried again
WORTH_SAYING = 1.0  # seconds that training waits for a save
T = TypeVar("T")
State = dict[str, dict[str, Tensor]]  # part ("model", "optimizer", ...) -> name -> tensor
Signature = dict[str, tuple[torch.Size, torch.dtype]]


def flatten(state: State) -> dict[str, Tensor]:
    return {f"{part}.{name}": tensor for part, tensors in state.items() for name, tensor in tensors.items()}


class Saved(Protocol):
    """What is saved (checkpoints/run_state.py)."""

    def tensors(self) -> State: ...


class NoCheckpoints:
    """What the training loop asks of a run's checkpoints where none are saved."""

    saves, saved_step, last_seconds = False, -1, 0.0

    def save(self, step: int, state: State) -> None: ...

    def before_update(self) -> None: ...

    def poll(self) -> None: ...

    def wait(self) -> None: ...

    def finish(self, step: int, run: Saved) -> str:
        return ""

    def newest(self, at_most: float = math.inf) -> int | None:
        return None


class Checkpointer:
    """Saves and loads the checkpoints of one run. Made, and called, by all ranks together.

    async_mode: "disabled" writes before it returns; "async" copies before it returns; "async_with_pinned_mem"
    copies while the next forward and backward run, until `before_update`.
    about: what the manifests say of the run; checkpoints/identity.py asks them what the weights mean.
    """

    saves = True

    def __init__(self, folder: Path, settings: Checkpoint, config_toml: str, about: dict[str, Any]) -> None:
        self.folder, self.mode, self.keep = folder.absolute(), settings.async_mode, settings.keep_latest_k
        self.config_toml = config_toml
        self.about = {
            **about,
            "ranks": dist.get_world_size(),
            "versions": {"torch": torch.__version__},
        }
        # Of its own: on the trainer's group a save in the background would meet other collectives.
        self.ranks = RankTree()
        self.save_plan, self.metadata, self.signature = SavePlan([]), Metadata({}), cast(Signature, None)
        self.arena: Arena | None = None
        self.told: list[WriteResult] | None = None  # what rank 0 knows of this rank's file
        self.results: list[list[WriteResult]] = []  # on rank 0, of all ranks
        self.described = False  # whether the finisher has metadata of these results
        self.finisher = Finisher()
        self.writer = None if self.mode == "disabled" else WriterProcess()
        self.in_flight: tuple[int, Future] | None = None
        self.copying: Copying | None = None
        self.saved_step, self.failed_step, self.last_error = -1, -1, ""
        self.last_seconds = 0.0  # how long the last save took until it was complete
        self.size = 0  # bytes of a checkpoint
        self.has_warned = False  # that saves are slow
        self._on_first(self._open_folder)

    def _open_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self.folder)

    def _on_first(self, do: Callable[[], T]) -> T | None:
        """Rank 0 does it; a DataError or OSError of its is everybody's DataError."""
        result, problem = None, ""
        if self.ranks.is_first:
            try:
                result = do()
            except (ValueError, OSError) as error:
                problem = str(error)
        if problem := self.ranks.share(problem):
            raise DataError(problem)
        return result

    # -- saving --------------------------------------------------------------------------------------

    def save(self, step: int, state: State) -> None:
        """Starts the checkpoint of `step`, after the one before it is complete or has failed."""
        began = time.monotonic()
        self.wait()
        self._say_if_slow(time.monotonic() - began)
        if step == self.saved_step:
            return
        tensors = flatten(state)
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())  # of all ranks
        self._plan_again_if_changed(tensors)
        sources = self._sources(tensors)
        future: Future = Future()
        self.in_flight = (step, future)
        if self.mode == "disabled":
            self._write(step, future, sources)
            self.wait()
            return
        assert self.writer
        knows = self.writer.alive and self.arena is not None
        if not self.writer.alive:
            self.writer, self.described = WriterProcess(), False
        self.arena = self.arena or Arena(sources)
        if not knows:
            self.writer.give(self.arena, self.save_plan)
        self.copying = Copying(self.arena, sources)
        if self.mode == "async":
            self.copying.on_host()
        arguments = (step, future, self.copying)
        threading.Thread(target=self._write, args=arguments, daemon=True).start()

    def _say_if_slow(self, waited: float) -> None:
        """Once: saves take longer than the time between them, so that training waits for the folder."""
        if waited < WORTH_SAYING or self.has_warned or not self.ranks.is_first:
            return
        self.has_warned = True
        megabytes = self.size / 1e6
        rate = f"{megabytes:,.0f} MB in {self.last_seconds:.1f} s, {megabytes / self.last_seconds:,.1f} MB/s"
        logger.warning(
            f"training waited {waited:.1f} s for the checkpoint before this one: {rate} into {self.folder}. "
            "Saves take longer than the steps between them: take a faster folder, or a longer interval"
        )

    def before_update(self) -> None:
        """To be called before anything changes the weights: the copies of the save in flight come first."""
        if self.copying:
            self.copying.before_update()
            self.copying = None

    def _plan_again_if_changed(self, tensors: dict[str, Tensor]) -> None:
        """Who writes what, agreed by all ranks once: the state keeps its shapes from save to save."""
        signature = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        changed = torch.tensor(int(signature != self.signature))
        if not self.ranks.all_reduce(changed, dist.ReduceOp.MAX):
            return
        self.save_plan, self.metadata = plan_together(self.ranks, plan_of(tensors))
        self._release_arena()
        self.signature, self.described = signature, False

    def _release_arena(self) -> None:
        if self.arena:
            self.arena.release()
        self.arena = None

    def _sources(self, tensors: dict[str, Tensor]) -> dict[MetadataIndex, Tensor]:
        """What this rank writes: its shards, and its part of what all ranks have."""
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner(tensors)
        return {
            item.index: cast(Tensor, planner.resolve_data(item)).detach() for item in self.save_plan.items
        }

    def _write(self, step: int, future: Future, source: Copying | dict[MetadataIndex, Tensor]) -> None:
        """All that comes after the copies; in the background this thread mostly waits for the writer."""
        started, target = time.monotonic(), step_folder(self.folder, step)
        unfinished = target.with_name(target.name + INCOMPLETE)
        about = {"step": step, "saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self.about}

        def write() -> Written:
            if isinstance(source, Copying):
                source.on_host()
                return cast(WriterProcess, self.writer).ask("write", unfinished)
            return write_tensors(
                unfinished, self.save_plan, {i: tensor.cpu() for i, tensor in source.items()}
            )

        def complete(written: list[Written]) -> None:
            order = Finish(self._description(written), files_of(written), about, self.config_toml, self.keep)
            self.writer.ask("finish", target, order) if self.writer else self.finisher.finish(target, order)
            self.described = True

        try:
            self._write_together(write, complete)
            self.last_seconds = time.monotonic() - started
            future.set_result("")
        except OSError as error:
            if self.ranks.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)  # it may be what has filled the disk
            future.set_result(str(error))
        except BaseException as error:  # a peer is gone, or a mistake of ours: raised in the trainer
            future.set_exception(error)

    def _write_together(
        self, write: Callable[[], Written], complete: Callable[[list[Written]], None]
    ) -> None:
        """Raises OSError on all ranks when one of them could not write."""
        answer = attempt(write)
        results = answer.results if isinstance(answer, Written) else None
        if isinstance(answer, Written) and results == self.told:
            answer = Written(None, answer.files)
        answers = self.ranks.gather(answer)
        problem = self.ranks.share(complete_all(answers, complete) if answers else "")
        self.told = None if problem else results
        if problem:
            raise OSError(problem)

    def _description(self, written: list[Written]) -> tuple[Metadata, list[list[WriteResult]]] | None:
        """What the metadata is made of; None where the finisher has it from the save before."""
        before = self.results or [[]] * len(written)
        self.results = [
            old if w.results is None else w.results for w, old in zip(written, before, strict=True)
        ]
        if self.described and all(w.results is None for w in written):
            return None
        self.described = False
        return self.metadata, self.results

    def poll(self) -> None:
        """On logging steps: says how the save in flight has ended, if it has."""
        if self.in_flight and self.in_flight[1].done():
            self.wait()

    def wait(self) -> None:
        """Until no save is in flight. One that failed is said and kept in `last_error`; the run goes on."""
        if self.in_flight is None:
            return
        self.before_update()
        (step, future), self.in_flight = self.in_flight, None
        self.last_error = future.result()
        self.failed_step = step if self.last_error else -1
        if not self.last_error:
            self.saved_step = step
            logger.info("saved %s", step_folder(self.folder, step))
            return
        if self.ranks.is_first:
            logger.warning(
                f"the checkpoint of step {step} could not be written: {self.last_error} ({self._room()}); "
                f"training goes on; the last complete one: {newest_name(self.folder)}"
            )

    def _room(self) -> str:
        """What there is for a checkpoint, and what it takes, in words."""
        free = shutil.disk_usage(self.folder).free
        return f"{free / 1e6:,.0f} MB free in {self.folder}, a checkpoint takes {self.size / 1e6:,.0f} MB"

    def finish(self, step: int, run: Saved) -> str:
        """After the last step, whose save is tried again for half a minute where it failed. "" or one line
        that says what is missing; the same on all ranks.
        """
        self.wait()
        for pause in RETRIES:
            if self.failed_step != step:
                break
            if self.ranks.is_first:
                logger.warning(f"the last checkpoint is tried again in {pause} s")
            time.sleep(pause)
            self.save(step, run.tensors())
            self.wait()
        self.close()
        if self.failed_step != step:
            return ""
        last = newest_name(self.folder)
        return (
            f"{self.folder}: the last checkpoint, of step {step}, could not be written: {self.last_error} "
            f"({self._room()}); the last complete one: {last}; mend that, then start again "
            "to go on from there"
        )

    def close(self) -> None:
        """After the last save."""
        self.wait()
        if self.writer:
            self.writer.close()
        self._release_arena()

    # -- loading -------------------------------------------------------------------------------------

    def newest(self, at_most: float = math.inf) -> int | None:
        """The step of the newest checkpoint whose every byte is what was written; damaged ones are named
        and set aside. DataError when there are only damaged ones: nobody wants to start over unasked.
        """
        self.wait()
        while True:
            steps = complete_steps(self.folder) if self.ranks.is_first else []
            steps = [step for step in steps if step <= at_most]
            folder = self.ranks.share(step_folder(self.folder, steps[-1]) if steps else None)
            if folder is None:
                break
            problem = problem_of(folder, self.ranks)
            if not problem:
                return int(folder.name.removeprefix("step-"))
            aside = self._on_first(lambda folder=folder: set_aside(folder))
            logger.warning("%s; set aside as %s; taking the one before", problem, aside)
        aside = sorted(self.folder.glob(f"step-*{DAMAGED}*")) if self.ranks.is_first else []
        if names := self.ranks.share([path.name for path in aside]):
            raise DataError(
                f"{self.folder}: no checkpoint is left that can be trusted; damaged ones are set aside "
                f"({', '.join(names)}); remove them to start over, or choose another job.dump_folder"
            )
        return None

    def remove_after(self, step: int) -> None:
        """The checkpoints of later steps, which are not to be gone on from."""
        self.wait()

        def remove_later() -> None:
            for later in complete_steps(self.folder):
                if later > step:
                    remove(step_folder(self.folder, later))

        self._on_first(remove_later)
        self.saved_step = step

    def load(self, step: int, state: State) -> None:
        """Fills the tensors of `state` from the checkpoint of `step`, whatever layout wrote it.

        DataError, naming the tensor, where one does not fit.
        """
        load(step_folder(self.folder, step), state, self.ranks)


def newest_name(folder: Path) -> str:
    steps = complete_steps(folder)
    return str(step_folder(folder, steps[-1])) if steps else "none"


def attempt(do: Callable[[], T]) -> T | str:
    """What it returns, or the reason why it could not, to be told to the others."""
    try:
        return do()
    except (OSError, RuntimeError) as error:
        return str(error)


def files_of(written: list[Written]) -> Files:
    return {name: entry for each in written for name, entry in each.files.items()}


Saves = Checkpointer | NoCheckpoints


def complete_all(answers: list[Written | str], complete: Callable[[list[Written]], None]) -> str:
    """On rank 0, which completes the checkpoint where all ranks could write; else what has failed."""
    problems = [f"rank {rank}: {a}" for rank, a in enumerate(answers) if isinstance(a, str)]
    return "; ".join(problems[:3]) or attempt(lambda: complete(cast(list[Written], answers))) or ""


def problem_of(folder: Path, ranks: RankTree) -> str:
    """What is wrong with a checkpoint; "" when nothing is. Each rank reads its part."""
    problem = ""
    try:
        with reading(folder):
            check_files(folder, read_manifest(folder), ranks.rank, ranks.world)
    except Damaged as error:
        problem = str(error)
    except OSError as error:
        problem = f"{folder}: {error}"
    return ranks.first_of(problem)


def load(folder: Path, state: State, ranks: RankTree) -> None:
    """Fills the tensors of `state` from a checkpoint. DataError, on all ranks: one does not fit."""
    tensors, problem = flatten(state), ""
    with reading(folder):
        try:
            read_tensors(folder, tensors)
        except (DataError, OSError) as error:
            problem = str(error)
        if problem := ranks.first_of(problem):
            raise DataError(problem)
