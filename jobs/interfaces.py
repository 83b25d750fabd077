"""Which network interface of this host leads to another. Standard library only."""

import socket
from contextlib import suppress
from fcntl import ioctl

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def interface_towards(host: str, port: int) -> str | None:
    """The name of the interface on the way to another host; None as for `address_towards`."""
    address = address_towards(host, port)
    return interface_of(address) if address else None


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
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of(name) == address), None)


def address_of(interface: str) -> str | None:
    """The IPv4 address of a network interface; None where it has none, or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = ioctl(probe.fileno(), SIOCGIFADDR, interface.encode().ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    return None
