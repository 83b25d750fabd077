"""Starts the ranks of this host, forwards signals to them, restarts them after a crash, passes on exit codes.

    python -m jobs.launch --nproc_per_node 4 [--nnodes 1:2 --rdzv_endpoint host:port] train.py ...

torchrun's agent with other manners: SIGTERM and SIGUSR1 go to the ranks, which save and leave in their own
time; when a rank dies the others are told where it was and leave within seconds; the exit code is theirs.
0: done. 2: bad input. 75: saved, start it again (jobs/preemption.py). 1: failed.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from fcntl import ioctl
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous
from torch.distributed.launcher.api import LaunchConfig

from jobs.preemption import EXIT_SAVED, STOP_SIGNALS
from jobs.watchdog import announce, open_store, read_beats, read_verdict

DONE, FAILED, BAD_INPUT = 0, 1, 2
LEAVE_SECONDS = 8.0  # that ranks have to notice a dead one, to write their stacks, and to leave
SAVED_SECONDS = 60.0  # between the first and the last rank that leaves after a save
RESTART_SECONDS = 300.0  # that ranks have to save when hosts join
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def say(text: str) -> None:
    print(f"rossby: {text}", file=sys.stderr, flush=True)


def no_logs() -> DefaultLogsSpecs:
    """What ranks say goes where this process speaks; torch would make folders for it."""
    return DefaultLogsSpecs(log_dir=os.devnull)


class Agent(LocalElasticAgent):
    """torchrun's agent of one host. `code` is what the ranks ended with."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec, logs_specs=no_logs())
        self.torch_agent: Any = super()  # torch's decorators hide the types of its methods
        self.waiting = HostsWaiting(spec.rdzv_handler)
        self.store_server: TCPStore | None = None
        self.code, self.deadline, self.told_to_stop = DONE, 0.0, False

    # -- signals

    def forward(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGUSR1: the ranks save and leave; this process waits for them."""
        self.told_to_stop = True
        if not self._living():
            raise SignalException("no rank is running", signal.Signals(number))
        self._signal(signal.Signals(number))

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._living().values():
            worker.send_signal(number)

    def _workers(self) -> dict[int, Any]:
        """Local rank -> subprocess.Popen."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc for local_rank, handler in handlers.items()}

    def _living(self) -> dict[int, Any]:
        return {rank: worker for rank, worker in self._workers().items() if worker.poll() is None}

    # -- start

    def _rendezvous(self, worker_group: Any) -> None:
        """A store of its own for each attempt. Torch's keeps the keys of the attempt before; and its address
        is told once only, so that a host that joins later waits for it in vain (torch 2.13).
        """
        self.waiting.stop()
        os.environ[OWN_STORE] = "1"
        try:
            self.torch_agent._rendezvous(worker_group)
        finally:
            del os.environ[OWN_STORE]  # the ranks use the store made here
        if worker_group.group_rank == 0:
            address = worker_group.spec.local_addr or socket.getfqdn()
            self.store_server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            worker_group.store.set("rossby/store", f"{address} {self.store_server.port}")
        address, port = worker_group.store.get("rossby/store").decode().split()
        worker_group.master_addr, worker_group.master_port = address, int(port)
        self.waiting.start()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        """With the signals to stop held back, until each rank is ready to hear them: they would kill it."""
        self.code, self.deadline = DONE, 0.0
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return self.torch_agent._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # -- end

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        """Every 0.1 s. Once a rank has left, waits for the others before torch's agent sees it: that would
        send them SIGTERM.
        """
        codes = {rank: worker.poll() for rank, worker in self._workers().items()}
        left = {rank: code for rank, code in codes.items() if code is not None}
        if not any(left.values()):
            return self.torch_agent._monitor_workers(worker_group)
        if not self.deadline:
            self._first_left(worker_group, *next((rank, code) for rank, code in left.items() if code))
        if len(left) < len(codes) and time.monotonic() < self.deadline:
            return RunResult(WorkerState.HEALTHY)
        self._kill()
        codes = {rank: worker.wait() for rank, worker in self._workers().items()}
        self.code = job_code(list(codes.values()))
        if self.code == EXIT_SAVED and self.waiting.number and not self.told_to_stop:
            return RunResult(WorkerState.HEALTHY)  # they made room for a host that joins
        self._tell_end(worker_group, codes)
        if self.code in (EXIT_SAVED, BAD_INPUT) or self.told_to_stop:
            self._remaining_restarts = 0
        elif self._remaining_restarts:
            restart = worker_group.spec.max_restarts - self._remaining_restarts + 1
            say(f"restart {restart} of {worker_group.spec.max_restarts}, from the last checkpoint")
        return self.torch_agent._monitor_workers(worker_group)

    def _first_left(self, worker_group: Any, local_rank: int, code: int) -> None:
        """The first rank of this host has left with this code."""
        if code == EXIT_SAVED:
            self.deadline = time.monotonic() + SAVED_SECONDS
            self._signal(signal.SIGTERM)  # who has not begun to train leaves now; the others are leaving
            return
        self.deadline = time.monotonic() + LEAVE_SECONDS
        rank = worker_group.workers[local_rank].global_rank
        with suppress(dist.DistError, OSError):  # its host is gone: the ranks notice that themselves
            store = open_store(worker_group.master_addr, worker_group.master_port)
            announce(store, last_words(store, rank, code), -1, BAD_INPUT if code == BAD_INPUT else FAILED)

    def _tell_end(self, worker_group: Any, codes: dict[int, int]) -> None:
        """One line, where no rank of this host has said why all end."""
        if self.code in (DONE, EXIT_SAVED) or (self.code == BAD_INPUT and codes[0] == BAD_INPUT):
            return
        with suppress(dist.DistError, OSError):  # as above
            verdict = read_verdict(open_store(worker_group.master_addr, worker_group.master_port))
            if verdict and verdict["node"] != worker_group.group_rank:
                say(verdict["text"].splitlines()[0].removeprefix("rossby: "))
        if worker_group.group_world_size > 1 and self.store_server:
            time.sleep(3)  # the other hosts read the verdict in the store of this one

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        """Before a restart, because hosts join: those that run save first."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + RESTART_SECONDS
        while self._living() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.torch_agent._stop_workers(worker_group, *args, **kwargs)

    def _shutdown(self, *args: Any, **kwargs: Any) -> None:
        """This process ends: so do those that still run."""
        self._kill()
        self.torch_agent._shutdown(*args, **kwargs)

    def _kill(self) -> None:
        """SIGKILL to ranks that are left, stopped ones too, and to the loader processes of each."""
        for worker in self._living().values():
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


class HostsWaiting:
    """How many hosts wait to join. Asked for beside the agent: a store that is out of reach answers late."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self.number, self.ask = 0, handler.num_nodes_waiting
        self.done, self.thread = threading.Event(), threading.Thread()
        setattr(handler, "num_nodes_waiting", lambda: self.number)  # noqa: B010  what torch's agent asks

    def start(self) -> None:
        self.done.clear()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Before a rendezvous, which the handler does not share with other threads."""
        self.done.set()
        if self.thread.is_alive():
            self.thread.join()
        self.number = 0

    def _run(self) -> None:
        while not self.done.wait(1.0):
            try:
                self.number = self.ask()
            except RendezvousError:
                self.number = 0  # if a host is gone, the ranks notice


def job_code(codes: list[int]) -> int:
    """What a job ends with whose ranks ended with these codes (negative: killed by that signal)."""
    if BAD_INPUT in codes:
        return BAD_INPUT
    if any(code not in (DONE, EXIT_SAVED) for code in codes):
        return FAILED
    return EXIT_SAVED if EXIT_SAVED in codes else DONE


def last_words(store: Store, rank: int, code: int) -> str:
    """One line of a rank that has left, with its last step where one is known."""
    how = f"ended with exit code {code}"
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    if not store.check([f"beat/{rank}"]):
        return f"rossby: rank {rank} ({socket.gethostname()}) {how} before its first step"
    beat = read_beats(store, [rank])[0]
    step = f"last heard of in step {beat.step}" if beat.step else "before its first step"
    return f"rossby: {beat.name} {how}, {step}, {beat.phase}"


# -- the network


def is_this_host(host: str, port: int) -> bool:
    """Whether an endpoint is an address of this host that nobody listens at yet: then it is served here."""
    try:
        with socket.create_server((host, port)):
            return True
    except OSError:
        return False


def address_towards(host: str, port: int) -> str | None:
    """This host's IPv4 address on the way to another; None where only a loopback or nothing leads there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port or 1))
        except OSError:
            return None
        address = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = ioctl(probe.fileno(), SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


# -- the command


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m jobs.launch", description=__doc__)
    parser.add_argument("--nproc_per_node", type=int, default=1, help="ranks on this host")
    parser.add_argument("--nnodes", default="1", help='hosts, or the fewest and the most: "1:2"')
    parser.add_argument("--rdzv_endpoint", default="", help="host:port; that host's launcher serves there")
    parser.add_argument("--rdzv_id", default="rossby", help="tells jobs apart that share an endpoint")
    parser.add_argument("--max_restarts", type=int, default=0, help="starts after a crash")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def build_agent(args: argparse.Namespace) -> Agent:
    """The agent of this host, and the environment of its ranks."""
    fewest, _, most = args.nnodes.partition(":")
    several = int(most or fewest) > 1
    host, _, port = args.rdzv_endpoint.rpartition(":") if several else ("127.0.0.1", ":", "0")
    local_addr = address_towards(host, int(port)) if several else "127.0.0.1"
    if local_addr and (name := interface_of(local_addr)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)  # else gloo takes what the host's name stands for
    os.environ["ROSSBY_LAUNCHER"] = "1"
    os.environ.setdefault("ROSSBY_STARTED", str(time.time()))  # training.max_wall_time counts from here
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the last collectives, written when a run hangs
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT,SIGHUP,SIGQUIT"
    parameters = RendezvousParameters(
        backend="c10d",
        endpoint=f"{host}:{port}",
        run_id=args.rdzv_id if several else str(uuid.uuid4()),
        min_nodes=int(fewest),
        max_nodes=int(most or fewest),
        local_addr=local_addr,
        # A host that is gone is missed after 6 s; a job of "1:2" hosts waits 10 s for its second one.
        keep_alive_interval=2,
        last_call_timeout=10,
        join_timeout=900,
        is_host=is_this_host(host, int(port)),
    )
    config = LaunchConfig(int(fewest), int(most or fewest), args.nproc_per_node, logs_specs=no_logs())
    spec = WorkerSpec(
        role="rossby",
        local_world_size=args.nproc_per_node,
        entrypoint=sys.executable,
        args=("-u", args.script, *args.arguments),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=args.max_restarts,
        monitor_interval=0.1,
        local_addr=local_addr,
        numa_options=getattr(config, "numa_options", None),
    )
    return Agent(spec)


def launch(agent: Agent) -> int:
    """The job's exit code, once this host's ranks have ended."""
    for number in STOP_SIGNALS:
        signal.signal(number, agent.forward)
    try:
        result = agent.run()
    except SignalException as stop:
        say(f"{stop.sigval.name}: all ranks of this host end")
        return EXIT_SAVED if stop.sigval in STOP_SIGNALS else 128 + stop.sigval
    except (RendezvousError, dist.DistError) as error:
        say(f"the hosts of this job did not find together: {' '.join(str(error).splitlines())[:300]}")
        return FAILED
    if result is None:  # torch's agent: the rendezvous was closed
        say("the job has ended on the other hosts")
        return FAILED
    if agent.code == DONE:
        agent.get_worker_group().spec.rdzv_handler.shutdown()
    return agent.code


def main() -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # this module says what matters
    try:
        agent = build_agent(parse(sys.argv[1:]))
    except (ValueError, RendezvousError) as error:
        say(f"{' '.join(str(error).splitlines())}; look at NNODES and RDZV_ENDPOINT")
        os._exit(FAILED if isinstance(error, RendezvousError) else BAD_INPUT)
    code = launch(agent)
    sys.stdout.flush()
    os._exit(code)  # threads of the rendezvous may wait for a host that is gone


if __name__ == "__main__":
    main()
