"""Messages between ranks are plain data: a crafted pickle cannot run code."""

import copyreg
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.metadata import MetadataIndex

from errors import DataError
from jobs.watchdog import Heartbeat
from parallelisms.peer_messages import use_plain_messages


class Command:
    def __init__(self, function, *arguments) -> None:
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def received(value: object) -> object:
    """As torch's collectives read what another rank has sent."""
    use_plain_messages()
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    group = dist.group.WORLD
    return distributed_c10d._tensor_to_object(content, content.numel(), group)


@pytest.mark.parametrize("function", [os.system, subprocess.Popen, exec, eval, getattr, np.load, torch.load])
def test_a_pickle_that_would_run_something_is_refused(one_rank, tmp_path, function):
    with pytest.raises(pickle.UnpicklingError, match="contains .*which is not plain data"):
        received([1, Command(function, f"touch {tmp_path}/ran")])
    assert not list(tmp_path.iterdir())


def test_plain_data_are_read(one_rank, monkeypatch):
    for kind, reduce in list(copyreg.dispatch_table.items()):
        if reduce.__module__.startswith("tblib"):  # of Dask, for all of a process that has imported it
            monkeypatch.delitem(copyreg.dispatch_table, kind)
    index = MetadataIndex("weight", torch.Size([2]))
    values = [1, "a", {"b": (2.5, None)}, Path("c"), index, Heartbeat(3), torch.bfloat16]
    values.append(FileNotFoundError(2, "gone"))
    assert repr(received(values)) == repr(values)
    shape = torch.empty(2, 3, device="meta")  # of what a stage of a pipeline gives, on torch 2.11
    assert received(shape).shape == shape.shape  # type: ignore[attr-defined]
    array = received(np.arange(3, dtype=np.float32))
    assert isinstance(array, np.ndarray) and array.tolist() == [0, 1, 2]
    dates = received(np.array(["2020-01-01"], "datetime64[s]"))
    assert isinstance(dates, np.ndarray) and str(dates[0]) == "2020-01-01T00:00:00"
    error = received(DataError("a line"))
    assert isinstance(error, DataError) and str(error) == "a line"


def test_an_exception_is_plain_data_where_dask_was_imported(one_rank) -> None:
    """tblib registers a function of its own for every exception, in the whole process."""
    pytest.importorskip("tblib.pickling_support").install()
    use_plain_messages()
    sent, size = distributed_c10d._object_to_tensor(OSError(28, "no space"), "cpu", dist.group.WORLD)
    error = distributed_c10d._tensor_to_object(sent, size, dist.group.WORLD)
    assert isinstance(error, OSError) and error.errno == 28
