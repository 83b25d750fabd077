"""What the control plane costs at 8, 64, 512 and 4,096 ranks: groups, store, heartbeats, statistics.

    .venv/bin/python benchmarks/at_scale.py

Measured (m) where this machine has that many processes or clients: gloo ranks that fork from one process, and
clients of a real TCPStore that do what a rank's watchdog does every second. Simulated (s) beyond: rank 0 of a
world that has nobody else (gloo connects nobody before somebody speaks), recorded calls of a counting store,
and answers of the other ranks that are made up; rank 0 works on them for real, in its own time. The mesh is
FSDP over 64 ranks, replicated above. What is simulated counts processor time, which other work on the machine
does not change. Exponents are those of a fit through 64, 512 and 4,096: 0 is the same at any number, 1 grows
like it. Needs no GPU, 4 GB of memory and three minutes.
"""

import argparse
import gc
import io
import math
import os
import pickle
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}
os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as start_ranks sets it
os.environ["RES_OPTIONS"] = (
    "timeout:0 attempts:0"  # ranks ask name servers beside each other, clients here do not
)

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[reportPrivateImportUsage]

from benchmarks.loader import Shape
from benchmarks.results_file import record
from benchmarks.statistics_start import VARIABLES, write_tiled
from config import Comm
from datasets.archive import open_archive
from jobs.launch import listen
from jobs.preemption import Agreement
from jobs.rank_tree import FANOUT, RankTree
from jobs.watchdog import Watchdog
from models.build import build_model
from models.initialization import initial_value
from parallelisms.degrees import Degrees
from parallelisms.mesh import build_mesh
from parallelisms.peer_messages import PeerUnpickler, read_plainly
from training.config_checks import load_checked

ROOT = Path(__file__).parent.parent
SIZES = (8, 64, 512, 4096)
RANKS_HERE = 64  # processes
SHARDS = 64  # ranks that share one copy of the weights; the others replicate it
EXCHANGES = 50
BEATS_SECONDS = 5
CLIENT_PROCESSES = 8
PART = 8
SAMPLES_A_SECOND = 1.03  # of a rank: vit1b on A100s, 3,072 samples in 46.5 s by 64 (plan.py)
SAMPLE_BYTES = 2 * 17 * 1024 * 2048 * 2  # two dates in float16


@dataclass
class Row:
    """One figure at each number of ranks; `how`: m measured, s simulated."""

    what: str
    unit: str
    values: dict[int, float] = field(default_factory=dict)
    how: dict[int, str] = field(default_factory=dict)

    def add(self, world: int, value: float, how: str) -> None:
        self.values[world], self.how[world] = value, how

    @property
    def exponent(self) -> float | None:
        """Of the number of ranks, by least squares of logarithms; None: there are too few values."""
        points = [(math.log(n), math.log(v)) for n, v in self.values.items() if n >= 64 and v > 0]
        sizes, values = [n for n, _ in points], [v for _, v in points]
        return float(np.polyfit(sizes, values, 1)[0]) if len(points) > 1 else None


class Table:
    """Rows by what they say, in the order in which they were first named."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, what: str, unit: str, world: int, value: float, how: str) -> None:
        self.rows.setdefault(what, Row(what, unit)).add(world, value, how)

    def record(self) -> None:
        rows = list(self.rows.values())
        record("at_scale", [{**vars(row), "exponent": row.exponent} for row in rows])

    def __str__(self) -> str:
        lines = [f"{'':<58}{'':<6}" + "".join(f"{n:>12,}" for n in SIZES) + f"{'grows as':>12}"]
        for row in self.rows.values():
            cells = [f"{row.values[n]:.4g} {row.how[n]}" if n in row.values else "" for n in SIZES]
            power = "" if row.exponent is None else f"N^{row.exponent:.2f}"
            lines.append(f"{row.what:<58}{row.unit:<6}" + "".join(f"{c:>12}" for c in cells) + f"{power:>12}")
        return "\n".join(lines)


# -- real ranks


class CountingStore(Store):
    """Passes calls on, and counts them."""

    def __init__(self, inner: Store) -> None:
        super().__init__()
        self.inner, self.calls = inner, Counter()

    def _pass(self, name: str, *arguments: Any) -> Any:
        self.calls[name] += 1
        return getattr(self.inner, name)(*arguments)

    def set(self, *arguments: Any) -> Any:
        return self._pass("set", *arguments)

    def get(self, *arguments: Any) -> Any:
        return self._pass("get", *arguments)

    def add(self, *arguments: Any) -> Any:
        return self._pass("add", *arguments)

    def wait(self, *arguments: Any) -> Any:
        return self._pass("wait", *arguments)

    def check(self, *arguments: Any) -> Any:
        return self._pass("check", *arguments)

    def compare_set(self, *arguments: Any) -> Any:
        return self._pass("compare_set", *arguments)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launchers_store(port: int) -> TCPStore:
    """As jobs/launch.py keeps it."""
    listener = listen("127.0.0.1", port)
    assert listener
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return TCPStore("127.0.0.1", port, **options)


def forked(world: int, check: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What a check returns on each of `world` processes, which share the memory of what is imported here."""
    context, answers = get_context("fork"), get_context("fork").Queue()
    together = context.Barrier(world)  # nobody leaves before all have answered

    def serve(rank: int) -> None:
        torch.set_num_threads(1)
        answers.put((rank, check(rank, world, *arguments)))
        answers.close()
        answers.join_thread()
        together.wait()
        os._exit(0)

    processes = [context.Process(target=serve, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=240) for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(world)]


def connections() -> int:
    """Sockets that this process holds."""
    names = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sum(name.startswith("socket") for name in names)


def layout_of(world: int) -> Degrees:
    return Degrees(dp_replicate=max(world // SHARDS, 1), dp_shard=min(world, SHARDS))


def start_groups(store: Store, rank: int, world: int) -> RankTree:
    """Every group that a run makes before its first step: the mesh's, and three trees."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    build_mesh("cpu", layout_of(world))
    RankTree()  # that of the statistics
    RankTree()  # that of checkpoints
    return Agreement("", 0.0, 60).ranks


def real_rank(rank: int, world: int, port: int) -> dict[str, float]:
    """What one of `world` gloo ranks counts and times."""
    client = TCPStore("127.0.0.1", port, is_master=False) if rank else launchers_store(port)
    store = CountingStore(client)
    started = time.monotonic()
    tree = start_groups(store, rank, world)
    found: dict[str, float] = {"seconds": time.monotonic() - started}
    flags = torch.zeros(2, dtype=torch.int64)
    tree.all_reduce(flags)
    found |= {"operations": sum(store.calls.values()), "connections": connections()}
    plain = dist.new_group(backend="gloo")
    for name, exchange in (
        ("tree", lambda: tree.all_reduce(flags, dist.ReduceOp.MAX)),
        ("ring", lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=plain)),
    ):
        exchange()
        tree.barrier()
        started = time.monotonic()
        for _ in range(EXCHANGES):
            exchange()
        found[name] = (time.monotonic() - started) / EXCHANGES
    tree.barrier()
    return found


def measure_ranks(table: Table) -> None:
    for world in (n for n in SIZES if n <= RANKS_HERE):
        found = forked(world, real_rank, free_port())
        most = {key: max(each[key] for each in found) for key in found[0]}
        table.add("store operations of a rank until its first step", "", world, most["operations"], "m")
        table.add("connections of a rank (rank 0 keeps the store)", "", world, found[1]["connections"], "m")
        table.add("groups made, all ranks on this machine", "s", world, most["seconds"], "m")
        table.add("agreement of a step, all ranks on this machine", "ms", world, 1e3 * most["tree"], "m")
        table.add("  by gloo's ring", "ms", world, 1e3 * most["ring"], "m")


# -- rank 0 of a world without others


def lone_rank(rank: int, _: int, world: int) -> dict[str, float]:
    """The groups of rank 0 of `world`: gloo asks for nobody's address before somebody speaks."""
    store, made, new_group = CountingStore(HashStore()), [], dist.new_group
    device_mesh = sys.modules["torch.distributed.device_mesh"]

    def counted(*arguments: Any, **options: Any) -> Any:
        made.append(1)
        return new_group(*arguments, **options)

    dist.new_group = device_mesh.new_group = counted  # type: ignore[attr-defined]
    started = time.process_time()
    start_groups(store, 0, world)
    seconds = time.process_time() - started
    own = len(dist.distributed_c10d._world.pg_names)
    return {"seconds": seconds, "all": len(made), "own": own, "operations": sum(store.calls.values())}


def simulate_groups(table: Table) -> None:
    for world in SIZES:
        found = forked(1, lone_rank, world)[0]
        table.add("process groups in all", "", world, found["all"], "s")
        table.add("process groups of rank 0", "", world, found["own"], "s")
        table.add("groups made, rank 0 alone", "s", world, found["seconds"], "s")
        if world > RANKS_HERE:
            what = "store operations of a rank until its first step"
            table.add(what, "", world, found["operations"], "s")
        table.add("messages in a row of an agreement", "", world, messages_in_a_row(world), "s")
        table.add("  messages by gloo's ring", "", world, 2 * (world - 1), "s")


def messages_in_a_row(world: int) -> int:
    """Of an agreement: up each level a ring of eight and one to its first rank, down three."""
    levels = math.ceil(math.log(world, FANOUT) - 1e-9)
    return levels * (FANOUT + int(math.log2(FANOUT)))


# -- heartbeats: real clients of a real store


def hold_clients(process: int, _: int, world: int, port: int, pace: Any) -> dict[str, float]:
    """Process 0 keeps the store; each other one does what the watchdogs of its part of the ranks do."""
    if process == 0:
        store = launchers_store(port)
        pace.wait()  # all have connected and said and heard their first beats
        before = time.process_time()
        pace.wait()
        store.check(["verdict"])
        return {"busy": (time.process_time() - before) / BEATS_SECONDS}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    watchdogs = []
    for rank in range(process - 1, world, CLIENT_PROCESSES):
        os.environ["RANK"] = str(rank)
        watchdogs.append(Watchdog(Path(), Comm()))
    started = time.monotonic()
    for watchdog in watchdogs:
        talk_first(watchdog)
    found = {"first": time.monotonic() - started}
    pace.wait()
    slowest, due = 0.0, time.monotonic()
    for _ in range(BEATS_SECONDS):
        for watchdog in watchdogs:
            started = time.monotonic()
            watchdog._talk()
            slowest = max(slowest, time.monotonic() - started)
        due += 1.0
        time.sleep(max(due - time.monotonic(), 0))
    pace.wait()
    return found | {"slowest": slowest, "late": max(time.monotonic() - due, 0.0)}


def talk_first(watchdog: Watchdog) -> None:
    """Until the store is there."""
    for _ in range(200):
        with suppress(OSError, dist.DistError):
            return watchdog._talk()
        time.sleep(0.05)
    raise RuntimeError("the store does not answer")


def measure_beats(table: Table) -> None:
    for world in SIZES:
        pace = get_context("fork").Barrier(CLIENT_PROCESSES + 1)
        store, *clients = forked(CLIENT_PROCESSES + 1, hold_clients, world, free_port(), pace)
        table.add("requests of the store, beats of all ranks", "1/s", world, 2 * world, "m")
        table.add("  processor time of the store", "%", world, 100 * store["busy"], "m")
        table.add("  a beat of rank 0, which hears all others", "ms", world, 1e3 * clients[0]["slowest"], "m")
        table.add("  first contact of all ranks", "s", world, max(c["first"] for c in clients), "m")


# -- answers of other ranks


@dataclass
class LoneRank:
    """Rank 0 of a tree whose other ranks' answers are made up; their pickles are read in rank 0's time."""

    world: int
    answers: list[Callable[[Any], list[Any]]]  # to one gather after the other: rank 0's value -> all ranks'
    rank: int = 0
    is_first: bool = True
    made_up: float = 0.0  # seconds that making the answers up took
    received: int = 0  # bytes

    def gather(self, value: Any) -> list[Any]:
        started = time.process_time()
        data = pickle.dumps(self.answers.pop(0)(value))
        self.received += len(data)
        self.made_up += time.process_time() - started
        return PeerUnpickler(io.BytesIO(data)).load()

    def share(self, value: Any) -> Any:
        pickle.dumps(value)
        return value

    def deal(self, values: list[Any]) -> Any:
        for first in range(0, self.world, FANOUT):
            pickle.dumps(values[first : first + FANOUT])
        return values[0]

    def all_reduce(self, tensor: Any, *_: Any) -> Any:
        return tensor


@cache
def weights() -> dict[str, tuple[int, ...]]:
    """Name -> shape of vit1b's parameters, of one block in PART: what saves cost is as much as tensors."""
    config = load_checked(["--job.config_file", str(ROOT / "train_configs/vit1b.toml")])
    model = build_model(config.model, 17, 2, config.data.grid_shape, True)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return {name: shape for name, shape in shapes.items() if number_of(name) % PART == 0}


def number_of(name: str) -> int:
    """Of the block that a parameter is in."""
    return int(name.split(".")[1]) if name.startswith("blocks.") else 0


# -- what is left of a start


def time_weights(table: Table) -> None:
    """One block's weights by one thread, times the blocks."""
    block = {name: shape for name, shape in weights().items() if name.startswith("blocks.0.")}
    started = time.process_time()
    for name, shape in block.items():
        initial_value(name, torch.Size(shape), 0.02 if len(shape) > 1 else None, 0)
    seconds = time.process_time() - started
    for world in SIZES:
        table.add("weights initialised, any rank (one block x 48)", "s", world, 48 * seconds, "s")


def count_opens(table: Table) -> None:
    """Files that a rank opens of a store as datasets.convert and WeatherBench2 chunk it, a date a chunk."""
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "era5.zarr"
        write_tiled(path, Shape("17 x 64 x 128 float16", 17, (64, 128), "f2", 32))
        opened.clear()
        archive = open_archive(str(path))
        at_start = sum(str(path) in name for name in opened)
        opened.clear()
        for date in range(16):
            archive.read(date, VARIABLES)
        a_date = sum(str(path) in name for name in opened) / 16
    for world in SIZES:
        table.add("opens of the data store at start, all ranks", "", world, world * at_start, "s")
        table.add("  a second", "1/s", world, world * SAMPLES_A_SECOND * 2 * a_date, "s")
        table.add("  bytes a second", "GB/s", world, world * SAMPLES_A_SECOND * SAMPLE_BYTES / 1e9, "s")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    read_plainly()
    gc.disable()  # as in train.py's loop
    table = Table()
    measure_ranks(table)
    simulate_groups(table)
    measure_beats(table)
    time_weights(table)
    count_opens(table)
    table.record()
    print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
