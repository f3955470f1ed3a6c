"""Brings the hosts of a run together before anything is started, and parts them at its end."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.hosts.hub import Hub, listen
from lockstep.launch.hosts.interface import addresses, chosen, interface_of_master, interface_towards
from lockstep.launch.hosts.member import Member
from lockstep.launch.hosts.options import HostOptions
from lockstep.launch.hosts.roll_call import Hello, first_ranks
from lockstep.launch.options import new_run_id
from lockstep.launch.place import Place
from lockstep.world import host_name

_FAREWELL = 1.0


@dataclass(frozen=True)
class Joined:
    """This host among the others, after the roll-call."""

    link: Hub | Member
    place: Place
    shared: Any
    """What node 0 decided for all hosts; JSON."""


@contextmanager
def join_hosts(
    options: HostOptions,
    *,
    ranks: int,
    settings: Mapping[str, str],
    decide: Callable[[int], Any] = lambda world_size: None,
) -> Iterator[Joined]:
    """Waits for every host, and stays connected for the ``with`` block. Every host must call this.

    Args:
        options: of the command on this host.
        ranks: how many this host will start.
        settings: what must be equal on all hosts.
        decide: called on node 0 with the number of all ranks when all hosts are there; JSON that all hosts get.

    Raises:
        ConfigError: addresses, tokens or settings do not fit, or ``decide`` raised it; on every host.
        RankError: not every host arrived in time; names those that did not.
    """
    known = addresses()
    hello = Hello(
        node=options.node,
        name=host_name(),
        ranks=ranks,
        instance=secrets.token_hex(8),
        settings={**settings, "nnodes": str(options.nodes)},
    )
    link, place, shared = (_as_hub if options.node == 0 else _as_member)(options, hello, known, decide)
    try:
        yield Joined(link, place, shared)
    except BaseException as error:
        _leave(link, _words_of(error))
        raise
    finally:
        link.close()


def _as_hub(
    options: HostOptions, hello: Hello, known: list[Any], decide: Callable[[int], Any]
) -> tuple[Hub, Place, Any]:
    found = interface_of_master(options.host, options.port, known)
    interface = chosen(options.interface, found, known, os.environ)
    listen(found.address, options.port + 1).close()  # the ranks' store will need it
    address = f"[{found.address}]" if ":" in found.address else found.address
    hub = Hub(options, found.address, hello, say)
    say(f"waiting for {_hosts(options.nodes - 1)} at {address}:{options.port} ({found.name})")
    try:
        hub.gather()
        first = first_ranks(hub.hellos)
        world_size = sum(each.ranks for each in hub.hellos.values())
        shared = decide(world_size)
        place = Place(
            run_id=new_run_id(),
            world_size=world_size,
            nodes=options.nodes,
            rendezvous=f"tcp://{address}:{options.port + 1}",
            interface=interface,
        )
        hosts = ", ".join(
            f"{each.name} with rank{'s' if each.ranks > 1 else ''} {_span(first[node], each.ranks)}"
            for node, each in sorted(hub.hellos.items())
        )
        say(f"{options.nodes} hosts: {hosts}; data over {interface}")
        say(
            f"open to that network: {address}:{options.port} (supervisors, by token), {address}:{options.port + 1} "
            f"(the ranks' store) and the ranks' own ports, neither of them protected: see docs/hosts.md"
        )
        _give_plan(hub, options, place, first, shared, hello.name)
    except BaseException as error:
        _refuse(hub, error)
        hub.close()
        raise
    return hub, place, shared


def _give_plan(
    hub: Hub, options: HostOptions, place: Place, first: Mapping[int, int], shared: Any, name: str
) -> None:
    """Tells every host its place; waits until each has said something after it, so that nobody misses it."""
    plan = {
        "name": name,
        "run_id": place.run_id,
        "world_size": place.world_size,
        "first_ranks": {str(node): rank for node, rank in first.items()},
        "rendezvous": place.rendezvous,
        "shared": shared,
    }
    deadline = time.monotonic() + options.silence_limit
    while not all(peer.state.get("has_plan") or peer.lost for peer in hub.peers.values()):
        if time.monotonic() > deadline:
            break
        hub.turn({"plan": plan})
        hub.wait(0.2)


def _as_member(
    options: HostOptions, hello: Hello, known: list[Any], decide: Callable[[int], Any]
) -> tuple[Member, Place, Any]:
    found = interface_towards(options.host, options.port, known)
    interface = chosen(options.interface, found, known, os.environ)
    member = Member(options, hello, say)
    say(f"joining host 0 at {options.master} from {found.address} ({found.name}); data over {interface}")
    try:
        plan = member.await_plan()
        place = Place(
            run_id=str(plan["run_id"]),
            world_size=int(plan["world_size"]),
            node=options.node,
            nodes=options.nodes,
            first_rank=int(plan["first_ranks"][str(options.node)]),
            rendezvous=str(plan["rendezvous"]),
            interface=interface,
        )
        member.turn({"has_plan": True})
    except BaseException as error:
        _leave(member, _words_of(error))
        member.close()
        raise
    return member, place, plan["shared"]


def _refuse(hub: Hub, error: BaseException) -> None:
    """Tells the hosts that have come why nothing will be started."""
    code = error.exit_code if isinstance(error, LockstepError) else 1
    _say_last(hub, {"refused": _words_of(error), "code": code})


def _leave(link: Hub | Member, why: str) -> None:
    _say_last(link, {"left": why})


def _say_last(link: Hub | Member, state: dict[str, Any]) -> None:
    """Sends a last word and gives it a moment to arrive; an error on the way changes nothing any more."""
    deadline = time.monotonic() + _FAREWELL
    try:
        while time.monotonic() < deadline:
            link.turn(state)
            channels = (
                [link.peer.channel] if isinstance(link, Member) else [p.channel for p in link.peers.values()]
            )
            if not any(channel is not None and channel.has_unsent for channel in channels):
                return
            link.wait(0.1)
    except (ConfigError, OSError):
        return


def _words_of(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"


def say(line: str) -> None:
    """Tells the user something about the hosts, on this host's terminal."""
    print(f"lockstep: {line}", file=sys.stderr, flush=True)


def _hosts(count: int) -> str:
    return f"{count} other host{'' if count == 1 else 's'}"


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
