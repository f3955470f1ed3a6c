"""Coordinates the supervisors of several hosts while their ranks run, and until all agree on the outcome.

Each host stops or ends its ranks as soon as any host has a reason:

    a rank of one host failed, or a host was lost      all ranks end as after a failure on their own host
    Ctrl-C or a preemption signal on one host          all ranks stop at the same step, with a checkpoint
    the ranks of all hosts wait for one another        node 0 compares the snapshots, and names the culprit
                                                       (``SharedStall``)

Node 0 also names what slows the run down (``SharedStepWindows``). A slow rank does not wait itself; so where all ranks
wait, they wait for the network:

    rank 3 works 40 ms on a micro-batch, all others 20 ms              rank 3 is slow
    on each host every rank waits 90 ms of a step of 120 ms for data   the exchange between the hosts limits the run
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.checks import from_plain
from lockstep.core.world import host_name
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch.hosts.control_link import ControlClient, ControlServer, Peer
from lockstep.launch.hosts.joining import Joined
from lockstep.launch.hosts.outcome import (
    RunOutcome,
    decide_outcome,
    end_from_json,
    end_to_json,
    snapshot_from_json,
    snapshot_to_json,
)
from lockstep.launch.outcome import RankEnd, last_lines
from lockstep.launch.stalls import Stall, report_stall
from lockstep.launch.stalls.report import judge_stall
from lockstep.launch.stragglers import SlowRanks, StepWindow
from lockstep.runtime.control import Control, StopReason
from lockstep.runtime.heartbeat import Beat, Membership, read_beat
from lockstep.runtime.stop_signals import REASONS, SignalInbox

_LIMITING_SHARE, _LIMITING_SECONDS = 0.5, 0.010
"""The exchange limits a run in which every rank waits more than both of a step, in ``_WINDOWS`` windows in a row."""
_WINDOWS = 2
_GRACE_FOR_OTHERS = 2.0
_SHUTDOWN_LIMIT = 2.0
_TICK = 0.5


class SharedStepWindows:
    """The last step windows of this host's ranks; node 0 compares those of all hosts."""

    def __init__(self) -> None:
        self._number = 0
        self._own: Mapping[int, StepWindow] = {}
        self._judged: dict[str, int] = {}
        self._slow_ranks = SlowRanks()
        self._in_a_row, self._is_reported = 0, False

    def take(self, windows: Mapping[int, StepWindow]) -> str:
        """Takes a finished window of this host's ranks; returns no report, since node 0 writes it."""
        if windows:
            self._number, self._own = self._number + 1, windows
        return ""

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON for node 0."""
        return {
            "number": self._number,
            "ranks": {str(rank): dataclasses.asdict(window) for rank, window in self._own.items()},
        }

    def judge(self, name: str, others: Mapping[str, Mapping[str, Any]]) -> str:
        """Returns the lines to print once every host has sent a new window; usually none.

        ``name`` is that of this host; ``others`` has the result of ``to_json`` of each other host, by its name.
        """
        received = {name: self.to_json(), **others}
        numbers = {host: int(each.get("number", 0)) for host, each in received.items()}
        if any(number <= self._judged.get(host, 0) for host, number in numbers.items()):
            return ""
        self._judged = numbers
        windows = {
            host: {int(rank): StepWindow(**window) for rank, window in each["ranks"].items()}
            for host, each in received.items()
        }
        everyone = {rank: window for host in windows.values() for rank, window in host.items()}
        return self._slow_ranks.take(everyone) + self._judge_exchange(windows)

    def _judge_exchange(self, windows: Mapping[str, Mapping[int, StepWindow]]) -> str:
        computing = {host: [w for w in each.values() if w.work > 0] for host, each in windows.items()}
        least = {host: min(w.waited for w in each) for host, each in computing.items() if each}
        longest = max((w.step for each in computing.values() for w in each), default=0.0)
        limits = len(least) > 1 and min(least.values()) > max(_LIMITING_SHARE * longest, _LIMITING_SECONDS)
        self._in_a_row = self._in_a_row + 1 if limits else 0
        if self._in_a_row < _WINDOWS or self._is_reported:
            return ""
        self._is_reported = True
        waits = ", ".join(f"{host} {1e3 * seconds:.0f} ms" for host, seconds in least.items())
        return (
            f"lockstep: the exchange between the hosts limits this run: of {1e3 * longest:.0f} ms per step every rank "
            f"waits for data of others ({waits}). Check the link and the interface above; larger steps, or "
            "reduce = 'bf16' at level B, exchange less data.\n"
        )


class SharedStall:
    """The snapshots of this host's ranks while one of them is overdue, and the report of the whole run."""

    def __init__(self, directory: Path, logs: Path) -> None:
        self._directory, self._logs = directory, logs
        self._stall: Stall | None = None
        self._until = 0.0
        self.lines: list[str] = []
        """The report; empty as long as the run makes progress."""

    def set(self, stall: Stall, *, lasts: float) -> None:
        """Stores new snapshots of this host's ranks; they expire after ``lasts`` seconds, or when a rank moves."""
        self._stall, self._until = stall, time.monotonic() + lasts

    def expire(self) -> None:
        """Drops the snapshots when they are old, or a rank has made progress."""
        if self._stall is None:
            return
        beats = [(snapshot, read_beat(self._directory, snapshot.rank)) for snapshot in self._stall.snapshots]
        if time.monotonic() > self._until or any(beat != snapshot.beat for snapshot, beat in beats):
            self._stall = None

    def clear(self) -> None:
        """Drops the snapshots, because no rank of this host is left."""
        self._stall = None

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the JSON for node 0."""
        return list(map(snapshot_to_json, self._stall.snapshots if self._stall else ()))

    def judge(self, others: Sequence[tuple[Mapping[str, Any], float]], *, is_done: bool) -> None:
        """Writes the report, once every host with running ranks has sent snapshots that together are a deadlock.

        ``others`` has the last message of each other host, and the seconds to add to its times.
        """
        snapshots = [] if self._stall is None else list(self._stall.snapshots)
        if self.lines or not (snapshots or is_done):
            return
        for message, offset in others:
            if not message.get("snapshots") and not message.get("done"):
                return
            snapshots += [snapshot_from_json(fields, offset) for fields in message["snapshots"]]
        verdict = judge_stall(snapshots) if snapshots else None
        if verdict is not None and verdict.is_deadlock:
            self.lines = report_stall(verdict, snapshots, self._logs)


class HostCoordinator:
    """The other hosts of one run, as the supervisor of this host sees them; run directory and logs are this host's."""

    def __init__(self, joined: Joined, control: Control, directory: Path, logs: Path) -> None:
        self._joined, self._link, self._control = joined, joined.link, control
        self._attempt = joined.attempt
        self._logs = logs
        self._ends: dict[int, dict[str, Any]] = {}
        self._own_ends: Sequence[RankEnd] = ()
        self._own_beats: Sequence[Beat] = ()
        self.stall = SharedStall(directory, logs)
        """Takes the snapshots of this host's ranks when one is overdue."""
        self.windows = SharedStepWindows()
        """Takes every step window of this host's ranks."""
        self._fault: dict[str, Any] | None = None
        self._is_done = False
        self._final: RunOutcome | None = None
        self.is_reported = False
        """True if node 0 prints the outcome on the terminal of this host."""

    def fileno(self) -> int:
        """Returns the descriptor that is readable when another host has sent something."""
        return self._link.fileno()

    def synchronize(self, ends: Sequence[RankEnd], beats: Sequence[Beat] = ()) -> bool:
        """Exchanges states with the other hosts; returns whether this host's ranks must end.

        Never blocks. Call it about twice a second, and whenever something has happened, with the ends of this host's
        ranks so far and the beats of its running ranks.
        """
        self._own_ends, self._own_beats = ends, beats
        self.stall.expire()
        self._link.exchange(self._state())
        reason = max((int(message.get("reason", 0)) for message in self._last_messages()), default=0)
        if reason:
            self._control.request_stop(StopReason(reason))
        if isinstance(self._link, ControlServer):
            peers = self._peers.values()
            others = [(self._last_message(peer), peer.offset) for peer in peers]
            self.stall.judge(others, is_done=self._is_done)
            windows = {peer.text: self._last_message(peer).get("windows", {}) for peer in peers}
            if limited := self.windows.judge(f"host 0 ({host_name()})", windows):
                print(limited, end="", file=sys.stderr, flush=True)
        return self._others_fail()

    @property
    def others_save(self) -> bool:
        """True if a rank of another host writes a checkpoint."""
        return any(message.get("saving") for message in self._last_messages())

    @property
    def others_leave(self) -> bool:
        """True if a rank of another host waits to leave the process group."""
        return any(message.get("leaving") for message in self._last_messages())

    def wait_for_outcome(
        self, ends: Sequence[RankEnd], fault: tuple[int, Sequence[str]] | None, inbox: SignalInbox
    ) -> RunOutcome:
        """Waits for the ranks of all other hosts; returns how the run ended, the same on each host.

        ``fault`` has exit code and lines, if this host's ranks could not run at all. A second Ctrl-C ends the wait.
        """
        self._is_done = True
        self.stall.clear()
        self._fault = None if fault is None else {"code": fault[0], "lines": list(fault[1])}
        interrupts = 0
        while self._final is None:
            self.synchronize(ends)
            for number in inbox.take():
                interrupts += REASONS[number] is StopReason.INTERRUPTED
                self._control.request_stop(REASONS[number])
            if interrupts > 1:
                note = "Interrupted while ranks of other hosts were still running."
                return RunOutcome(code=EXIT_INTERRUPTED, lines=(note,))
            self._final = self._outcome()
            if self._final is None:
                self._link.wait(_TICK)
        self._shut_down()
        self._joined.note(self._final.lost)
        return self._final

    @property
    def _peers(self) -> dict[int, Peer]:
        """The connected hosts, without those that were lost in an earlier attempt."""
        return {node: peer for node, peer in self._link.peers.items() if node not in self._joined.lost}

    def _last_messages(self) -> list[dict[str, Any]]:
        return [self._last_message(peer) for peer in self._peers.values()]

    def _last_message(self, peer: Peer) -> dict[str, Any]:
        """The last message of a host in this attempt; empty if it is still in another."""
        return peer.state if peer.state.get("attempt") == self._attempt else {}

    def _state(self) -> dict[str, Any]:
        """Returns the message of this host."""
        for end in self._own_ends:
            if end.rank not in self._ends:
                lines, logs = last_lines(end, self._logs), str(self._logs)
                self._ends[end.rank] = end_to_json(end, host=host_name(), logs=logs, last_lines=lines)
        state: dict[str, Any] = {
            "attempt": self._attempt,
            "reason": int(self._control.reason),
            "failing": self._is_failing() or (isinstance(self._link, ControlServer) and self._others_fail()),
            "saving": any(beat.phase == "save" for beat in self._own_beats),
            "leaving": any(beat.membership is Membership.LEAVING for beat in self._own_beats),
        }
        if isinstance(self._link, ControlServer):
            state["saving"] |= self.others_save
            state["leaving"] |= self.others_leave
            reasons = [int(each.get("reason", 0)) for each in self._last_messages()]
            state["reason"] = max([state["reason"], *reasons])
            state["final"] = None if self._final is None else dataclasses.asdict(self._final)
        else:
            state["snapshots"], state["windows"] = self.stall.to_json(), self.windows.to_json()
            state["ends"] = list(self._ends.values())
            state["done"], state["fault"] = self._is_done, self._fault
            state["acknowledged"] = self._final is not None
        return state

    def _is_failing(self) -> bool:
        """True if a rank of this host has ended so that no other rank can continue."""
        asked = {EXIT_PREEMPTED, EXIT_INTERRUPTED} if self._control.reason is not StopReason.NONE else set()
        since = time.monotonic() - _GRACE_FOR_OTHERS
        return (
            bool(self.stall.lines)
            or self._fault is not None
            or any(end.code not in {EXIT_DONE, *asked} and not end.was_independent for end in self._own_ends)
            or any(end.left_early and end.was_in_group and end.time < since for end in self._own_ends)
        )

    def _others_fail(self) -> bool:
        return bool(self.stall.lines) or any(
            peer.lost or self._last_message(peer).get("failing") for peer in self._peers.values()
        )

    def _outcome(self) -> RunOutcome | None:
        """The outcome, or None while ranks still run; node 0 decides it, the others receive it."""
        if isinstance(self._link, ControlServer):
            done = all(peer.lost or self._last_message(peer).get("done") for peer in self._peers.values())
            return self._decide() if done else None
        received = self._last_message(self._link.peer).get("final")
        if received is not None:
            self.is_reported = self._joined.is_quiet
            outcome: RunOutcome = from_plain(RunOutcome, received)
            return outcome
        return self._decide() if self._link.peer.lost else None

    def _decide(self) -> RunOutcome:
        ends = [end_from_json(fields, 0.0) for fields in self._ends.values()]
        faults = [] if self._fault is None else [(int(self._fault["code"]), list(self._fault["lines"]))]
        for peer in self._peers.values():
            message = self._last_message(peer)
            ends += [end_from_json(fields, peer.offset) for fields in message.get("ends") or []]
            if fault := message.get("fault"):
                lines = [f"On {peer.text}: {line}" for line in fault["lines"][:1]]
                faults.append((int(fault["code"]), [*lines, *fault["lines"][1:]]))
        lost = {node: f"{peer.text} {peer.lost}" for node, peer in self._peers.items() if peer.lost}
        return decide_outcome(
            ends, self._control.reason, lost=lost, faults=faults, stall=self.stall.lines, logs=self._logs
        )

    def _shut_down(self) -> None:
        """Sends the outcome from node 0 to all hosts, and waits until they acknowledge it."""
        deadline = time.monotonic() + _SHUTDOWN_LIMIT
        while time.monotonic() < deadline:
            self._link.exchange(self._state())
            is_member = isinstance(self._link, ControlClient)
            if is_member or all(map(self._has_acknowledged, self._peers.values())):
                return
            self._link.wait(_TICK / 5)

    def _has_acknowledged(self, peer: Peer) -> bool:
        is_ahead = int(peer.state.get("attempt", 0)) > self._attempt
        if peer.lost or not peer.is_connected or is_ahead:
            return True
        return bool(self._last_message(peer).get("acknowledged"))
