"""The folder of a run's checkpoints: names, manifest, checks, reading, removal.

    checkpoints/step-00000100/             complete: a checkpoint has this name only when it is on the disk
                step-00000200.incomplete/  being written, or left by a run that was killed
                step-00000050.deleting/    being removed, or left by a run that was killed
                step-00000100.damaged/     set aside because a file is not the one of its manifest

A checkpoint is a folder of torch.distributed.checkpoint (DCP) with the run's `config.toml` and a
`manifest.json`, which has size and CRC-32 of every file. DCP's `.metadata` is a pickle: it is read as
messages between ranks are, without code. An exported model (checkpoints/export.py) has
`model.safetensors` instead of DCP's files.
"""

import fcntl
import io
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from errors import DataError, RunFailed, as_user_error, require
from jobs.durable_files import write_durably
from parallelisms.mesh import copy_part
from parallelisms.peer_messages import PeerUnpickler

logger = logging.getLogger(__name__)
COMPLETE = re.compile(r"step-(\d{8})$")
INCOMPLETE, DELETING, DAMAGED = ".incomplete", ".deleting", ".damaged"
OWN_NAME = re.compile(rf"step-\d{{8}}({INCOMPLETE}|{DELETING}|{DAMAGED}(-again)*)?$")
MANIFEST, METADATA, WEIGHTS = "manifest.json", ".metadata", "model.safetensors"
BEST = "best.json"
CHUNK = 2**24  # bytes read at once for a checksum
Files = dict[str, tuple[int, int]]  # name -> bytes, CRC-32


class Damaged(DataError):
    """Error of a damaged checkpoint: file and reason."""


class Missing(Damaged):
    """Error of a file that this rank does not see."""


class Unreadable(RunFailed):
    """Error of the disk or the network, which says nothing about the file and may pass."""


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Convert an error of reading to one line: DataError without permission, Missing for a file that is not
    there, Unreadable for every other failure of the disk (ESTALE, EIO, EMFILE), Damaged for other content.
    """
    try:
        yield
    except PermissionError as error:
        raise as_user_error(error, path) from None
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Missing(f"{error.filename or path}: cannot be read: {error.strerror or error}") from None
    except OSError as error:
        reason = f"cannot be read now: {error.strerror or error}"
        raise Unreadable(f"{error.filename or path}: {reason}; start again when that is repaired") from None
    except SafetensorError as error:
        raise Damaged(f"{path}: cannot be read: {error}") from None


# -- names ---------------------------------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, METADATA, WEIGHTS))


def complete_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending. Ignores links, files and folders
    that lack files of a checkpoint.
    """
    steps = []
    with read_errors(folder):
        for path in folder.iterdir() if folder.is_dir() else ():
            match = COMPLETE.match(path.name)
            if match and path.is_dir() and not path.is_symlink() and is_checkpoint(path):
                steps.append(int(match[1]))
    return sorted(steps)


def candidates(path: Path) -> Iterator[Path]:
    """Yield the checkpoints that a path may mean, best first: itself, those in it, those of a run; for the
    folder "best" of a run the one that `checkpoint.keep_best` has kept.
    """
    if (path / BEST).is_file():
        step = read_best(path.absolute().parent).get("step", -1)
        path = step_folder(path.absolute().parent / "checkpoints", step)
    for folder in (path, path / "checkpoints"):
        if is_checkpoint(folder):
            yield folder
        yield from (step_folder(folder, step) for step in reversed(complete_steps(folder)))


def read_best(run: Path) -> dict[str, Any]:
    """Return the record of the best checkpoint of a run (training/validator.py); {} if there is none, and
    with a warning if it cannot be read.
    """
    file = run / "best" / BEST
    try:
        best = json.loads(file.read_text())
        if isinstance(best["step"], int) and isinstance(best["value"], float | int):
            return best
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    logger.warning("%s: is damaged; the best checkpoint is not known", file)
    return {}


def check_steps(folder: Path, steps: int, saves: bool) -> None:
    """Raise ConfigError if a folder has more steps than the run asks for (nothing would be trained), or has
    checkpoints and the run saves none (it would start over and replace their records).
    """
    last = max(complete_steps(folder), default=0)
    reason = f"{folder} has checkpoints up to step {last}, and this run would start over"
    require(saves or not last, "checkpoint.enable", False, f"{reason}; choose another job.dump_folder")
    reason = f"{folder} already has step {last}; ask for more steps, choose another job.dump_folder, or "
    require(last <= steps, "training.steps", steps, f"{reason}remove that folder")


# -- the manifest --------------------------------------------------------------------------------------


def crc32_of(path: Path) -> int:
    """Compute the CRC-32 of a file: 4 GiB/s, and every single flipped bit changes it."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def write_manifest(folder: Path, about: dict[str, Any], files: Files) -> None:
    """files: as they were written, not as they are read back. Raises OSError."""
    body = about | {"files": {name: {"bytes": size, "crc32": crc} for name, (size, crc) in files.items()}}
    text = json.dumps(body, indent=1)
    write_durably(folder / MANIFEST, json.dumps({"crc32": zlib.crc32(text.encode())}) + "\n" + text)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return a manifest, with the "crc32" of its text. Raises Damaged, DataError without permission."""
    path = folder / MANIFEST
    with read_errors(path):
        first, _, text = path.read_bytes().partition(b"\n")
    try:
        crc32 = json.loads(first)["crc32"]
        if crc32 != zlib.crc32(text):
            raise Damaged(f"{path}: its checksum is not the one written in it")
        return json.loads(text) | {"crc32": crc32}
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise Damaged(f"{path}: cannot be read ({error})") from None


def check_files(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Check the manifest and this rank's part of the files. Raises Damaged, DataError without permission."""
    with lock(folder), read_errors(folder):
        for name, expected in sorted(read_manifest(folder)["files"].items())[part::parts]:
            path = folder / name
            if not path.is_file():
                raise Missing(f"{path}: is missing")
            if (size := path.stat().st_size) != expected["bytes"]:
                raise Damaged(f"{path}: has {size} bytes, {expected['bytes']} were written")
            if crc32_of(path) != expected["crc32"]:
                raise Damaged(f"{path}: its bytes are not those that were written (CRC-32)")
        if part == 0:  # the classes in .metadata
            stored_tensors(folder)


# -- reading -------------------------------------------------------------------------------------------


class TensorReader(FileSystemReader):
    """DCP's reader, for tensors only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, without code that it may contain. Raises Damaged for any but that of tensors."""
        path = Path(self.path) / METADATA
        with read_errors(path):
            content = path.read_bytes()
        try:
            metadata = PeerUnpickler(io.BytesIO(content)).load()
            entries = metadata.state_dict_metadata
            names = [name for name, entry in entries.items() if not isinstance(entry, TensorStorageMetadata)]
        except Exception as error:  # a damaged pickle can raise any error
            raise Damaged(f"{path}: refused: {error}") from None
        if names:
            raise Damaged(f"{path}: refused: {names[0]} is no tensor")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape and type of every tensor in a checkpoint, by name. Raises Damaged."""
    weights = folder / WEIGHTS
    if not weights.exists():
        return TensorReader(str(folder)).read_metadata().state_dict_metadata  # type: ignore[return-value]
    with read_errors(weights), safe_open(weights, "pt") as file:
        shapes = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}
    kind = TensorProperties(torch.float32)
    return {f"model.{name}": TensorStorageMetadata(kind, shape, []) for name, shape in shapes.items()}


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, which may be shards, from a checkpoint. Raises DataError where one does not fit."""
    # -- names and shapes
    stored = stored_tensors(folder)
    for name, tensor in tensors.items():
        if name not in stored:
            raise DataError(f"{folder}: has no {name}; take the [model] of that run")
        if stored[name].size != tensor.shape:
            shapes = f"{list(stored[name].size)} there and {list(tensor.shape)} in this configuration"
            raise DataError(f"{folder}: {name} is {shapes}; take the [model] of that run")
    # -- an exported model
    weights = folder / WEIGHTS
    if weights.exists():
        with read_errors(weights), safe_open(weights, "pt") as file:
            for name, tensor in tensors.items():
                copy_part(tensor, file.get_tensor(name.removeprefix("model.")))
        return
    # -- a checkpoint of DCP: this rank reads what it needs; dcp.load gathers names and plans of all on rank 0
    reader, planner = TensorReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with lock(folder), read_errors(folder):
        reader.read_data(planner.create_local_plan(), planner).wait()


def lock(folder: Path) -> BinaryIO:
    """Prevent a checkpoint from being pruned until the result is closed. Raises Damaged if it is missing."""
    path = folder / MANIFEST
    with read_errors(path):
        file = path.open("rb")
    with suppress(OSError):  # of a file system without locks
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


# -- removal -------------------------------------------------------------------------------------------


def remove(folder: Path, even_if_read: bool = False) -> None:
    """Rename, then delete a checkpoint, unless a process reads it. Raises OSError."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return  # damaged
    doomed = folder.with_name(folder.name + DELETING)
    with manifest.open("rb+") as file:  # NFS gives an exclusive lock to a writer alone
        try:
            if not even_if_read:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("%s: cannot be locked (%s); removed all the same", folder, error)
        os.replace(folder, doomed)  # so that only whole checkpoints have the name of one
    shutil.rmtree(doomed, ignore_errors=even_if_read)  # NFS keeps open files until the next start


def prune(folder: Path, keep: int, spared: int = -1) -> None:
    """Remove all but the newest `keep` complete checkpoints and the one of step `spared`; 0 keeps all."""
    for step in complete_steps(folder)[:-keep] if keep else []:
        if step != spared:
            remove(step_folder(folder, step))


def clear_leftovers(folder: Path) -> None:
    """Make the folder of a run's checkpoints, and delete those that a killed run was writing or deleting; log
    entries that no run has made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir() or not OWN_NAME.match(path.name):
            logger.warning("%s: was not made by a run; left alone", path)
        elif path.name.endswith((INCOMPLETE, DELETING)):
            logger.warning("%s: left by a run that was stopped; removed", path)
            shutil.rmtree(path)
        # A save needs the name of its step, which an interrupted removal may have left.
        elif COMPLETE.match(path.name) and not any(path.iterdir()):
            path.rmdir()
        elif COMPLETE.match(path.name) and not is_checkpoint(path):
            logger.warning("%s: lacks files of a checkpoint%s", path, set_aside(path))


def set_aside(folder: Path) -> str:
    """Rename a damaged checkpoint, so that no run resumes from it; its files stay for inspection. Return the
    end of a message: the new name, or that another process has removed it. Raises OSError.
    """
    aside = folder.with_name(folder.name + DAMAGED)
    while aside.exists():
        aside = aside.with_name(aside.name + "-again")
    try:
        os.replace(folder, aside)
    except FileNotFoundError:
        return "; removed by another process"
    return f"; set aside as {aside}"
