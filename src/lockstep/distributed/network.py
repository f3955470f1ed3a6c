"""Network interfaces and addresses: which interface leads to the other hosts."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from lockstep.errors import ConfigError

_ONE_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Names for runs whose "hosts" are all this machine; any other name that resolves to loopback is an error."""


@dataclass(frozen=True)
class Interface:
    """One network interface of this host, with one of its addresses."""

    name: str
    address: str


def addresses() -> list[Interface]:
    """Returns every address of this host with its interface; empty on systems other than Linux."""
    if sys.platform != "linux":
        return []
    families = (socket.AF_INET, socket.AF_INET6)
    return [
        Interface(name.partition(":")[0], each.address.partition("%")[0])  # without an alias, without a scope
        for name, found in psutil.net_if_addrs().items()
        for each in found
        if each.family in families
    ]


def interface_of_master(host: str, port: int, known: list[Interface]) -> Interface:
    """Returns the interface on which node 0 listens: the one with the address of ``--master``.

    ``ConfigError`` if the name is unknown, is not an address of this host, or resolves to loopback.
    """
    found = resolve(host, port)
    own = [each for address in found for each in known if each.address == address]
    if not own:
        raise ConfigError(
            f"--master {host} is {', '.join(found)}, which is not an address of this host; its addresses are "
            f"{_listed(known) or 'unknown'}. With --node-rank 0, --master must be an address of this host."
        )
    if _is_loopback(own[0].address) and host not in _ONE_MACHINE:
        others = _listed([each for each in known if not _is_loopback(each.address)])
        raise ConfigError(
            f"--master {host} is {own[0].address} on this host, which no other host can reach. "
            f"Use an address that they can reach: {others or 'this host has none'}."
        )
    return own[0]


def interface_towards(host: str, port: int, known: list[Interface]) -> Interface:
    """Returns the interface from which this host reaches ``host``, without sending anything.

    ``ConfigError`` if the name is unknown or no interface leads there.
    """
    why = ""
    for address in resolve(host, port):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, port))
            except OSError as error:
                why = why or f"{address}, and this host has no route to it: {error.strerror}"
                continue
            own = str(probe.getsockname()[0])
        return Interface(next((each.name for each in known if each.address == own), ""), own)
    raise ConfigError(f"--master {host} is {why}. Check the address, and that the network is up.")


def data_address(host: str, port: int, environment: Mapping[str, str]) -> str:
    """Returns the address of this host on the interface of the ranks' data.

    It is the ``GLOO_SOCKET_IFNAME`` of a rank's environment, else the one that leads to the host of the rendezvous.
    """
    known = addresses()
    found = interface_towards(host, port, known)
    name = environment.get("GLOO_SOCKET_IFNAME", "") or found.name
    own = [each.address for each in known if each.name == name]
    alike = [address for address in own if (":" in address) == (":" in found.address)]
    return found.address if found.address in own else next(iter(alike or own), found.address)


def data_interface(asked: str, found: Interface, known: list[Interface], environment: Mapping[str, str]) -> str:
    """Returns the name of the interface for the ranks' data: the one that was asked for, else the one that was found.

    A ``GLOO_SOCKET_IFNAME`` of the user counts like ``--interface``. ``ConfigError`` if it is not one of ``known``, or
    does not leave this host.
    """
    name = asked or environment.get("GLOO_SOCKET_IFNAME", "") or found.name
    names = sorted({each.name for each in known})
    if known and name not in names:
        raise ConfigError(
            f"The interface {name!r} was asked for, and this host has {', '.join(names)}. Choose one of them."
        )
    if name == "lo" and not _is_loopback(found.address):
        raise ConfigError(
            f"The interface 'lo' was asked for, and it does not leave this host. Omit --interface "
            f"({found.name or 'an interface'} leads to the other hosts), or choose another."
        )
    return name


def resolve(host: str, port: int) -> list[str]:
    """Returns the addresses of a host; ``ConfigError`` if the name is not known."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"--master {host} cannot be resolved: {error.strerror}. Give the address of the host of node-rank 0."
        ) from error
    return list(dict.fromkeys(str(each[4][0]) for each in found))


def require_loopback(name: str) -> None:
    """Raises ``ConfigError`` where this interface is down, as in a new network namespace: gloo's error is a riddle."""
    state = psutil.net_if_stats().get(name)
    if state is not None and not state.isup:
        raise ConfigError(
            f"The ranks of one host exchange over its loopback interface, and {name!r} is down, as it is in a new "
            f"network namespace. Bring it up: ip link set {name} up."
        )


def _listed(interfaces: list[Interface]) -> str:
    return ", ".join(f"{each.address} ({each.name})" for each in interfaces)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
