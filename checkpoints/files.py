"""The folder of a run's checkpoints: what is complete, what is damaged, what may go.

    checkpoints/step-00000100/        complete: it has its final name, its manifest was written before that
                step-00000200.incomplete/   being written, or left by a run that was killed meanwhile
                step-00000050.deleting/     the same of one that is being removed
                step-00000100.damaged/      set aside when its bytes were not those of its manifest

A checkpoint is one of torch.distributed.checkpoint, with the run's `config.toml` and a `manifest.json` that
names every file with its size and CRC-32. Nothing in it is code: `.metadata`, which is a pickle, is read
through a list of the few classes that it needs.
"""

import fcntl
import json
import logging
import os
import pickle
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from errors import ConfigError, DataError
from jobs.durable_files import write_durably

logger = logging.getLogger(__name__)
COMPLETE = re.compile(r"step-(\d{8})$")
INCOMPLETE, DELETING, DAMAGED = ".incomplete", ".deleting", ".damaged"
OURS = re.compile(rf"step-\d{{8}}({INCOMPLETE}|{DELETING}|{DAMAGED}(-again)*)?$")
MANIFEST = "manifest.json"
CHUNK = 2**24  # bytes read at once for a checksum

# What the metadata of tensors is made of; a class more would be a way to run code.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "bfloat16", "bool", "float16", "float32", "float64", "int32", "int64", "int8", "uint8"},
    "pathlib": {"PosixPath"},  # in DCP's own checkpoints: where they were written
}


class Damaged(DataError):
    """A checkpoint that cannot be trusted: `file` and why."""


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, oldest first. Links and files of such a name are not
    ours.
    """
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := COMPLETE.match(path.name))]
    return sorted(int(match[1]) for match, path in named if is_own(path))


def is_own(path: Path) -> bool:
    """Whether a run may have made this entry among checkpoints: a folder, and no link to one elsewhere."""
    return path.is_dir() and not path.is_symlink()


def candidates(path: Path) -> Iterator[Path]:
    """Checkpoints that a path may mean, best first: itself, those of a folder, those of a run's folder."""
    for folder in (path, path / "checkpoints"):
        if (folder / ".metadata").exists():
            yield folder
        yield from (step_folder(folder, step) for step in reversed(complete_steps(folder)))


def check_steps(folder: Path, steps: int) -> None:
    """ConfigError when a folder already holds more steps than the run asks for: it would train nothing."""
    done = complete_steps(folder)
    if done and done[-1] > steps:
        raise ConfigError(
            f"training.steps = {steps}: {folder} already holds step {done[-1]}; "
            "ask for more steps, choose another job.dump_folder, or remove that folder"
        )


# -- the manifest ------------------------------------------------------------------------------------


def crc32_of(path: Path) -> int:
    """CRC-32 of a file's bytes: 4 GiB/s, and it sees every single flipped bit."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def write_manifest(folder: Path, about: dict[str, Any], files: dict[str, tuple[int, int]]) -> None:
    """`files`: name -> (bytes, CRC-32), as they were written, not as they are read back."""
    body = about | {"files": {name: {"bytes": size, "crc32": crc} for name, (size, crc) in files.items()}}
    text = json.dumps(body, indent=1)
    write_durably(folder / MANIFEST, json.dumps({"crc32": zlib.crc32(text.encode())}) + "\n" + text)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises Damaged, with the file's name, where there is none or it is not what was written."""
    path = folder / MANIFEST
    try:
        first, _, text = path.read_text().partition("\n")
        if json.loads(first)["crc32"] != zlib.crc32(text.encode()):
            raise Damaged(f"{path}: its checksum is not the one written in it")
        return json.loads(text)
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, Damaged) else Damaged(f"{path}: cannot be read ({error})") from None


def check_file(folder: Path, name: str, expected: dict[str, int]) -> None:
    """Raises Damaged where a file is not the one that the manifest describes."""
    path = folder / name
    if not path.is_file():
        raise Damaged(f"{path}: is missing")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise Damaged(f"{path}: has {size} bytes, {expected['bytes']} were written")
    if crc32_of(path) != expected["crc32"]:
        raise Damaged(f"{path}: its bytes are not those that were written (CRC-32)")


def check_files(folder: Path, manifest: dict[str, Any], part: int = 0, parts: int = 1) -> None:
    """Raises Damaged for the first bad file of this rank's part; what may not be unpickled is bad too."""
    for name, expected in sorted(manifest["files"].items())[part::parts]:
        check_file(folder, name, expected)
    if part == 0:
        stored_tensors(folder)


# -- metadata without code ---------------------------------------------------------------------------


class MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of ALLOWED and refuses every other by name."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"carries {module}.{name}, which is not the description of a tensor")


def read_metadata(file: IO[bytes], path: Path) -> Metadata:
    """DCP's metadata of tensors. Raises Damaged, with what it carries, for anything else."""
    try:
        metadata = MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"is a {type(metadata).__name__}")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"{name} is no tensor")
    except Exception as error:  # a broken pickle raises whatever its bytes happen to call
        raise Damaged(f"{path}: refused: {error}") from None
    return metadata


class TensorReader(FileSystemReader):
    """DCP's reader, for tensors only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        with path.open("rb") as file:
            metadata = read_metadata(file, path)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def stored_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Name -> shape and type of every tensor in a checkpoint."""
    return TensorReader(str(folder)).read_metadata().state_dict_metadata  # type: ignore[return-value]


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fills tensors, which may be a rank's parts, from a checkpoint. DataError where one does not fit.

    Without a word to other ranks: torch's own load gathers names and plans of all on rank 0.
    """
    reader, planner = TensorReader(str(folder)), DefaultLoadPlanner(flatten_state_dict=False)
    metadata = reader.read_metadata()
    for name, tensor in tensors.items():
        stored = metadata.state_dict_metadata.get(name)
        if stored is None:
            raise DataError(f"{folder}: has no {name}; another model; choose another job.dump_folder")
        if stored.size != tensor.shape:  # type: ignore[union-attr]
            shapes = f"{list(stored.size)} there and {list(tensor.shape)} in this configuration"  # type: ignore[union-attr]
            raise DataError(f"{folder}: {name} is {shapes}; choose another job.dump_folder")
    planner.set_up_planner(dict(tensors), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


# -- what may go, and when ---------------------------------------------------------------------------


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """While this lasts, no run that prunes its checkpoints takes this one away."""
    if not (folder / MANIFEST).exists():
        yield  # written by another program: no run of ours prunes it
        return
    with (folder / MANIFEST).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def remove(folder: Path) -> bool:
    """Renames, then deletes, so that what has a checkpoint's name is whole. False: somebody reads it."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        return False  # not one of ours, or damaged: neither is ours to delete
    with manifest.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        doomed = folder.with_name(folder.name + DELETING)
        os.replace(folder, doomed)
    shutil.rmtree(doomed)
    return True


def prune(folder: Path, keep: int) -> None:
    """All but the newest `keep` complete checkpoints; 0 keeps all."""
    for step in complete_steps(folder)[:-keep] if keep else []:
        remove(step_folder(folder, step))


def clear_leftovers(folder: Path) -> None:
    """What a killed run left half written or half deleted; what no run has made is named and left alone."""
    for path in sorted(folder.iterdir()):
        if not is_own(path) or not OURS.match(path.name):
            logger.warning("%s: is no checkpoint of this run (a link, or a stranger); left alone", path)
        elif path.name.endswith((INCOMPLETE, DELETING)):
            logger.warning("%s: left by a run that was stopped meanwhile; removed", path)
            shutil.rmtree(path)


def set_aside(folder: Path) -> Path:
    """Out of the way of resuming, and kept for whoever wants to look at it."""
    aside = folder.with_name(folder.name + DAMAGED)
    while aside.exists():
        aside = aside.with_name(aside.name + "-again")
    os.replace(folder, aside)
    return aside
