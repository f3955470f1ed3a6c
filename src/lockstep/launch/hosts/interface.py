"""Which network interface leads to the other hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ConfigError

_SIOCGIFCONF = 0x8912
_ENTRY = struct.Struct("16s24s") if sys.maxsize > 1 << 32 else struct.Struct("16s16s")
_MOST_ENTRIES = 256
_ONE_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Ways to say that all "hosts" are this machine; any other name that leads to loopback is a mistake."""


@dataclass(frozen=True)
class Interface:
    """One network interface of this host, with one of its addresses."""

    name: str
    address: str


def addresses() -> list[Interface]:
    """Every address of this host with its interface; empty where the system does not tell (other than Linux)."""
    return [*_ipv4(), *_ipv6()] if sys.platform == "linux" else []


def interface_of_master(host: str, port: int, known: list[Interface]) -> Interface:
    """The interface on which node 0 listens: the one that has the address of ``--master``.

    Raises:
        ConfigError: the name is unknown, is no address of this host, or leads to loopback.
    """
    found = resolve(host, port)
    own = [each for address in found for each in known if each.address == address]
    if not own:
        here = ", ".join(f"{each.address} ({each.name})" for each in known) or "unknown"
        raise ConfigError(
            f"--master {host} is {', '.join(found)}, which is no address of this host; its own are {here}. "
            "With --node-rank 0 give an address of this host."
        )
    if _is_loopback(own[0].address) and host not in _ONE_MACHINE:
        others = ", ".join(
            f"{each.address} ({each.name})" for each in known if not _is_loopback(each.address)
        )
        raise ConfigError(
            f"--master {host} is {own[0].address} on this host, which no other host can reach. "
            f"Give an address that they can: {others or 'this host has none'}."
        )
    return own[0]


def interface_towards(host: str, port: int, known: list[Interface]) -> Interface:
    """The interface from which this host reaches ``host``; nothing is sent to find it.

    Raises:
        ConfigError: the name is unknown or no interface leads there.
    """
    why = ""
    for address in resolve(host, port):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))
            except OSError as error:
                why = why or f"{address}, and this host has no way there: {error.strerror}"
                continue
            own = str(probe.getsockname()[0])
        return Interface(next((each.name for each in known if each.address == own), ""), own)
    raise ConfigError(f"--master {host} is {why}. Check the address, and that the network is up.")


def chosen(asked: str, found: Interface, known: list[Interface], environment: Mapping[str, str]) -> str:
    """The name of the interface for the ranks' data: the one that was asked for, else the one that was found.

    Args:
        asked: ``--interface``, or empty.
        found: leads to the other hosts.
        known: all of this host.
        environment: a ``GLOO_SOCKET_IFNAME`` set by the user counts like ``--interface``.
    """
    name = asked or environment.get("GLOO_SOCKET_IFNAME", "") or found.name
    names = sorted({each.name for each in known})
    if known and name not in names:
        raise ConfigError(
            f"The interface {name!r} was asked for, and this host has {', '.join(names)}. Choose one of them."
        )
    if name == "lo" and not _is_loopback(found.address):
        raise ConfigError(
            f"The interface 'lo' was asked for, and it does not leave this host. Leave the choice open "
            f"({found.name or 'an interface'} leads to the other hosts), or name another."
        )
    return name


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host.

    Raises:
        ConfigError: the name is not known.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--master {host} cannot be resolved: {error.strerror}. Give the address of the host of node-rank 0."
        ) from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _ipv4() -> list[Interface]:
    """What SIOCGIFCONF lists (netdevice(7)): every IPv4 address, aliases too."""
    room = bytearray(_ENTRY.size * _MOST_ENTRIES)
    buffer = (memoryview(room), len(room))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, content = _list_interfaces(probe, *buffer)
    found = []
    for name, address in _ENTRY.iter_unpack(content[: length - length % _ENTRY.size]):
        found.append(
            Interface(name.split(b"\0")[0].decode().partition(":")[0], socket.inet_ntoa(address[4:8]))
        )
    return found


def _list_interfaces(probe: socket.socket, room: memoryview, size: int) -> tuple[int, bytes]:
    import ctypes

    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    answer = fcntl.ioctl(probe, _SIOCGIFCONF, struct.pack("iL", size, address))
    return int(struct.unpack("iL", answer)[0]), bytes(room)


def _ipv6() -> list[Interface]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    rows = [line.split() for line in lines]
    return [
        Interface(row[5], str(ipaddress.IPv6Address(bytes.fromhex(row[0])))) for row in rows if len(row) == 6
    ]
