"""Connects the hosts of a run before anything is started, and disconnects them at its end."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.config.checks import from_plain
from lockstep.core.world import LOOPBACK, HostLayout, host_name
from lockstep.distributed.network import Interface, addresses, data_interface, interface_of_master, interface_towards
from lockstep.errors import ConfigError, LockstepError
from lockstep.launch.hosts.control_link import ControlClient, ControlServer, listen
from lockstep.launch.hosts.roll_call import Hello, HostOptions, Plan
from lockstep.runtime.output import say
from lockstep.text import numbered, plural

_SHUTDOWN_LIMIT = 1.0


@dataclass
class Joined:
    """The hosts of a run after the roll-call, as this host sees them; changes from one attempt to the next."""

    link: ControlServer | ControlClient
    """To node 0; on node 0 to all others."""
    node: int
    plan: Plan
    interface: str
    """For the ranks' data."""
    is_quiet: bool = False
    """True if node 0 reports on the same terminal."""
    token: bytes = field(default=b"", repr=False)
    """The secret that the hosts share."""
    attempt: int = 0
    """How often the ranks have been started."""
    lost: frozenset[int] = frozenset()
    """Hosts that were lost in earlier attempts."""

    @property
    def shared(self) -> Any:
        """The value that ``decide`` returned on node 0; JSON."""
        return self.plan.shared

    @property
    def layout(self) -> HostLayout:
        """The position of this host among the remaining ones, which are renumbered in their order."""
        left = {node: count for node, count in self.plan.ranks.items() if node not in self.lost}
        before = [node for node in left if node < self.node]
        return HostLayout(
            run_id=self.plan.run_id,
            world_size=sum(left.values()),
            node=len(before),
            nodes=len(left),
            first_rank=sum(left[node] for node in before),
            rendezvous=self.plan.rendezvous,
            interface=self.interface,
        )

    def note(self, lost: Iterable[int]) -> None:
        """Ends an attempt; the next is made without the hosts that were lost."""
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
        decide: called on node 0 with the number of all ranks when all hosts are connected; returns JSON for all hosts.

    Raises:
        ConfigError: addresses, tokens or settings do not match, or ``decide`` raised it; on every host.
        RankError: not every host connected in time; names those that did not.
    """
    known = addresses()
    hello = Hello(
        node=options.node,
        name=host_name(),
        ranks=ranks,
        instance=secrets.token_hex(8),
        settings={**settings, "nnodes": str(options.nodes)},
    )
    link: ControlServer | ControlClient
    if options.node == 0:
        link, plan, interface = _serve(options, hello, known, decide)
    else:
        link, plan, interface = _join(options, hello, known)
    try:
        is_quiet = options.shares_terminal and options.node > 0
        yield Joined(link, options.node, plan, interface, is_quiet, options.token)
    except BaseException as error:
        _send_last(link, {"left": _reason(error)})
        raise
    finally:
        link.close()


def _serve(
    options: HostOptions, hello: Hello, known: list[Interface], decide: Callable[[int], Any]
) -> tuple[ControlServer, Plan, str]:
    found = interface_of_master(options.host, options.port, known)
    interface = data_interface(options.interface, found, known, os.environ)
    listen(found.address, options.port + 1).close()  # the ranks' store needs it
    address = f"[{found.address}]" if ":" in found.address else found.address
    server = ControlServer(options, found.address, hello, say)
    say(f"waiting for {plural(options.nodes - 1, 'other host')} at {address}:{options.port} ({found.name})")
    try:
        server.wait_for_hosts()
        ranks = {node: each.ranks for node, each in sorted(server.hellos.items())}
        plan = Plan(
            name=hello.name,
            run_id=server.run_id,
            ranks=ranks,
            rendezvous=f"tcp://{address}:{options.port + 1}",
            shared=decide(sum(ranks.values())),
        )
        _announce(server.hellos, plan, interface, f"{address}:{options.port}")
        _send_plan(server, options, plan)
    except BaseException as error:
        is_ours = isinstance(error, LockstepError)
        why = str(error) if is_ours else f"host 0 ended before the start: {_reason(error)}."
        _send_last(server, {"refused": why, "code": getattr(error, "exit_code", 1)})
        server.close()
        raise
    return server, plan, interface


def _announce(hellos: Mapping[int, Hello], plan: Plan, interface: str, address: str) -> None:
    hosts, rank = [], 0  # ranks are numbered host by host
    for _, hello in sorted(hellos.items()):
        hosts.append(f"{hello.name} with {numbered('rank', range(rank, rank + hello.ranks))}")
        rank += hello.ranks
    say(f"{len(hosts)} hosts: {', '.join(hosts)}; data over {interface}")
    if interface == LOOPBACK:
        say("all hosts are this machine: no port is open to a network")
        return
    say(
        f"open to that network: {address} (supervisors, authenticated by token), "
        f"{plan.rendezvous.removeprefix('tcp://')} (the ranks' store) and the ranks' own ports; the last two are not "
        "protected: see docs/hosts.md"
    )


def _send_plan(server: ControlServer, options: HostOptions, plan: Plan) -> None:
    """Sends every host the plan, and waits until each has acknowledged it."""
    deadline = time.monotonic() + options.silence_limit
    while not all(peer.state.get("has_plan") or peer.lost for peer in server.peers.values()):
        if time.monotonic() > deadline:
            return
        server.exchange({"plan": asdict(plan)})
        server.wait(0.2)


def _join(options: HostOptions, hello: Hello, known: list[Interface]) -> tuple[ControlClient, Plan, str]:
    found = interface_towards(options.host, options.port, known)
    interface = data_interface(options.interface, found, known, os.environ)
    client = ControlClient(options, hello, say)
    if not options.shares_terminal:
        say(f"joining host 0 at {options.master} from {found.address} ({found.name}); data over {interface}")
    try:
        plan: Plan = from_plain(Plan, client.wait_for_plan())
        client.exchange({"has_plan": True})
    except BaseException as error:
        _send_last(client, {"left": _reason(error)})
        client.close()
        if options.shares_terminal and isinstance(error, LockstepError) and client.peer.state.get("refused"):
            raise SystemExit(error.exit_code) from error  # node 0 has printed it
        raise
    return client, plan, interface


def _send_last(link: ControlServer | ControlClient, state: dict[str, Any]) -> None:
    """Sends a last message and waits a moment for it to be delivered; ignores errors."""
    deadline = time.monotonic() + _SHUTDOWN_LIMIT
    try:
        while time.monotonic() < deadline:
            link.exchange(state)
            if not any(peer.channel is not None and peer.channel.has_unsent for peer in link.peers.values()):
                return
            link.wait(0.1)
    except (ConfigError, OSError):
        return


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was interrupted"
    return str(error) if isinstance(error, LockstepError) else f"{type(error).__name__}: {error}"
