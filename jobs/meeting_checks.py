"""Before ranks form a group: which interface each node talks through, and whether the next node reaches it.

A wrong one would keep all ranks waiting for each other until they time out. What nodes say here goes through
the store of their launchers.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[reportPrivateImportUsage]

from errors import RunFailed
from jobs.interfaces import address_of
from jobs.start_checks import check_devices
from jobs.verdicts import FAIL, PASS, WARN, Row, attempt, joined
from parallelisms.mesh import launchers_store

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
WAIT = timedelta(seconds=60)  # for what another node says
REACH_SECONDS = 5.0  # to connect
FASTER = 2  # times: an interface that is so much faster was perhaps meant
NETWORK = Path("/sys/class/net")
UNSET = "unset it: the launcher then takes the way to RDZV_ENDPOINT"


@dataclass(frozen=True)
class Place:
    """A node, and where others find it; no address: on this host alone."""

    node: int
    host: str
    interface: str
    address: str
    port: int = 0

    def __str__(self) -> str:
        through = f", {self.interface} {self.address}" if self.address else ""
        return f"node {self.node} ({self.host}{through})"


@dataclass(frozen=True)
class Meeting:
    """What all nodes have said, on every rank."""

    places: list[Place]
    rows: list[Row]  # on rank 0

    @property
    def fails(self) -> bool:
        return any(row.verdict == FAIL for row in self.rows)


def meet() -> Meeting:
    """All ranks together, before they form a group. RunFailed: a node does not answer."""
    node, several = int(os.environ.get("GROUP_RANK", 0)), nodes() > 1
    rows, interface = interface_rows(several)
    rows += attempt("devices", check_devices)[1]
    if "ROSSBY_ATTEMPT" not in os.environ:
        return Meeting([Place(0, socket.gethostname(), interface, "")], rows)
    store = PrefixStore(f"preflight/{os.environ['ROSSBY_ATTEMPT']}", launchers_store(WAIT))
    if os.environ["LOCAL_RANK"] == "0":
        address = address_of(interface) if interface and several else None
        with listening(address) as port:
            place = Place(node, socket.gethostname(), interface, address or "", port)
            say(store, f"place/{node}", asdict(place))
            places = [Place(**hear(store, f"place/{other}")) for other in range(nodes())]
            found = rows if any(row.verdict == FAIL for row in rows) else [*rows, *reach_rows(place, places)]
            say(store, f"rows/{node}", [asdict(row) for row in found])
            if node == 0:
                own = [[Row(**row) for row in hear(store, f"rows/{other}")] for other in range(nodes())]
                merged = joined([str(place) for place in places], own)
                say(store, "all", [[asdict(each) for each in places], [asdict(row) for row in merged]])
            hear(store, "all")  # until then others may want to connect
    places, merged = hear(store, "all")
    return Meeting([Place(**each) for each in places], [Row(**row) for row in merged])


def nodes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def say(store: Store, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def hear(store: Store, key: str) -> Any:
    try:
        return json.loads(store.get(key))
    except dist.DistError:
        reason = f"said nothing for {WAIT.total_seconds():.0f} s ({key}); look at its own output"
        raise RunFailed(f"preflight: a node {reason}") from None


@contextmanager
def listening(address: str | None) -> Iterator[int]:
    """A port at this address that others can connect to; 0 where there is no address."""
    if not address:
        yield 0
        return
    with socket.create_server((address, 0)) as server:
        yield server.getsockname()[1]


# -- interfaces


def interface_rows(several: bool) -> tuple[list[Row], str]:
    """What is wrong with the interfaces that the environment names, and the one that gloo takes."""
    there = [name for _, name in socket.if_nameindex()]
    named = [name.strip() for name in os.environ.get(GLOO, "").split(",") if name.strip()]
    interface = named[0] if named else ""
    wrong = [row for name in named for row in wrong_rows(GLOO, name, there, several)]
    if torch.cuda.is_available():
        wrong += nccl_rows(os.environ.get(NCCL, ""), there)
    if wrong:
        return wrong[:1], interface
    if several and not interface:
        fix = f"name it in {GLOO}, and check RDZV_ENDPOINT"
        return [Row("interface", WARN, "no interface leads to RDZV_ENDPOINT but the loopback", fix)], ""
    return [speed_row(interface, there) if several else Row("interface", PASS, "one node")], interface


def wrong_rows(variable: str, name: str, there: list[str], several: bool) -> Iterator[Row]:
    what = f"{variable} = {name}"
    fix = f"set it to the one that joins the nodes, or {UNSET}"
    if name not in there:
        yield Row("interface", FAIL, f"{what}: no such interface here, but {', '.join(there)}", fix)
    elif not address_of(name):
        yield Row("interface", FAIL, f"{what}: has no IPv4 address", fix)
    elif several and (address_of(name) or "").startswith("127."):
        yield Row("interface", FAIL, f"{what}: a loopback, which leads to no other node", fix)
    elif several and read_line(NETWORK / name / "operstate") == "down":
        yield Row("interface", FAIL, f"{what}: is down", fix)


def nccl_rows(text: str, there: list[str]) -> list[Row]:
    """NCCL's names are beginnings, exact after "=", and what to leave out after "^"."""
    names = text.removeprefix("=").split(",") if text and not text.startswith("^") else []
    exact = text.startswith("=")
    if not names or any(each == name if exact else each.startswith(name) for each in there for name in names):
        return []
    found = f"{NCCL} = {text}: no such interface here, but {', '.join(there)}"
    return [Row("interface", FAIL, found, f"set it to one of these, or to that of {GLOO}")]


def speed_row(interface: str, there: list[str]) -> Row:
    """Against the others that are up and have an address."""
    others = {name: speed_of(name) for name in there if name != interface and address_of(name)}
    name, most = max(others.items(), key=lambda item: item[1], default=("", 0))
    own = speed_of(interface)
    found = f"{interface} {address_of(interface)}" + (f", {own / 1000:g} Gb/s" if own else "")
    if own and most > FASTER * own:
        found += f", while {name} has {most / 1000:g} Gb/s"
        return Row("interface", WARN, found, f"{GLOO}={name} {NCCL}={name} where that joins the nodes")
    return Row("interface", PASS, found)


def speed_of(interface: str) -> int:
    """Mb/s as the driver says; 0: it does not."""
    text = read_line(NETWORK / interface / "speed")
    return max(int(text), 0) if text.lstrip("-").isdecimal() else 0


def read_line(path: Path) -> str:
    with suppress(OSError):  # a driver that has no such figure
        return path.read_text().strip()
    return ""


# -- ways


def reach_rows(own: Place, places: list[Place]) -> list[Row]:
    """Whether this node reaches the next one at the address that ranks there will be called at."""
    ahead = places[(own.node + 1) % len(places)]
    if ahead == own or not ahead.address:
        return []
    if ahead.address == own.address:
        found = f"{ahead} has the address of {own}: an interface of each host alone, such as a bridge"
        return [Row("reach", FAIL, found, f"set {GLOO} to the interface that joins the nodes")]
    try:
        socket.create_connection((ahead.address, ahead.port), REACH_SECONDS).close()
    except OSError as error:
        found = f"{ahead} cannot be reached: {error.strerror or error}"
        fix = f"set {GLOO} to the interface that joins the nodes, or open ports between them"
        return [Row("reach", FAIL, found, fix)]
    return [Row("reach", PASS, f"{ahead} answers")]
