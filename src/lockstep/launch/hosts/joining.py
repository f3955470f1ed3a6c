"""Brings the hosts of a run together before anything is started, and parts them at its end."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.hosts.hub import Hub, listen
from lockstep.launch.hosts.interface import (
    Interface,
    addresses,
    chosen,
    interface_of_master,
    interface_towards,
)
from lockstep.launch.hosts.member import Member
from lockstep.launch.hosts.options import HostOptions
from lockstep.launch.hosts.roll_call import Hello, Plan, first_ranks
from lockstep.launch.options import new_run_id
from lockstep.launch.place import LOOPBACK, Place
from lockstep.world import host_name

_FAREWELL = 1.0


@dataclass
class Joined:
    """This host among the others, after the roll-call. Changes from one attempt of the run to the next.

    Args:
        link: to node 0, or of it to all others.
        node: number of this host.
        plan: what node 0 has decided for all.
        interface: for the ranks' data.
    """

    link: Hub | Member
    node: int
    plan: Plan
    interface: str
    attempt: int = 0
    """How often the ranks have been started."""
    lost: frozenset[int] = frozenset()
    """Hosts that were lost in earlier attempts."""

    @property
    def shared(self) -> Any:
        """What ``decide`` returned on node 0; JSON."""
        return self.plan.shared

    @property
    def place(self) -> Place:
        """Of this host among those that are left, which are numbered anew in their order."""
        left = {node: count for node, count in self.plan.ranks.items() if node not in self.lost}
        before = [node for node in left if node < self.node]
        return Place(
            run_id=self.plan.run_id,
            world_size=sum(left.values()),
            node=len(before),
            nodes=len(left),
            first_rank=sum(left[node] for node in before),
            rendezvous=self.plan.rendezvous,
            interface=self.interface,
        )

    def note(self, lost: Iterable[int]) -> None:
        """Takes up how an attempt has ended; the next is made without the hosts that were lost."""
        self.lost |= set(lost)
        self.attempt += 1


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
    link, plan, interface = (_as_hub if options.node == 0 else _as_member)(options, hello, known, decide)
    try:
        yield Joined(link, options.node, plan, interface)
    except BaseException as error:
        _leave(link, _words_of(error))
        raise
    finally:
        link.close()


def _as_hub(
    options: HostOptions, hello: Hello, known: list[Interface], decide: Callable[[int], Any]
) -> tuple[Hub, Plan, str]:
    found = interface_of_master(options.host, options.port, known)
    interface = chosen(options.interface, found, known, os.environ)
    listen(found.address, options.port + 1).close()  # the ranks' store will need it
    address = f"[{found.address}]" if ":" in found.address else found.address
    hub = Hub(options, found.address, hello, say)
    say(f"waiting for {_hosts(options.nodes - 1)} at {address}:{options.port} ({found.name})")
    try:
        hub.gather()
        ranks = {node: each.ranks for node, each in sorted(hub.hellos.items())}
        plan = Plan(
            name=hello.name,
            run_id=new_run_id(),
            ranks=ranks,
            rendezvous=f"tcp://{address}:{options.port + 1}",
            shared=decide(sum(ranks.values())),
        )
        _announce(hub.hellos, plan, interface, f"{address}:{options.port}")
        _give_plan(hub, options, plan)
    except BaseException as error:
        _refuse(hub, error)
        hub.close()
        raise
    return hub, plan, interface


def _announce(hellos: Mapping[int, Hello], plan: Plan, interface: str, address: str) -> None:
    first = first_ranks(hellos)
    hosts = ", ".join(
        f"{each.name} with rank{'s' if each.ranks > 1 else ''} {_span(first[node], each.ranks)}"
        for node, each in sorted(hellos.items())
    )
    say(f"{len(hellos)} hosts: {hosts}; data over {interface}")
    if interface == LOOPBACK:
        say("all on this machine: nothing is open to a network")
        return
    say(
        f"open to that network: {address} (supervisors, by token), {plan.rendezvous.removeprefix('tcp://')} (the "
        "ranks' store) and the ranks' own ports; the last two are not protected: see docs/hosts.md"
    )


def _give_plan(hub: Hub, options: HostOptions, plan: Plan) -> None:
    """Tells every host its place, and waits until each has said that it knows."""
    deadline = time.monotonic() + options.silence_limit
    while not all(peer.state.get("has_plan") or peer.lost for peer in hub.peers.values()):
        if time.monotonic() > deadline:
            break
        hub.turn({"plan": asdict(plan)})
        hub.wait(0.2)


def _as_member(
    options: HostOptions, hello: Hello, known: list[Interface], decide: Callable[[int], Any]
) -> tuple[Member, Plan, str]:
    found = interface_towards(options.host, options.port, known)
    interface = chosen(options.interface, found, known, os.environ)
    member = Member(options, hello, say)
    say(f"joining host 0 at {options.master} from {found.address} ({found.name}); data over {interface}")
    try:
        plan = Plan.from_json(member.await_plan())
        member.turn({"has_plan": True})
    except BaseException as error:
        _leave(member, _words_of(error))
        member.close()
        raise
    return member, plan, interface


def _refuse(hub: Hub, error: BaseException) -> None:
    """Tells the hosts that have come why nothing will be started."""
    if isinstance(error, LockstepError):
        _say_last(hub, {"refused": str(error), "code": error.exit_code})
    else:
        _say_last(hub, {"refused": f"host 0 has ended before the start: {_words_of(error)}.", "code": 1})


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
