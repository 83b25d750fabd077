"""Copies what is to be saved into host memory that is reused, and writes it from another process.

A second process, because whatever runs Python in the trainer's own takes the interpreter from it: a save in a
thread slows the steps that follow it. Both map the same anonymous memory (a memfd: unlike /dev/shm
it has no size limit of its own in a container). The writer dies with its trainer.
"""

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from checkpoints.files import INCOMPLETE, prune, write_manifest
from jobs.durable_files import replacing, sync_folder, write_durably

ROOT = Path(__file__).parents[1]
ALIGNMENT = 64  # bytes: where a tensor begins in the arena
METADATA = ".metadata"
PR_SET_PDEATHSIG = 1
Files = dict[str, tuple[int, int]]  # name -> bytes, CRC-32


@dataclass
class Written:
    """What one rank has written: DCP's description, and the files' sizes and checksums."""

    results: list[WriteResult] | None  # None: those of the save before, which rank 0 still has
    files: Files


@dataclass
class Finish:
    """What rank 0 adds when all ranks have written."""

    described: tuple[Metadata, list[list[WriteResult]]] | None  # None: as in the save before
    files: Files
    about: dict[str, Any]  # the manifest's own lines
    config_toml: str
    keep: int


# -- writing, in whichever process -----------------------------------------------------------------------


class Checksummed:
    """A file that remembers the CRC-32 of what goes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.crc32 = file, 0
        self.failed: OSError | None = None  # of a disk that is full, say: torch raises another error over it
        self.tell, self.fileno, self.flush, self.close = file.tell, file.fileno, file.flush, file.close

    def write(self, data: Any) -> int:
        self.crc32 = zlib.crc32(data, self.crc32)
        try:
            return self.file.write(data)
        except OSError as error:
            self.failed = error
            raise


class ChecksummedFiles(FileSystem):
    """DCP's file system that knows size and CRC-32 of every file it has written."""

    def __init__(self) -> None:
        self.files: Files = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = Checksummed(cast(IO[bytes], file))
            try:
                yield stream
            except RuntimeError as error:
                raise stream.failed or error from None
        # Under the name that it will have: DCP writes .metadata under another one first.
        self.files[Path(path).name.removesuffix(".tmp")] = (Path(path).stat().st_size, stream.crc32)


class Sources(SavePlanner):
    """Where DCP's writer finds the tensors of a plan that was made before."""

    def __init__(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        self.tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensors[write_item.index]

    def _made_before(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the plan was made before")

    set_up_planner = create_local_plan = create_global_plan = finish_plan = _made_before


def build_writer(folder: Path) -> tuple[FileSystemWriter, ChecksummedFiles]:
    writer = FileSystemWriter(str(folder), sync_files=True)
    writer.fs = ChecksummedFiles()
    return writer, writer.fs


def write_tensors(folder: Path, save_plan: SavePlan, tensors: dict[MetadataIndex, Tensor]) -> Written:
    """This rank's file, flushed to the disk. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not save_plan.items:
        return Written([], {})
    writer, fs = build_writer(folder)
    results = writer.write_data(save_plan, Sources(tensors)).value()
    return Written(results, fs.files)


class Finisher:
    """Completes checkpoints, and keeps the metadata of the last: at 4,096 ranks it takes seconds to make."""

    def __init__(self) -> None:
        self.metadata, self.entry = b"", (0, 0)  # its bytes; their number and CRC-32

    def finish(self, target: Path, order: Finish) -> None:
        """Metadata, configuration, manifest, then the name that makes it a checkpoint. Raises OSError."""
        unfinished = target.with_name(target.name + INCOMPLETE)
        if order.described:
            metadata, results = order.described
            writer, fs = build_writer(unfinished)
            writer.finish(metadata, results)
            self.metadata, self.entry = (unfinished / METADATA).read_bytes(), fs.files[METADATA]
        else:
            with replacing(unfinished / METADATA) as beside:
                beside.write_bytes(self.metadata)
        (unfinished / "config.toml").unlink(missing_ok=True)
        text = order.config_toml
        write_durably(unfinished / "config.toml", text)
        added = {METADATA: self.entry, "config.toml": (len(text.encode()), zlib.crc32(text.encode()))}
        write_manifest(unfinished, order.about, order.files | added)
        sync_folder(unfinished)
        os.replace(unfinished, target)
        sync_folder(target.parent)
        prune(target.parent, order.keep)


# -- host memory that is reused ----------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in the arena."""

    index: MetadataIndex
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def slots_of(tensors: dict[MetadataIndex, Tensor]) -> tuple[list[Slot], int]:
    """One slot a tensor, and the bytes that all take."""
    slots, offset = [], 0
    for index, tensor in tensors.items():
        slots.append(Slot(index, offset, tuple(tensor.shape), tensor.dtype))
        offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    return slots, offset


def view(memory: mmap.mmap, slot: Slot) -> Tensor:
    """A tensor over its slot; it has a storage of its own, which is what torch.save writes."""
    count = torch.Size(slot.shape).numel()
    if not count:
        return torch.empty(slot.shape, dtype=slot.dtype)
    return torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset).view(slot.shape)


class Arena:
    """The copies of one rank's part of a checkpoint; pinned where a GPU copies into them."""

    def __init__(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        self.slots, size = slots_of(tensors)
        self.size = max(size, ALIGNMENT)
        self.descriptor = os.memfd_create("rossby-checkpoint")
        os.ftruncate(self.descriptor, self.size)
        # Populated now: otherwise the first copy would fault in page after page.
        self.memory = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.copies = [view(self.memory, slot) for slot in self.slots]
        self.pinned = any(tensor.is_cuda for tensor in tensors.values())
        if self.pinned:
            self.address = self.copies[0].data_ptr() - self.slots[0].offset
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostRegister(self.address, self.size, 0))

    def release(self) -> None:
        """After the last copy: to the driver, memory that goes while it is pinned stays pinned."""
        if self.pinned:
            cudart: Any = torch.cuda.cudart()
            torch.cuda.check_error(cudart.cudaHostUnregister(self.address))
        self.copies.clear()
        os.close(self.descriptor)

    @torch.no_grad()
    def fill(self, tensors: dict[MetadataIndex, Tensor]) -> None:
        """Copies; from a GPU without waiting for it."""
        sources = [tensors[slot.index] for slot in self.slots]
        if not sources:
            return  # another replica writes it all
        # One call, so that the interpreter is free meanwhile.
        torch._foreach_copy_(self.copies, sources, non_blocking=True)  # type: ignore[reportPrivateImportUsage]


class Copying:
    """An arena being filled beside the training: on a CUDA stream of its own, or in a thread."""

    def __init__(self, arena: Arena, tensors: dict[MetadataIndex, Tensor]) -> None:
        self.event: Any = None
        self.thread = threading.Thread(target=arena.fill, args=(tensors,), daemon=True)
        if not arena.pinned:
            self.thread.start()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            arena.fill(tensors)
        self.event = stream.record_event()

    def before_update(self) -> None:
        """What is queued on the device after this comes after the copies; the host does not wait."""
        self.event.wait() if self.event else self.thread.join()

    def on_host(self) -> None:
        """Until the bytes are there."""
        self.event.synchronize() if self.event else self.thread.join()


# -- the second process ------------------------------------------------------------------------------


@contextmanager
def without_interrupts() -> Iterator[None]:
    """What is started in it never hears a Ctrl-C, not even while it imports: the trainer saves first."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class WriterProcess:
    """Started with the run, so that its imports do not fall into the first save."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        # Not with -m: what it sends would then be of classes in its __main__.
        program = "from checkpoints.writer import main; main()"
        command = [sys.executable, "-c", program, str(theirs.fileno()), str(os.getpid())]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with without_interrupts():
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()
        self.connection = Connection(ours.detach())

    def give(self, arena: Arena, save_plan: SavePlan) -> None:
        """What every save from now on writes, and where it lies."""
        self.connection.send(("arena", (arena.size, arena.slots, save_plan)))
        reduction.send_handle(self.connection, arena.descriptor, self.process.pid)

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Waits for the answer. Raises what the writer raised, or RuntimeError when it is gone."""
        try:
            self.connection.send((verb, arguments))
            answer = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait()
            raise RuntimeError(f"the process that writes checkpoints ended with code {code}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        """With no save in flight."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def end_with(parent: int) -> None:
    """An orphan must not go on writing beside the run that was started again."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it died before that


def serve(connection: Connection) -> None:
    """Answers until the trainer closes the connection."""
    tensors, save_plan, finisher = {}, SavePlan([]), Finisher()
    while True:
        try:
            verb, arguments = connection.recv()
        except EOFError:
            return
        if verb == "arena":
            size, slots, save_plan = arguments
            descriptor = reduction.recv_handle(connection)
            memory = mmap.mmap(descriptor, size)
            os.close(descriptor)
            tensors = {slot.index: view(memory, slot) for slot in slots}
            continue
        try:
            writes = verb == "write"
            connection.send(
                write_tensors(arguments[0], save_plan, tensors) if writes else finisher.finish(*arguments)
            )
        except Exception as error:  # the trainer says it; the writer waits for the next save
            connection.send(OSError(str(error)) if isinstance(error, OSError) else RuntimeError(repr(error)))


def main() -> None:
    """The second process: its arguments are an inherited socket and the trainer's process number."""
    end_with(parent=int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the trainer decides, and may still want its last save
    os.nice(10)  # training goes first
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
