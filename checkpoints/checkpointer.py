"""Checkpoints of one run: save with torch.distributed.checkpoint (DCP), find, check and load.

A save copies the tensors that this rank writes into host memory that later saves reuse, and writes them in
the background. At most one is in flight: the next save waits for it. When all ranks have written their files,
DCP calls `CheckpointWriter.finish` on rank 0, in the trainer or in torch's checkpoint process: it adds the
configuration and the manifest, flushes the folder and gives it its final name. DCP raises an error of one
rank on all of them.
"""

import atexit
import io
import logging
import math
import os
import resource
import shutil
import signal
import socket
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint import _async_process_executor, state_dict_saver
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.tensor import DTensor

from checkpoints import files
from checkpoints.files import Damaged, Missing, Unreadable, complete_steps, step_folder
from config import Checkpoint
from errors import STOP_SIGNALS, DataError, refuse
from jobs.durable_files import sync_folder, write_durably
from jobs.signals import TRAINER, end_with_trainer
from parallelisms.mesh import cpu_group, from_all_ranks, from_first_rank, on_all_ranks
from parallelisms.peer_messages import use_plain_messages

logger = logging.getLogger(__name__)
RETRY_SECONDS = (1, 2, 4, 8, 16)  # before each further attempt at the last save
READ_SECONDS = (1, 4, 15)  # before each further attempt to read what the disk or the network does not give
SHARED_MEMORY = "/dev/shm"  # the checkpoint process reads the tensors from there
OPEN_FILES, OTHER_FILES = 65536, 200  # each tensor there has a file descriptor, two while it is sent
NO_CHECKPOINT = "no checkpoint there, or damaged ones only; name the folder of a run, or a step-... in it"


# -- files with checksums ------------------------------------------------------------------------------


class ChecksumFile(io.BufferedWriter):
    """A new file that computes the CRC-32 of what is written to it."""

    crc32 = 0
    error: OSError | None = None  # of a full disk, which torch.save replaces by a RuntimeError

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


class ChecksumFiles(FileSystem):
    """DCP's file system that records size and CRC-32 of every file it has written."""

    def __init__(self) -> None:
        self.files: files.Files = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with ChecksumFile(io.FileIO(path, "w")) as file:
            try:
                yield file
            except RuntimeError as error:
                raise file.error or error from None
        # Under the final name: DCP writes .metadata as .metadata.tmp.
        self.files[Path(path).name.removesuffix(".tmp")] = (Path(path).stat().st_size, file.crc32)


class CheckpointWriter(FileSystemWriter):
    """DCP's writer of one checkpoint, which has its final name only when it is complete and on the disk."""

    def __init__(self, target: Path, about: dict[str, Any], config_toml: str, keep: int, spared: int) -> None:
        """about: entries of the manifest; keep, spared: checkpoints that stay in the folder, see `prune`."""
        # 0: tensors are on the host already, and torch would initialize CUDA to copy ahead.
        unfinished = target.with_name(target.name + files.INCOMPLETE)
        super().__init__(unfinished, sync_files=True, per_thread_copy_ahead=0)
        self.fs = ChecksumFiles()
        self.target, self.about, self.config_toml = target, about, config_toml
        self.keep, self.spared = keep, spared

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Return DCP's results, followed by size and CRC-32 of the files of this rank."""
        written: Any = torch.futures.Future()
        written.set_result(super().write_data(plan, planner).value() + [self.fs.files])
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete the checkpoint on rank 0. results: those of `write_data` on each rank. Raises OSError."""
        folder, target = Path(self.path), self.target
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        write_durably(folder / "config.toml", self.config_toml)
        text = self.config_toml.encode()
        written = {"config.toml": (len(text), zlib.crc32(text))} | self.fs.files
        for of_rank in results:
            written |= of_rank[-1]
        files.write_manifest(folder, self.about, written)
        sync_folder(folder)
        # A save of this step may have failed after its rename: at the flush below, or because the process was
        # killed while it pruned.
        former = target.with_name(target.name + files.DELETING)
        if target.exists():
            os.replace(target, former)
        os.replace(folder, target)
        sync_folder(target.parent)
        shutil.rmtree(former, ignore_errors=True)
        # The checkpoint is complete; the trainer tries again, and logs why it fails.
        with suppress(OSError, DataError, Unreadable):
            files.prune(target.parent, self.keep, self.spared)


# -- torch's checkpoint process ------------------------------------------------------------------------


class ProcessGroupInfo:
    """Description of the group that the checkpoint processes of all ranks form (_ProcessGroupInitInfo)."""

    # Torch's own would make the processes meet at a store that listens on all interfaces.

    def __init__(self, address: str, port: int) -> None:
        """address, port: of a store that rank 0 keeps."""
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.tcp_store_master_addr, self.tcp_store_master_port = address, port
        self.use_prefix_store, self.disable_automatic_gc, self.disable_manual_gc = True, False, False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called in the new process before anything else runs there."""
        vars(self).update(state)
        end_with_trainer()
        logging.disable(logging.WARNING)  # torch logs every request and tensor; errors go to the trainer
        # When the trainer has ended, multiprocessing would print the EOFError of its pipe.
        sys.stderr = open(os.devnull, "w")
        os.nice(10)  # training goes first
        torch.set_num_threads(1)
        use_plain_messages()


class CheckpointProcess:
    """torch's checkpoint process, started in the background with the run because its imports take seconds.

    It replaces the process that dcp.async_save would start at the first save: torch never restarts one that
    was killed, and does not protect it from Ctrl-C. Created by all ranks together.
    """

    def __init__(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_FILES, hard)), hard))
        self.store: list[TCPStore] = []  # rank 0's
        self.is_lost = False

        def open_store() -> tuple[str, int]:
            """Listen on the address of this host that the ranks have met at, and on no other."""
            address = os.environ.get("MASTER_ADDR", "127.0.0.1")
            try:
                listener = socket.create_server((address, 0))
            except OSError:  # the name of a service that forwards to this host
                listener = socket.create_server(("", 0))
            port = listener.getsockname()[1]
            options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
            self.store.append(TCPStore(address, port, **options, master_listen_fd=listener.detach()))
            return address, port

        address, port = from_first_rank(open_store)
        info: Any = ProcessGroupInfo(address, port)
        resource_tracker.ensure_running()  # at its first start it unblocks SIGINT and SIGTERM in its thread
        # The thread inherits what is blocked, and the process from the thread.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        os.environ[TRAINER] = str(os.getpid())
        self.thread = ThreadPoolExecutor(1)  # with which the process would end
        # Known before it has started: it waits for those of the other ranks, of which one may have died.
        self.process = object.__new__(_async_process_executor._AsyncCheckpointProcess)
        self.started = self.thread.submit(self.process.__init__, info)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _async_process_executor._CHECKPOINT_PROCESS = cast(Any, self)
        atexit.register(self.close)  # before multiprocessing waits for a process that ignores SIGTERM

    def save(self, **options: Any) -> Metadata:
        """Called by dcp.async_save, in a thread. Raises RuntimeError if the process was killed."""
        try:
            self.started.result()
            return self.process.save(**options)
        except ConnectionError as error:
            self.is_lost = True  # a process that is being killed still counts as alive for a while
            raise RuntimeError(f"Checkpoint background process is dead ({error})") from None

    @property
    def is_alive(self) -> bool:
        """Return True if the process can save, or may be able to soon."""
        if not self.started.done():
            return True
        is_open = not self.is_lost and not self.started.exception()
        return is_open and self.process._save_process.is_alive()

    def close(self) -> None:
        """End the process, with no save in flight."""
        atexit.unregister(self.close)
        is_started = False
        while not is_started:  # its start ends with it, and may wait for a process of another rank in vain
            is_started = self.started.done()
            process = getattr(self.process, "_save_process", None)
            if process and process.pid:
                process.kill()
            if not is_started:
                time.sleep(0.01)
        if process and process.pid:
            process.join()
        self.store.clear()


# -- the checkpoints of a run ----------------------------------------------------------------------------


class Checkpointer:
    """Saves and loads the checkpoints of one run. Made, and each method called, by all ranks together.

    async_mode: "disabled" writes before `save` returns; "async" copies before it returns and writes in a
    thread; "async_with_pinned_mem" copies until `wait_for_staging` and writes in a process.
    about: entries of every manifest, among them what the weights mean (checkpoints/identity.py).
    """

    def __init__(self, folder: Path, settings: Checkpoint, config_toml: str, about: dict[str, Any]) -> None:
        self.folder, self.mode, self.keep = folder.absolute(), settings.async_mode, settings.keep_latest_k
        if self.mode == "async_with_pinned_mem" and not os.path.isdir(SHARED_MEMORY):
            self.mode = "async"  # macOS, where nothing ends a process with its parent either
        self.config_toml = config_toml
        self.about = {**about, "ranks": dist.get_world_size(), "versions": {"torch": torch.__version__}}
        self.group = cpu_group()  # its own, so that a saving thread does not mix with training's collectives
        # Threads of gloo would copy plans in parallel loops. Where two threads of a process have such loops,
        # OpenMP's workers sleep between them: steps after the first save took 1.8 x as long on two cores.
        self.no_dist = dist.get_world_size() == 1
        warnings.filterwarnings(
            "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
        )
        self.process: CheckpointProcess | None = None
        self.stager: DefaultStager | None = None
        self.in_flight: tuple[int, Future] | None = None
        self.staging: Future | None = None
        self.saved_step, self.failed_step, self.last_error = -1, -1, ""
        self.spared_step = -1  # of the best checkpoint, which stays however old it is
        self.last_seconds = 0.0  # from the start of the last save until it was complete
        self.names: list[str] = []  # of all tensors of this rank at the last save
        self.written: set[str] = set()  # the names of those that this rank writes
        self.size = 0  # bytes of a checkpoint
        from_first_rank(lambda: files.clear_leftovers(self.folder))

    def start_process(self) -> None:
        """Start the checkpoint process, if the mode has one, in the background because its imports take
        seconds; or another one, if it was killed. Called once nothing can be refused any more: a process that
        starts while this one ends prints a traceback.
        """
        if self.process:
            self.process.close()
        self.process = CheckpointProcess() if self.mode == "async_with_pinned_mem" else None

    # -- saving ------------------------------------------------------------------------------------------

    def save(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Start the checkpoint of `step`, after the one before it is complete or has failed."""
        self.wait()
        if step == self.saved_step:
            return
        self.size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())  # of all ranks
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())

        # -- tensors that this rank writes: of those that several ranks have, DCP chooses one rank for each,
        # but would copy all of them, under DDP and HSDP the whole model on each rank
        names, needs_process = list(tensors), self.mode == "async_with_pinned_mem"
        is_ready = not needs_process or (self.process is not None and self.process.is_alive)
        answers = from_all_ranks((names == self.names, is_ready))
        if not all(is_known for is_known, _ in answers):
            plan = _DistWrapper(self.group, use_dist=not self.no_dist, coordinator_rank=0).reduce_scatter(
                "choose what each rank writes",
                lambda: create_default_local_save_plan(tensors, False),
                dedup_save_plans,
            )
            self.names, self.written = names, {item.index.fqn for item in plan.items}
        tensors = {name: tensor for name, tensor in tensors.items() if name in self.written}

        # -- the checkpoint process, and memory for the copies, which is used again
        if not all(is_ready for _, is_ready in answers):
            self.start_process()
        if self.process and not self.stager:
            # The copies of all ranks of this host are there; each takes its rank two open files.
            local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors.values()]
            needed = max(from_all_ranks(sum(tensor.nbytes for tensor in local)))
            needed *= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            free = min(from_all_ranks(shutil.disk_usage(SHARED_MEMORY).free))
            most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            too_many = max(from_all_ranks(2 * len(local) + OTHER_FILES - most_files)) > 0
            if needed > free or too_many:
                self.process, self.mode = self.process.close(), "async"
                reason = f"{SHARED_MEMORY} has {free / 1e6:,.0f} MB free, a checkpoint needs "
                reason += f"{needed / 1e6:,.0f} MB there (docker run --shm-size)"
                if too_many:
                    reason = f"a process may have {most_files} files open, too few for a save (ulimit -n)"
                if dist.get_rank() == 0:
                    reason += "; checkpoints are written in a thread, which slows training"
                    logger.warning(reason)
        if on_gpu:
            torch.cuda.current_stream().synchronize()  # torch's stager copies on a stream of its own
        if not self.stager and self.mode != "disabled":
            is_shared = self.process is not None
            self.stager = DefaultStager(StagingOptions(on_gpu, is_shared, is_shared, on_gpu))
            # torch 2.11 and 2.12 close it after every copy, and then cannot copy again.
            self.stager._state_dict_stager.close = lambda: None
            # Its thread copies alone: see `no_dist`.
            if executor := getattr(self.stager, "_staging_executor", None):
                num_threads = executor.submit(torch.get_num_threads).result()  # the first call there sets it
                executor.submit(torch.set_num_threads, 1).result()
                torch.set_num_threads(num_threads)  # for threads that start later

        # -- the save
        now, started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
        about, target = {"step": step, "saved_at": now, **self.about}, step_folder(self.folder, step)
        # Plans are cached: ranks exchange them again only when a shape has changed. Before torch 2.13, if the
        # first save fails, all later ones fail too, because the plan was never completed.
        caching = torch.__version__ >= "2.13"
        options = {
            "storage_writer": CheckpointWriter(target, about, self.config_toml, self.keep, self.spared_step),
            "planner": DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=caching),
            "process_group": self.group,
            "no_dist": self.no_dist,
        }
        future: Future = Future()
        if self.mode == "disabled":
            try:
                future.set_result(state_dict_saver.save(tensors, **options))
            except (OSError, RuntimeError, CheckpointException) as error:
                future.set_exception(error)  # which `wait` reports
        else:
            kind = AsyncCheckpointerType.PROCESS if self.process else AsyncCheckpointerType.THREAD
            response = state_dict_saver.async_save(
                tensors, async_checkpointer_type=kind, async_stager=self.stager, **options
            )
            if isinstance(response, AsyncSaveResponse):
                self.staging, response = response.staging_completion, response.upload_completion
            future = cast(Future, response)
        future.add_done_callback(lambda _: setattr(self, "last_seconds", time.monotonic() - started))
        self.in_flight = (step, future)

    def wait_for_staging(self) -> None:
        """Wait until the tensors are copied: to be called before the weights change."""
        if self.staging:
            self.staging.exception()  # `wait` reports it
            self.staging = None

    def poll(self) -> None:
        """Log the result of the current save if it has ended on all ranks."""
        if self.in_flight and all(from_all_ranks(self.in_flight[1].done())):
            self.wait()

    def wait(self) -> None:
        """Wait until no save is in flight; an error is logged, and `last_error` has it."""
        if self.in_flight is None:
            return
        self.wait_for_staging()
        (step, future), self.in_flight = self.in_flight, None
        problem = ""
        try:
            future.result()
        except CheckpointException as error:
            failures = [(rank, failure) for rank, (failure, _) in error.failures.items()]
            if not all(isinstance(failure, OSError | RuntimeError) for _, failure in failures):
                raise  # caused by neither disk nor processes
            problem = "; ".join(f"rank {rank}: {failure}" for rank, failure in failures[:3])
        except (OSError, RuntimeError) as error:
            problem = str(error)
        # A save is complete for all ranks or for none: each prunes, or clears, as the others do.
        problem = next(filter(None, from_all_ranks(problem)), "")  # of the lowest rank that has one
        self.last_error, self.failed_step = problem, step if problem else -1
        if not problem:
            self.saved_step = step
            logger.info("saved %s", step_folder(self.folder, step))
            return self.prune()

        def clear() -> str:
            """Remove what was written; return the error, the room, and the last complete checkpoint."""
            unfinished = step_folder(self.folder, step)
            shutil.rmtree(unfinished.with_name(unfinished.name + files.INCOMPLETE), ignore_errors=True)
            failure = f"could not be written: {problem}"
            try:
                newest = max(complete_steps(self.folder), default=None)
                free, needed = shutil.disk_usage(self.folder).free / 1e6, self.size / 1e6
            except (OSError, DataError, Unreadable) as error:  # the folder has vanished, or its disk
                return f"{failure}; {self.folder} cannot be read: {error}"
            complete = "none" if newest is None else step_folder(self.folder, newest)
            room = f"{free:,.0f} MB free in {self.folder}, a checkpoint takes {needed:,.0f} MB"
            return f"{failure} ({room}); the last complete one: {complete}"

        self.last_error = from_first_rank(clear)
        if dist.get_rank() == 0:
            logger.warning(f"the checkpoint of step {step} {self.last_error}; training goes on")

    def prune(self) -> None:
        """Remove older checkpoints that a save has not removed; if it fails, retry after the next save."""
        try:
            if dist.get_rank() == 0:
                files.prune(self.folder, self.keep, self.spared_step)
        except (OSError, DataError, Unreadable) as error:
            logger.warning(f"older checkpoints are not removed, until after the next save: {error}")

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
        return f"{self.folder}: the last checkpoint, of step {step}, {self.last_error}; {start_again}"

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
        """Return the step of the newest undamaged checkpoint up to a step; without one, of the oldest later
        one. Raises DataError if only damaged ones are left, and without permission to read one.
        """
        self.wait()

        def list_candidates() -> list[Path]:
            steps = complete_steps(self.folder)
            names = [path.name for path in sorted(self.folder.glob(f"step-*{files.DAMAGED}*"))]
            if names and not steps:  # the user has to decide to start over
                raise DataError(
                    f"{self.folder}: no checkpoint is left that can be trusted; damaged ones are set aside "
                    f"({', '.join(names)}); remove them to start over, or choose another job.dump_folder"
                )
            before = [step for step in steps if step <= at_most]
            return [step_folder(self.folder, step) for step in before[::-1] + steps[len(before) :]]

        checkpoint = find_undamaged(list_candidates, sets_aside=True)
        return int(checkpoint.folder.name.removeprefix("step-")) if checkpoint else None

    def restart(self, step: int) -> None:
        """Remove the checkpoints of steps after `step`, so that no run resumes from them."""
        self.wait()

        def remove_later() -> None:
            for later in complete_steps(self.folder):
                if later > step:
                    files.remove(step_folder(self.folder, later), even_if_read=True)

        from_first_rank(remove_later)
        self.saved_step = step or -1

    def load(self, step: int, tensors: dict[str, Tensor]) -> None:
        """Fill tensors from the checkpoint of `step`, whatever layout wrote it. Raises DataError."""
        folder = step_folder(self.folder, step)
        on_all_ranks(lambda: files.read_tensors(folder, tensors))


class Found(NamedTuple):
    """A checkpoint that is not damaged; until `lock` is closed no run removes it."""

    folder: Path
    lock: AbstractContextManager  # rank 0's


def find_undamaged(list_candidates: Callable[[], Iterable[Path]], sets_aside: bool = False) -> Found | None:
    """Return the first of the candidates that is not damaged, the same on all ranks; None: there is none.
    sets_aside: damaged ones are renamed. Raises DataError, and Unreadable where errors of reading stay, or a
    file is missing on some ranks only.
    """
    # Rank 0 lists the candidates, and again after a damaged one, because a run may still be writing there.
    tried: set[Path] = set()
    locks: list[AbstractContextManager] = [nullcontext()]

    def choose() -> Path | None:
        while fresh := [folder for folder in list_candidates() if folder not in tried]:
            for folder in fresh:
                tried.add(folder)
                with suppress(Damaged, Unreadable):  # which the check reports
                    locks.append(files.lock(folder))
                if files.is_checkpoint(folder):  # else it was removed meanwhile
                    return folder
        return None

    # -- one after the other, of which each rank checks a part; again where the disk or the network has failed
    while folder := from_first_rank(choose):
        for pause in (*READ_SECONDS, None):
            try:
                on_all_ranks(partial(files.check_files, folder, dist.get_rank(), dist.get_world_size()))
                return Found(folder, locks[-1])
            except Damaged as error:
                problem, is_damaged = str(error), True
                if isinstance(error, Missing):
                    # Damaged only if no rank sees the file: the folder may not be shared.
                    names = {files.MANIFEST}
                    with suppress(Damaged, Unreadable):
                        names |= files.read_manifest(folder)["files"].keys()
                    missing = from_all_ranks({name for name in names if not (folder / name).exists()})
                    is_damaged = bool(set.intersection(*missing))
                if is_damaged:
                    aside = from_first_rank(partial(files.set_aside, folder)) if sets_aside else ""
                    logger.warning("%s%s; taking the one before", error, aside)
                    break
                problem += " on some ranks, and there on others: is the folder shared by all nodes?"
            except Unreadable as error:
                problem = str(error)
            if pause is None:
                raise Unreadable(problem)
            logger.warning("%s; reading it again in %d s", problem, pause)
            time.sleep(pause)
    return None


def find_checkpoint(key: str, text: str) -> Found:
    """Return the checkpoint that a key of the configuration names, or the newest in a folder of them, on all
    ranks. Raises ConfigError.
    """
    return find_undamaged(lambda: files.candidates(Path(text))) or refuse(key, text, NO_CHECKPOINT)


def expect_checkpoint(key: str, text: str) -> None:
    """Raise ConfigError if a folder that a key names has no checkpoint, damaged or not."""
    if not any(files.candidates(Path(text))):
        refuse(key, text, NO_CHECKPOINT)
