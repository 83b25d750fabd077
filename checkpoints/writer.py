"""Saving by torch.distributed.checkpoint (DCP): files with checksums, and the process that writes them.

When all ranks have written their files, DCP calls `CheckpointWriter.finish` on rank 0, in the trainer or in
torch's checkpoint process: it adds the configuration and the manifest, flushes the folder and gives it its
final name. DCP raises an error of one rank on all of them.
"""

import atexit
import io
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from checkpoints.files import DELETING, INCOMPLETE, Files, Unreadable, prune, write_manifest
from errors import STOP_SIGNALS, DataError
from jobs.durable_files import sync_folder, write_durably
from jobs.signals import TRAINER, end_with_trainer
from parallelisms.mesh import from_first_rank
from parallelisms.peer_messages import use_plain_messages

OPEN_FILES = 65536  # each tensor in shared memory has a file descriptor


# -- files with checksums ------------------------------------------------------------------------------


class ChecksumFile(io.BufferedWriter):
    """A new file that computes the CRC-32 of what is written to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self.crc32 = 0
        self.error: OSError | None = None  # of a full disk, which torch.save replaces by a RuntimeError

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
        self.files: Files = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with ChecksumFile(Path(path)) as file:
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
        super().__init__(target.with_name(target.name + INCOMPLETE), sync_files=True, per_thread_copy_ahead=0)
        self.fs = ChecksumFiles()
        self.target, self.about, self.config_toml = target, about, config_toml
        self.keep, self.spared = keep, spared

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Return DCP's results, followed by size and CRC-32 of the files of this rank."""
        results: list[Any] = super().write_data(plan, planner).value()
        written: Future[list[Any]] = Future()
        written.set_result([*results, self.fs.files])
        return written

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Complete the checkpoint on rank 0. results: those of `write_data` on each rank. Raises OSError."""
        folder, target = Path(self.path), self.target
        super().finish(metadata, [of_rank[:-1] for of_rank in results])
        write_durably(folder / "config.toml", self.config_toml)
        text = self.config_toml.encode()
        files = {"config.toml": (len(text), zlib.crc32(text)), **self.fs.files}
        for of_rank in results:
            files |= of_rank[-1]
        write_manifest(folder, self.about, files)
        sync_folder(folder)
        # A save of this step may have failed after its rename: at the flush below, or because the process was
        # killed while it pruned.
        former = target.with_name(target.name + DELETING)
        if target.exists():
            os.replace(target, former)
        os.replace(folder, target)
        sync_folder(target.parent)
        shutil.rmtree(former, ignore_errors=True)
        # The checkpoint is complete; the trainer tries again, and logs why it fails.
        with suppress(OSError, DataError, Unreadable):
            prune(target.parent, self.keep, self.spared)


# -- torch's checkpoint process ------------------------------------------------------------------------


class ProcessGroupInfo:
    """Description of the group that the checkpoint processes of all ranks form (_ProcessGroupInitInfo).

    Torch's own would make the processes meet at a store that listens on all interfaces.
    """

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

        info: Any = ProcessGroupInfo(*from_first_rank(open_store))
        resource_tracker.ensure_running()  # at its first start it unblocks SIGINT and SIGTERM in its thread
        # The thread inherits what is blocked, and the process from the thread.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        os.environ[TRAINER] = str(os.getpid())
        self.thread = ThreadPoolExecutor(1)  # with which the process would end
        self.started = self.thread.submit(_async_process_executor._AsyncCheckpointProcess, info)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _async_process_executor._CHECKPOINT_PROCESS = cast(Any, self)
        atexit.register(self.close)  # before multiprocessing waits for a process that ignores SIGTERM

    def save(self, *arguments: Any, **options: Any) -> Metadata:
        """Called by dcp.async_save, in a thread. Raises RuntimeError if the process was killed."""
        try:
            return self.started.result().save(*arguments, **options)
        except ConnectionError as error:
            self.is_lost = True  # a process that is being killed still counts as alive for a while
            raise RuntimeError(f"Checkpoint background process is dead ({error})") from None

    @property
    def is_alive(self) -> bool:
        """Return True if the process can save, or may be able to soon."""
        if not self.started.done():
            return True
        is_open = not self.is_lost and not self.started.exception()
        return is_open and self.started.result()._save_process.is_alive()

    def close(self) -> None:
        """End the process, with no save in flight."""
        atexit.unregister(self.close)
        if not self.started.exception():
            self.started.result()._save_process.kill()
            self.started.result()._save_process.join()
        self.store.clear()
