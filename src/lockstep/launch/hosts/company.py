"""What the supervisor of one host and those of the others tell each other while ranks run and when they have ended.

Every message holds all that its sender has to say, so none has to be repeated and a new connection takes up where
the former one broke off. Each host asks the ranks of all to stop, or to end, as soon as one of them has a reason:

    a rank of one host failed, or a host was lost      all ranks end as after a failure on their own host
    Ctrl-C or a preemption signal on one host          all ranks stop at the same step, with a checkpoint
    the ranks of all hosts wait for one another        node 0 compares what is seen of them, and names the culprit
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch.beat import Beat, Membership
from lockstep.launch.control import Control, StopReason
from lockstep.launch.hosts.final import Final, conclude
from lockstep.launch.hosts.hub import Hub
from lockstep.launch.hosts.joining import Joined
from lockstep.launch.hosts.member import Member
from lockstep.launch.hosts.messages import end_from_json, end_to_json
from lockstep.launch.hosts.peer import Peer
from lockstep.launch.hosts.shared_pace import SharedPace
from lockstep.launch.hosts.shared_stall import SharedStall
from lockstep.launch.report import last_lines
from lockstep.launch.signal_inbox import SignalInbox
from lockstep.launch.stop_signals import REASONS
from lockstep.launch.verdict import RankEnd
from lockstep.world import host_name

_COMPANY = 2.0
_FAREWELL = 2.0
_TICK = 0.5


class Company:
    """The other hosts of one run, for the supervisor of this one.

    Args:
        joined: this host among the others.
        control: the flags shared with this host's ranks.
        directory: the run directory of this host.
        logs: the log folder of this host.
    """

    def __init__(self, joined: Joined, control: Control, directory: Path, logs: Path) -> None:
        self._joined, self._link, self._control = joined, joined.link, control
        self._attempt = joined.attempt
        self._logs = logs
        self._ends: dict[int, dict[str, Any]] = {}
        self._own_ends: Sequence[RankEnd] = ()
        self._own_beats: Sequence[Beat] = ()
        self.stall = SharedStall(directory, logs)
        """Takes what is seen of this host's ranks when one is overdue."""
        self.pace = SharedPace()
        """Takes what this host's ranks did in every window of steps."""
        self._fault: dict[str, Any] | None = None
        self._is_done = False
        self._final: Final | None = None

    def fileno(self) -> int:
        """Readable when another host has said something."""
        return self._link.fileno()

    def follow(self, ends: Sequence[RankEnd], beats: Sequence[Beat] = ()) -> bool:
        """Tells the others how this host does, passes on what they ask, and says whether its ranks must end.

        Never blocks. Call it about twice a second, and whenever something has happened.

        Args:
            ends: of the ranks of this host that have ended.
            beats: of those that have not.
        """
        self._own_ends, self._own_beats = ends, beats
        self.stall.withdraw()
        self._link.turn(self._state())
        reason = max((int(said.get("reason", 0)) for said in self._said()), default=0)
        if reason:
            self._control.request_stop(StopReason(reason))
        if isinstance(self._link, Hub):
            others = [(self._words(peer), peer.offset) for peer in self._peers.values()]
            self.stall.judge(others, is_done=self._is_done)
            paces = {peer.text: self._words(peer).get("pace", {}) for peer in self._peers.values()}
            print(self.pace.judge(f"host 0 ({host_name()})", paces), end="", file=sys.stderr, flush=True)
        return self._others_fail()

    @property
    def others_save(self) -> bool:
        """Whether a rank of another host writes a checkpoint."""
        return any(said.get("saving") for said in self._said())

    @property
    def others_leave(self) -> bool:
        """Whether a rank of another host waits for all to leave the process group."""
        return any(said.get("leaving") for said in self._said())

    def settle(
        self, ends: Sequence[RankEnd], fault: tuple[int, Sequence[str]] | None, inbox: SignalInbox
    ) -> Final:
        """Waits for the ranks of all other hosts, and returns how the run has ended, the same on each.

        Args:
            ends: of all ranks of this host.
            fault: exit code and lines, where this host's ranks could not run at all.
            inbox: signals to this process; a second Ctrl-C ends the wait.
        """
        self._is_done = True
        self.stall.forget()
        self._fault = None if fault is None else {"code": fault[0], "lines": list(fault[1])}
        interrupts = 0
        while self._final is None:
            self.follow(ends)
            for number in inbox.take():
                interrupts += REASONS[number] is StopReason.INTERRUPTED
                self._control.request_stop(REASONS[number])
            if interrupts > 1:
                return Final(
                    code=EXIT_INTERRUPTED, lines=("Interrupted while ranks of other hosts still ran.",)
                )
            self._final = self._conclusion()
            if self._final is None:
                self._link.wait(_TICK)
        self._bid_farewell()
        self._joined.note(self._final.lost)
        return self._final

    @property
    def _peers(self) -> dict[int, Peer]:
        """The hosts that this one is connected to, without those that were lost in an earlier attempt."""
        if isinstance(self._link, Member):
            return {0: self._link.peer}
        return {node: peer for node, peer in self._link.peers.items() if node not in self._joined.lost}

    def _said(self) -> list[dict[str, Any]]:
        return [self._words(peer) for peer in self._peers.values()]

    def _words(self, peer: Peer) -> dict[str, Any]:
        """The last that a host has said in this attempt; nothing if it is still in another."""
        return peer.state if peer.state.get("attempt") == self._attempt else {}

    def _state(self) -> dict[str, Any]:
        """All that this host has to say."""
        for end in self._own_ends:
            if end.rank not in self._ends:
                lines = last_lines(end, self._logs)
                logs = str(self._logs)
                self._ends[end.rank] = end_to_json(end, host=host_name(), logs=logs, last_lines=lines)
        state: dict[str, Any] = {
            "attempt": self._attempt,
            "reason": int(self._control.reason),
            "failing": self._is_failing() or (isinstance(self._link, Hub) and self._others_fail()),
        }
        state["saving"] = any(beat.phase == "save" for beat in self._own_beats)
        state["leaving"] = any(beat.membership is Membership.LEAVING for beat in self._own_beats)
        if isinstance(self._link, Hub):
            state["saving"] |= self.others_save
            state["leaving"] |= self.others_leave
            state["reason"] = max([state["reason"], *(int(said.get("reason", 0)) for said in self._said())])
            state["final"] = None if self._final is None else self._final.to_json()
        else:
            state["sights"], state["pace"] = self.stall.to_json(), self.pace.to_json()
            state["ends"] = list(self._ends.values())
            state["done"], state["fault"] = self._is_done, self._fault
            state["heard"] = self._final is not None
        return state

    def _is_failing(self) -> bool:
        """Whether a rank of this host has ended in a way after which no other can go on."""
        asked = {EXIT_PREEMPTED, EXIT_INTERRUPTED} if self._control.reason is not StopReason.NONE else set()
        if self.stall.lines or self._fault is not None:
            return True
        if any(end.code not in {EXIT_DONE, *asked} and not end.was_spare for end in self._own_ends):
            return True
        now = time.monotonic()
        return any(
            end.left_company and end.was_in_group and now - end.time > _COMPANY for end in self._own_ends
        )

    def _others_fail(self) -> bool:
        return bool(self.stall.lines) or any(
            peer.lost or self._words(peer).get("failing") for peer in self._peers.values()
        )

    def _conclusion(self) -> Final | None:
        """The end of the run, or None while ranks still run; node 0 decides, the others hear of it."""
        if isinstance(self._link, Hub):
            if any(not self._words(peer).get("done") and not peer.lost for peer in self._peers.values()):
                return None
            return self._conclude()
        said = self._words(self._link.peer).get("final")
        if said is not None:
            return Final.from_json(said)
        return self._conclude() if self._link.peer.lost else None

    def _conclude(self) -> Final:
        ends = [end_from_json(fields, 0.0) for fields in self._ends.values()]
        faults = [] if self._fault is None else [(int(self._fault["code"]), list(self._fault["lines"]))]
        for peer in self._peers.values():
            said = self._words(peer)
            ends += [end_from_json(fields, peer.offset) for fields in said.get("ends") or []]
            if fault := said.get("fault"):
                lines = [f"On {peer.text}: {line}" for line in fault["lines"][:1]]
                faults.append((int(fault["code"]), [*lines, *fault["lines"][1:]]))
        lost = {node: f"{peer.text} {peer.lost}" for node, peer in self._peers.items() if peer.lost}
        return conclude(
            ends, self._control.reason, lost=lost, faults=faults, stall=self.stall.lines, logs=self._logs
        )

    def _bid_farewell(self) -> None:
        """Node 0 tells all hosts the end, and waits until they say that they have heard it."""
        deadline = time.monotonic() + _FAREWELL
        while time.monotonic() < deadline:
            self._link.turn(self._state())
            if isinstance(self._link, Member) or all(map(self._has_heard, self._peers.values())):
                return
            self._link.wait(_TICK / 5)

    def _has_heard(self, peer: Peer) -> bool:
        is_connected = peer.channel is not None and peer.channel.is_open
        is_ahead = int(peer.state.get("attempt", 0)) > self._attempt
        return bool(peer.lost or not is_connected or is_ahead or self._words(peer).get("heard"))
