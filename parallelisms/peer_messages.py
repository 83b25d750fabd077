"""Messages between ranks other than tensors: plain data that cannot run code.

torch's object collectives use pickle, and anyone with access to a rank's socket could send a pickle. After
`use_plain_messages` they carry numbers, text, containers and arrays, and the dataclasses, enumerations and
errors of this project, of torch's checkpoints and of its pipelines; every other name is refused.
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
    "torch._utils": {"_rebuild_meta_tensor_no_storage"},  # a shape, between stages on torch 2.11
}
DTYPES = ("float", "bfloat", "int", "uint", "bool", "complex")
FOLDERS = tuple(f"{path.parent.name}." for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
HOMES = ("torch.distributed.checkpoint.", "torch.distributed.pipelining.", *FOLDERS)


class PeerPickler(pickle.Pickler):
    """Pickler of plain data. dask's tblib would otherwise pickle each exception as a call of its function."""

    def reducer_override(self, obj: Any) -> Any:
        return type(obj).__reduce__(obj) if isinstance(obj, BaseException) else NotImplemented


class PeerUnpickler(pickle.Unpickler):
    """Unpickler of plain data. Raises UnpicklingError, with the name, for anything else."""

    def find_class(self, module: str, name: str) -> Any:
        if name in NAMES.get(module, ()) or (module == "torch" and name.startswith(DTYPES)):
            return super().find_class(module, name)
        if module.startswith(HOMES) or module in ("errors", "builtins"):
            kind = super().find_class(module, name)
            if is_plain(kind):
                return kind
        raise pickle.UnpicklingError(f"contains {module}.{name}, which is not plain data: refused")


def is_plain(kind: Any) -> bool:
    """Return True for a class of data alone."""
    if not isinstance(kind, type):
        return False
    if issubclass(kind, BaseException):
        is_ours = issubclass(kind, UserError | RunFailed | CheckpointException)
        return kind.__module__ == "builtins" or is_ours
    return dataclasses.is_dataclass(kind) or issubclass(kind, Enum)


def use_plain_messages() -> None:
    """Replace the pickler of all object collectives of this process."""
    distributed_c10d._pickler, distributed_c10d._unpickler = PeerPickler, PeerUnpickler
