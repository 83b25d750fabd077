"""Replicas of a run that leave and rejoin while the others go on (torchft, an extra).

Each replica is a run of its own, with its own ranks, mesh and folder. Before a step the replicas that are
there form a quorum, which a lighthouse keeps; after backward they average their gradients; then each asks
whether all went well. If not, nothing is updated and the step is taken again with those that are left. One
that comes back takes over the state of another, rank by rank, and goes on at its step.
"""

import importlib
import logging
import os
import re
import socket
import sys
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from config import FaultTolerance
from errors import ConfigError, RunFailed
from parallelisms.mesh import from_first_rank
from traces.profiler import span

logger = logging.getLogger(__name__)
TORCHFT = "torchft==0.2.0"
BUCKET = 2**26  # bytes of gradients that are averaged at once; as much is held twice
RETRIES = 60  # of a lighthouse that does not answer, spread evenly over `patience`
REACH_SECONDS = 5.0  # a lighthouse may be started together with its replicas
State = dict[str, dict[str, Tensor]]  # part -> name -> what this rank holds of it


class ReplicaLost(RunFailed):
    """This replica cannot go on; started again, it takes over the state of the others."""


class Alone:
    """What the training loop asks of the other replicas where there are none."""

    index, number, present, saves = 0, 1, 1, True

    def begin_step(self, step: int) -> bool:
        return False

    def average(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> bool:
        return True

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Replicas:
    """What the training loop asks of the other replicas. All ranks of a replica call it together.

    settings: what has to be the same everywhere, key -> value. give, take: this rank's part of the run's
    state, for a replica that comes back, and in that replica. patience: seconds without a quorum that end
    this replica. timeout: seconds after which one that is silent in the middle of a step is given up.
    """

    def __init__(
        self,
        asked: FaultTolerance,
        settings: dict[str, Any],
        give: Callable[[], State],
        take: Callable[[State], None],
        patience: int,
        timeout: int,
        device: torch.device,
    ) -> None:
        torchft = import_torchft()
        self.asked, self.settings, self.give, self.take = asked, settings, give, take
        self.index, self.number = asked.replica_id, asked.group_size
        self.patience, self.device, self.lighthouse = patience, device, lighthouse_of(asked)
        group = torchft.ProcessGroupNCCL if device.type == "cuda" else torchft.ProcessGroupGloo
        self.group, limit = group(timeout=timedelta(seconds=timeout)), timedelta(seconds=timeout)
        self.store, (host, port) = start_store()
        self.manager = torchft.Manager(
            pg=self.group,
            state_dict=self._give,
            load_state_dict=self._take,
            checkpoint_transport=tensor_transport(limit),
            min_replica_size=asked.min_replica_size,
            use_async_quorum=False,  # who comes back takes part in the very next step, not with zeros
            timeout=limit,
            quorum_timeout=timedelta(seconds=patience),
            quorum_retries=RETRIES,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=port,
            lighthouse_addr=self.lighthouse,
            replica_id=f"replica_{asked.replica_id:06d}",  # sorted as text
        )
        self.present = 0  # replicas that take part in the step
        self.saves = False  # whether this is the one of them that saves checkpoints
        self.started = False  # whether the run goes on already: then nobody waits for those that are missing
        self.has_quorum = False

    # -- what the loop calls -------------------------------------------------------------------------

    def set_step(self, step: int) -> None:
        """The steps that this replica's own checkpoint has; of all replicas the farthest one counts."""
        self.manager.load_state_dict({"step": step, "batches_committed": 0})

    def begin_step(self, step: int) -> bool:
        """Agrees on who takes part in the step after `step` steps.

        True: the others went on without this replica, and its state is now theirs. The first step waits for
        all replicas, for `patience` seconds. Asked again before the step is committed, it answers the same.
        ConfigError: another replica's settings are not these. ReplicaLost: no quorum.
        """
        with span("replicas"):
            self._gather()
        return self.manager.current_step() != step

    def _gather(self) -> None:
        if not self.has_quorum:
            self._form_quorum()
        waited, pause = 0.0, 0.2
        while self._too_few(waited):
            # One quorum serves all replicas in it, and so they count and decide alike.
            time.sleep(pause)
            waited, pause, before = waited + pause, min(2 * pause, 5.0), self.present
            self._form_quorum()
            if self.present != before:
                waited, pause = 0.0, 0.2
        self.started = True

    def average(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> bool:
        """Makes the loss and all gradients their means over the replicas present, in place.

        False: a replica was lost meanwhile and they hold anything; the step has to be taken again.
        """
        with span("replicas"):
            self._average(loss, parameters)
            return self._commit()

    @torch.no_grad()
    def _average(self, loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        gradients = [local(p.grad) for p in parameters if p.grad is not None]
        for bucket in buckets([loss, *gradients], BUCKET):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            self.manager.allreduce(flat).wait()
            for tensor, mean in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def _commit(self) -> bool:
        """Whether the means are good on all ranks of this replica."""
        error = self.manager.errored()
        if error:
            self.group.abort()  # who waits for this replica learns of it now and not after the timeout
        self.has_quorum = False
        if self.manager.should_commit():
            return True
        self._check_steps()
        step = self.manager.current_step() + 1
        reason = brief(error.original_exception) if error else "said another rank"
        logger.warning("a replica was lost in step %d, which is taken again (%s)", step, reason)
        return False

    def finish(self) -> None:
        """After the last step: whoever missed it takes it over before the others go."""
        try:
            if not self.has_quorum:
                self._form_quorum()
            self.manager.allreduce(torch.zeros(1, device=self.device)).wait()
        except ReplicaLost as error:
            logger.warning("the run is complete, but %s", error)
        self.close()

    def close(self) -> None:
        """Leaves at once; the others miss this replica after the lighthouse's heartbeat timeout."""
        self.manager.shutdown(wait=False)

    # -- how -----------------------------------------------------------------------------------------

    def _form_quorum(self) -> None:
        try:
            self.manager.start_quorum()
        except (RuntimeError, TimeoutError) as error:
            reason = f"no quorum within {self.patience} s ({brief(error)})"
            raise ReplicaLost(f"fault_tolerance.lighthouse = {self.lighthouse!r}: {reason}") from error
        self.has_quorum, failure = True, self.manager.errored()
        if failure and self.group._pg is not None:  # it is connected: what failed is taking over
            reason = brief(failure.original_exception)
            raise ReplicaLost(
                f"the state of the other replicas did not arrive ({reason}); start this one again"
            )
        present = self.manager.num_participants()
        if present != self.present:
            logger.info("%d of %d replicas are here", present, self.asked.group_size)
        self.present, self.saves = present, self.manager.participating_rank() == 0

    def _too_few(self, waited: float) -> bool:
        least, all_of_them = self.asked.min_replica_size, self.asked.group_size
        if self.present < least and waited >= self.patience:
            reason = f"{self.present} replica(s) after {self.patience} s"
            raise ReplicaLost(f"fault_tolerance.min_replica_size = {least}: {reason}")
        if self.started or waited >= self.patience:
            return self.present < least
        return self.present < all_of_them

    def _give(self) -> dict[str, Any]:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # this is torchft's thread; the optimiser may not be done yet
        return {"settings": self.settings, "started": self.started, "state": self.give()}

    def _take(self, theirs: dict[str, Any]) -> None:
        for key, value in theirs["settings"].items():
            if self.settings.get(key) != value:
                reason = f"another replica has {value!r}; start all of them with one configuration"
                raise ConfigError(f"{key} = {self.settings.get(key)!r}: {reason}")
        self.take(theirs["state"])
        self.started |= theirs["started"]
        logger.info("took over the state of another replica after step %d", self.manager.current_step())

    def _check_steps(self) -> None:
        """One rank may have taken over a state and another failed to: there is no way on from there."""
        steps = [0] * dist.get_world_size()
        dist.all_gather_object(steps, self.manager.current_step())
        if len(set(steps)) > 1:
            raise ReplicaLost(f"its ranks stand at different steps {steps}; start this replica again")


def brief(error: BaseException) -> str:
    """The first sentence, without the line of gloo's source that it comes from."""
    text = re.sub(r"^\[[^]]*\.cc:\d+\] *", "", str(error).strip()) or type(error).__name__
    return re.split(r"\.? This is|\n", text)[0][:160]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Neighbours of one type on one device, together at most `limit` bytes; a larger one alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(t.nbytes for t in bucket) + tensor.nbytes
        if bucket and (size > limit or (tensor.dtype, tensor.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def start_store() -> tuple[list[TCPStore], tuple[str, int]]:
    """A store of this replica's own, which rank 0 keeps and other replicas meet in; its host and port.

    The launcher's will not do: a single process has none, and other nodes may not reach it.
    """
    kept: list[TCPStore] = []

    def start() -> tuple[str, int]:
        kept.append(TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False))
        return socket.gethostname(), kept[0].port

    return kept, from_first_rank(start)


def tensor_transport(timeout: timedelta) -> Any:
    """torchft's transport over HTTP, which here reads tensors and plain data and never runs pickled code."""
    from torch.distributed._serialization import _streaming_load
    from torchft.checkpointing import HTTPTransport  # type: ignore[reportMissingImports]

    class TensorTransport(HTTPTransport):
        def __init__(self) -> None:
            super().__init__(timeout, num_chunks=0)
            self._server.RequestHandlerClass.log_message = lambda *_: None  # of every request, to stderr

        @classmethod
        def _load_from_address(cls, address: str, timeout: timedelta) -> object:
            with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as stream:
                return _streaming_load(stream, weights_only=True)

    return TensorTransport()


def import_torchft() -> ModuleType:
    """Here, because it is an extra; and quiet: what it has to say is said by this module, in one line each.

    By itself it logs every step, and errors with tracebacks, from Python as well as from Rust.
    """
    os.environ.setdefault("RUST_LOG", "error")  # it knows no "off"
    warnings.filterwarnings("ignore", message="The given buffer is not writable")  # of torch's own reader
    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    for name in ("torchft_quorums", "torchft_commits", "torchft_errors"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return importlib.import_module("torchft")


def lighthouse_of(asked: FaultTolerance) -> str:
    return asked.lighthouse or os.environ.get("TORCHFT_LIGHTHOUSE", "")


def check_replicas(asked: FaultTolerance) -> None:
    """ConfigError where torchft is missing or its lighthouse cannot be reached."""
    try:
        import_torchft()
    except ImportError as error:
        fix = f"{sys.executable} -m pip install {TORCHFT}"
        raise ConfigError(f"fault_tolerance.enable = True: needs torchft ({error}); {fix}") from error
    address, fix = lighthouse_of(asked), "start it with torchft_lighthouse --min_replicas 1"
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if not address.startswith("http://") or not host or not port:
        reason = f"expected http://host:port of torchft's lighthouse; {fix}"
        raise ConfigError(f"fault_tolerance.lighthouse = {address!r}: {reason}")
    if problem := unreachable(host, port):
        raise ConfigError(f"fault_tolerance.lighthouse = {address!r}: {problem}; {fix}")


def unreachable(host: str, port: int) -> str:
    """Why nothing answers there; empty when something does."""
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            socket.create_connection((host, port), timeout=REACH_SECONDS).close()
            return ""
        except OSError as error:
            if time.monotonic() > deadline:
                return f"does not answer ({error.strerror or error})"
            time.sleep(0.2)
