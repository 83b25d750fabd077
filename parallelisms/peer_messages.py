"""What ranks tell each other beside tensors: plain data, and nothing that runs code when it is read.

torch's object collectives pickle, and whoever reaches a rank's socket could send a pickle of his own. From
`read_plainly` on they make numbers, text, containers and arrays, and the dataclasses, enumerations and errors
of this project, of torch's checkpoints and of its pipelines; every other name is refused.
"""

import dataclasses
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException

from errors import RunFailed, UserError

ROOT = Path(__file__).parent.parent
NAMES = {
    "builtins": {"set", "frozenset", "complex", "bytearray", "slice", "range"},
    "collections": {"OrderedDict", "deque"},
    "datetime": {"date", "datetime", "timedelta"},
    "pathlib": {"PosixPath", "Path"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "torch": {"Size", "device", "strided", "contiguous_format"},
    "torch.serialization": {"_get_layout"},
    "traceback": {"StackSummary", "FrameSummary"},  # of an error that DCP sends to all ranks
    "torch._utils": {"_rebuild_meta_tensor_no_storage"},  # a shape: what stages ask each other on torch 2.11
}
FOLDERS = tuple(f"{path.parent.name}." for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
HOMES = ("torch.distributed.checkpoint.", "torch.distributed.pipelining.", *FOLDERS)


class PeerPickler(pickle.Pickler):
    """Pickler of plain data. tblib (of dask) would pickle every exception as a call of its own function."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, BaseException):
            return type(obj).__reduce__(obj)
        return NotImplemented


class PeerUnpickler(pickle.Unpickler):
    """Raises UnpicklingError, naming it, for what is no plain data."""

    def find_class(self, module: str, name: str) -> Any:
        if name in NAMES.get(module, ()) or (module == "torch" and is_dtype(name)):
            return super().find_class(module, name)
        if module.startswith(HOMES) or module in ("errors", "builtins"):
            found = super().find_class(module, name)
            if is_plain(found):
                return found
        raise pickle.UnpicklingError(f"another rank sent {module}.{name}, which is no plain data: refused")


def is_plain(found: Any) -> bool:
    """Whether a class holds data alone."""
    if not isinstance(found, type):
        return False
    if issubclass(found, BaseException):
        return found.__module__ == "builtins" or issubclass(
            found, UserError | RunFailed | CheckpointException
        )
    return dataclasses.is_dataclass(found) or issubclass(found, Enum)


def is_dtype(name: str) -> bool:
    return name.startswith(("float", "bfloat", "int", "uint", "bool", "complex"))


def read_plainly() -> None:
    """For all object collectives of this process."""
    distributed_c10d._pickler, distributed_c10d._unpickler = PeerPickler, PeerUnpickler
