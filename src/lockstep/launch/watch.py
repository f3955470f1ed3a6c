"""Watches running ranks, and decides when which of them is told to end.

first failure           0.25 s for the others to notice by themselves, SIGTERM, 3 s later SIGKILL
Ctrl-C                  stop flag; after 3 s SIGTERM, after 4 s SIGKILL; later while a rank saves
... that no rank reads  SIGTERM at once, after 3 s SIGKILL
... once more           SIGKILL
preemption signal       stop flag; after the grace SIGTERM, 3 s later SIGKILL
a rank left early       2 s for the others to end as well, SIGTERM, 3 s later SIGKILL
the run stands still    SIGTERM at once, 3 s later SIGKILL
a rank waits to leave   for 2 s, while another waits for it in a collective: SIGTERM, 1 s later SIGKILL
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch.attaching import is_debugged
from lockstep.launch.beat import Beat, read_beat
from lockstep.launch.control import Control, StopReason
from lockstep.launch.ending import Ending
from lockstep.launch.hosts import Company
from lockstep.launch.hosts.shared_pace import SharedPace
from lockstep.launch.leavers import Leavers
from lockstep.launch.memory import MemoryWatch
from lockstep.launch.options import LaunchOptions
from lockstep.launch.records import read_record
from lockstep.launch.server_process import ServerProcess
from lockstep.launch.signal_inbox import SignalInbox, drain
from lockstep.launch.slow_ranks import SlowRanks
from lockstep.launch.stalls import Stall, StallWatch, describe
from lockstep.launch.stop_signals import REASONS
from lockstep.launch.verdict import RankEnd
from lockstep.launch.windows import Windows

_TICK = 0.5
_NOTICE = 0.25
_FORCE = 3.0
_INTERRUPT_TERM, _INTERRUPT_KILL, _INTERRUPT_SAVE_LIMIT = 3.0, 4.0, 9.0


class Watch:
    """The state of one run as its supervisor sees it.

    Args:
        server: forks the ranks and reports their ends.
        control: the flags shared with the ranks.
        directory: the run directory, with the heartbeats.
        logs: the log folder, with the error records.
        options: number of ranks and grace.
        first_rank: the lowest rank of this host.
        company: the other hosts of the run, if there are any.
    """

    def __init__(
        self,
        server: ServerProcess,
        control: Control,
        directory: Path,
        logs: Path,
        options: LaunchOptions,
        *,
        first_rank: int = 0,
        company: Company | None = None,
    ) -> None:
        self._server = server
        self._control = control
        self._directory, self._logs = directory, logs
        self._options = options
        self._ranks = range(first_rank, first_rank + options.devices.count)
        self._company = company
        self._running: dict[int, int] = {}  # rank -> process id
        self._ended: dict[int, RankEnd] = {}
        self._told: set[int] = set()
        self._ending = Ending()
        self._reason = StopReason.NONE
        self._asked_at, self._asked_twice = 0.0, False
        self._leavers = Leavers(directory, options.stall_limit)
        self._memory, self._windows = MemoryWatch(), Windows(directory)
        self._pace: SlowRanks | SharedPace = SlowRanks() if company is None else company.pace
        self._stall_watch = StallWatch(directory, options.stall_limit, is_part=company is not None)
        self.stall: Stall | None = None
        """Why the run was ended, if it stood still."""
        self.broken = ""
        """Why no rank could be started: a traceback, or empty."""
        self.server_lost = False
        """Whether the fork server ended before its ranks."""

    @property
    def ends(self) -> list[RankEnd]:
        """How each rank ended, by rank; complete after ``until_all_ended``."""
        return [self._ended[rank] for rank in sorted(self._ended)]

    def until_all_ended(self, inbox: SignalInbox, from_ranks: int) -> None:
        """Returns when no rank is left.

        Args:
            inbox: signals to this process.
            from_ranks: pipe with the numbers of signals to ranks, one byte each.
        """
        with selectors.DefaultSelector() as selector:
            for source in (self._server, inbox, from_ranks):
                selector.register(source, selectors.EVENT_READ)
            if self._company is not None:
                selector.register(self._company, selectors.EVENT_READ)
            while len(self._ended) < len(self._ranks) and not self.broken:
                selector.select(self._patience())
                self._take_events(self._server.events())
                self._take_signals(inbox.take(), drain(from_ranks))
                if self._company is not None and self._company.follow(self.ends, self._beats()):
                    self._ending.within(_NOTICE, _NOTICE + _FORCE)
                self._start_stopping()
                self._memory.look(self._running)
                windows = self._windows.look(self._running)
                print(self._pace.take(windows), end="", file=sys.stderr, flush=True)
                self._look_for_leavers()
                self._look_for_stalls()
                self._act()
                if self._server.closed and not self.broken:
                    self._close_the_books()

    def _patience(self) -> float:
        return max(0.0, min(_TICK, self._ending.next_due - time.monotonic()))

    def _take_events(self, events: Iterable[dict[str, Any]]) -> None:
        for event in events:
            if event["event"] == "started":
                self._running[event["rank"]] = event["pid"]
            elif event["event"] == "ended":
                self._note_end(event["rank"], event["code"], event["time"])
            else:
                self.broken = event["message"]

    def _note_end(self, rank: int, code: int, moment: float) -> None:
        end = RankEnd(
            rank=rank,
            pid=self._running.pop(rank, 0),
            code=code,
            time=moment,
            killer=self._memory.killer_of(rank, code),
            ended_by_us=rank in self._told,
            beat=read_beat(self._directory, rank),
            record=read_record(self._logs, rank),
        )
        self._ended[rank] = end
        asked = self._control.reason is not StopReason.NONE and code in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
        if code != EXIT_DONE and not asked and not end.was_spare:
            self._ending.within(_NOTICE, _NOTICE + _FORCE)

    def _take_signals(self, own: Iterable[signal.Signals], from_ranks: bytes) -> None:
        for number in own:
            if number is signal.SIGINT and self._control.reason is StopReason.INTERRUPTED:
                self._asked_twice = True
                self._ending.within(0.0, 0.0)
            self._control.request_stop(REASONS[number])
        if not self._control.ending:
            for byte in from_ranks:
                if byte in REASONS:
                    self._control.request_stop(REASONS[signal.Signals(byte)])

    def _start_stopping(self) -> None:
        """Acts on a new stop reason, whoever set it."""
        reason = self._control.reason
        if reason is self._reason:
            return
        self._reason, self._asked_at = reason, time.monotonic()
        if not self._running:
            self._server.kill()  # still importing torch
        elif reason is StopReason.PREEMPTED:
            self._ending.within(self._options.grace, self._options.grace + _FORCE)
        elif self._control.polled:
            self._ending.within(_INTERRUPT_TERM, _INTERRUPT_KILL)
        else:
            self._ending.within(0.0, _FORCE)

    def _look_for_leavers(self) -> None:
        """Ends a run that waits for a rank which has left, or which is leaving while another still trains."""
        if self._ending.is_decided or not self._running:
            return
        elsewhere = self._company is not None and self._company.others_leave
        due = self._leavers.look(self._ended.values(), self._running, self._beats(), elsewhere=elsewhere)
        if due is not None:
            self._ending.within(*due)

    def _look_for_stalls(self) -> None:
        """Ends a run in which ranks wait for one that does not come; only mentions one that is merely slow."""
        if self._ending.is_decided or not self._running or is_debugged(self._directory):
            return
        found = self._stall_watch.look(self._running)
        if found is None:
            return
        if self._company is not None:  # whom this host's ranks wait for may be elsewhere
            self._company.stall.weigh(found, lasts=self._options.stall_limit / 2)
        elif found.verdict.is_deadlock:
            self.stall = found
            self._ending.within(0.0, _FORCE)
        else:
            print("\n".join(describe(found.verdict, found.sights)), file=sys.stderr, flush=True)

    def _act(self) -> None:
        self._wait_for_saving(time.monotonic())
        for number in self._ending.take_due() if self._running else ():
            self._control.ending = True
            self._told.update(self._running)
            self._server.signal(number, self._running)

    def _wait_for_saving(self, now: float) -> None:
        """After one Ctrl-C, ranks that write a checkpoint get a few seconds more."""
        if self._reason is not StopReason.INTERRUPTED or self._asked_twice:
            return
        if self._ending.next_due > now or now > self._asked_at + _INTERRUPT_SAVE_LIMIT:
            return
        elsewhere = self._company is not None and self._company.others_save
        if elsewhere or any(beat.phase == "save" for beat in self._beats()):
            self._ending.postpone(_TICK, _TICK + 1.0)

    def _beats(self) -> list[Beat]:
        """The last heartbeats of the ranks that run."""
        return [beat for rank in self._running if (beat := read_beat(self._directory, rank)) is not None]

    def _close_the_books(self) -> None:
        """Notes an end for every rank that the lost server can no longer report."""
        lost = [rank for rank in self._ranks if rank not in self._ended]
        self.server_lost = bool(lost) and self._reason is StopReason.NONE
        for rank in lost:
            self._told.add(rank)
            self._note_end(rank, -signal.SIGKILL, time.monotonic())
