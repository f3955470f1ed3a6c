"""Watches running ranks, and decides when they are sent SIGTERM and SIGKILL.

first failure           0.25 s for the others to notice by themselves, SIGTERM, 3 s later SIGKILL
Ctrl-C                  stop flag; after 3 s SIGTERM, after 4 s SIGKILL; later while a rank saves
... that no rank reads  SIGTERM at once, after 3 s SIGKILL
... once more           SIGKILL, and 3 s later, or once more, to the fork server
preemption signal       stop flag; after the grace SIGTERM, 3 s later SIGKILL
a rank left early       2 s for the others to end as well, SIGTERM, 3 s later SIGKILL
the run stands still    SIGTERM at once, 3 s later SIGKILL
a rank waits to leave   for 2 s, while another waits for it in a collective: SIGTERM, 1 s later SIGKILL

``TerminationSchedule`` holds the signals that are due, ``EarlyExitDetector`` finds ranks that left while others train,
and ``Watch`` is the loop.
"""

from __future__ import annotations

import selectors
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED
from lockstep.launch.debugger import is_debugged
from lockstep.launch.fork_server import ServerProcess
from lockstep.launch.hosts import HostCoordinator
from lockstep.launch.hosts.coordinator import SharedStepWindows
from lockstep.launch.options import LaunchOptions
from lockstep.launch.outcome import MemoryWatch, RankEnd
from lockstep.launch.stalls import Stall, StallWatch, describe, take_snapshots
from lockstep.launch.stalls.stall_watch import process_state
from lockstep.launch.stragglers import SlowRanks, StepWindows
from lockstep.runtime.control import Control, StopReason
from lockstep.runtime.error_record import read_record
from lockstep.runtime.heartbeat import Beat, Membership, read_beat, read_beats
from lockstep.runtime.output import say
from lockstep.runtime.stack_dump import Mark
from lockstep.runtime.stop_signals import REASONS, SignalInbox, drain
from lockstep.text import printable


class TerminationSchedule:
    """The signals that are due, and those that were sent: each is sent once, and only moves closer."""

    def __init__(self) -> None:
        self._due: dict[signal.Signals, float] = {}
        self._sent: set[signal.Signals] = set()

    @property
    def is_decided(self) -> bool:
        """True if a signal was sent or is due."""
        return bool(self._due or self._sent)

    @property
    def next_due(self) -> float:
        """``time.monotonic()`` of the next signal; infinity if there is none."""
        return min(self._due.values(), default=float("inf"))

    def within(self, term: float, kill: float) -> None:
        """Schedules SIGTERM and SIGKILL, in seconds from now; an earlier due time stays."""
        now = time.monotonic()
        for number, delay in ((signal.SIGTERM, term), (signal.SIGKILL, kill)):
            if number not in self._sent:
                self._due[number] = min(self._due.get(number, float("inf")), now + delay)

    def postpone(self, term: float, kill: float) -> None:
        """Gives the ranks more time: no signal is due earlier than in ``term`` and ``kill`` seconds."""
        now = time.monotonic()
        for number, more in ((signal.SIGTERM, term), (signal.SIGKILL, kill)):
            if number in self._due:
                self._due[number] = max(self._due[number], now + more)

    def delay(self, seconds: float) -> None:
        """Moves every signal that is due by this time."""
        self._due = {number: due + seconds for number, due in self._due.items()}

    def take_due(self) -> list[signal.Signals]:
        """Returns the signals to send now, SIGTERM first."""
        now = time.monotonic()
        taken = [number for number, due in self._due.items() if due <= now]
        for number in taken:
            del self._due[number]
        self._sent.update(taken)
        return taken


_LEFT_EARLY = 2.0
_STUCK, _STUCK_KILL = 2.0, 1.0
_FORCE = 3.0
_EXCHANGES = (Mark.WAITS_FOR_EXCHANGE, Mark.WAITS_FOR_GRADIENTS)
_TRAINING = ("forward", "backward", "reduce", "update", "wait")


class EarlyExitDetector:
    """Detects that ranks of one host wait for ranks that left, or leave while others train for over ``limit`` s."""

    def __init__(self, directory: Path, limit: float) -> None:
        self._directory, self._limit = directory, limit
        self._leaving_since = self._look_again = time.monotonic()

    def look(
        self, ends: Iterable[RankEnd], running: Mapping[int, int], beats: Sequence[Beat], *, elsewhere: bool
    ) -> tuple[float, float] | None:
        """Returns in how many seconds the running ranks are to be sent SIGTERM and SIGKILL; None to let them run.

        ``running`` has their process ids; ``elsewhere`` says whether ranks of other hosts are leaving.
        """
        now = time.monotonic()
        if any(end.left_early and end.was_in_group and now - end.time > _LEFT_EARLY for end in ends):
            return 0.0, _FORCE
        if not elsewhere and not any(beat.membership is Membership.LEAVING for beat in beats):
            self._leaving_since, self._look_again = now, now + _STUCK
        elif now > self._look_again and any(_is_silent(beat, now) for beat in beats):
            waited = now - self._leaving_since
            self._look_again = now + max(_STUCK, waited / 2)  # one may export a model for an hour meanwhile
            trains = any(beat.phase in _TRAINING and _is_silent(beat, now) for beat in beats)
            if self._is_awaited(running) or (trains and 0 < self._limit < waited):
                return 0.0, _STUCK_KILL
        return None

    def _is_awaited(self, running: Mapping[int, int]) -> bool:
        """True if a rank waits for those that leave: one that trains, or one in an exchange of Lockstep's own."""
        return any(
            each.waits_in
            and each.beat.membership is Membership.JOINED
            and (each.beat.phase in _TRAINING or any(frame.kind in _EXCHANGES for frame in each.stack))
            for each in take_snapshots(self._directory, running, {})
        )


def _is_silent(beat: Beat, now: float) -> bool:
    return beat.membership is Membership.JOINED and now - beat.time > _STUCK


_TICK = 0.5
_NOTICE = 0.25
_SUSPENDED = 5.0
"""A wait that ends so much too late means that this process was suspended; half of a stall limit that is shorter."""
_INTERRUPT_TERM, _INTERRUPT_KILL, _INTERRUPT_SAVE_LIMIT = 3.0, 4.0, 9.0


class Watch:
    """The state of one run as its supervisor sees it.

    Heartbeats are in the run directory, error records in the log folder. ``first_rank`` is this host's lowest rank.
    """

    def __init__(
        self,
        server: ServerProcess,
        control: Control,
        directory: Path,
        logs: Path,
        options: LaunchOptions,
        first_rank: int = 0,
        coordinator: HostCoordinator | None = None,
    ) -> None:
        self._server, self._control, self._coordinator = server, control, coordinator
        self._directory, self._logs, self._options = directory, logs, options
        self._ranks = range(first_rank, first_rank + options.devices.count)
        self._running: dict[int, int] = {}  # rank -> process id
        self._ended: dict[int, RankEnd] = {}
        self._told: set[int] = set()
        self._schedule = TerminationSchedule()
        self._reason = StopReason.NONE
        self._asked_at, self._asked_twice = 0.0, False
        self._killed_at = self._stopped_since = float("inf")
        self._early_exits = EarlyExitDetector(directory, options.stall_limit)
        self._memory, self._windows = MemoryWatch(), StepWindows(directory)
        self._slow_ranks: SlowRanks | SharedStepWindows = coordinator.windows if coordinator else SlowRanks()
        self._stall_watch = StallWatch(directory, options.stall_limit, is_part=coordinator is not None)
        self._no_stall_before = 0.0
        self.stall: Stall | None = None
        """Why the run was ended, if it stood still."""
        self.broken = ""
        """Why not every rank could be started: a sentence, with a traceback under it; or empty."""
        self.server_lost = False
        """True if the fork server ended before its ranks."""

    @property
    def ends(self) -> list[RankEnd]:
        """The ends of the ranks, by rank; complete after ``wait_for_ranks``."""
        return [self._ended[rank] for rank in sorted(self._ended)]

    def wait_for_ranks(self, inbox: SignalInbox, from_ranks: int) -> None:
        """Waits until every rank has ended; ``from_ranks`` is a pipe with a byte for each signal to a rank."""
        with selectors.DefaultSelector() as selector:
            for source in (self._server, inbox, from_ranks, self._coordinator):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            while len(self._ended) < len(self._ranks) and not self.broken:
                asleep = time.monotonic()
                pause = max(0.0, min(_TICK, self._schedule.next_due - asleep))
                selector.select(pause)
                self._allow_for_suspension(time.monotonic() - asleep - pause)
                self._take_events(self._server.events())
                self._take_signals(inbox.take(), drain(from_ranks))
                if self._coordinator is not None and self._coordinator.synchronize(self.ends, self._beats()):
                    self._schedule.within(_NOTICE, _NOTICE + _FORCE)
                self._start_stopping()
                self._memory.look(self._running)
                if slow := self._slow_ranks.take(self._windows.look(self._running)):
                    print(printable(slow), end="", file=sys.stderr, flush=True)
                self._check_early_exits()
                self._check_stall()
                self._check_server()
                self._send_due_signals()
                if self._server.closed and not self.broken:
                    self._note_lost_ranks()

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
            record=read_record(self._logs, rank, self._directory),
        )
        self._ended[rank] = end
        asked = self._control.reason is not StopReason.NONE and code in (EXIT_PREEMPTED, EXIT_INTERRUPTED)
        if code != EXIT_DONE and not asked and not end.was_independent:
            self._schedule.within(_NOTICE, _NOTICE + _FORCE)

    def _take_signals(self, own: Iterable[signal.Signals], from_ranks: bytes) -> None:
        for number in own:
            if number is signal.SIGINT and self._control.reason is StopReason.INTERRUPTED:
                if self._asked_twice:
                    self._server.kill()
                self._asked_twice = True
                self._schedule.within(0.0, 0.0)
            self._control.request_stop(REASONS[number])
        if not self._control.ending:
            for byte in from_ranks:
                if byte in REASONS:
                    self._control.request_stop(REASONS[signal.Signals(byte)])

    def _start_stopping(self) -> None:
        """Acts on a new stop reason."""
        reason = self._control.reason
        if reason is self._reason:
            return
        self._reason, self._asked_at = reason, time.monotonic()
        if not self._running:
            self._server.kill()  # still importing torch
        elif reason is StopReason.PREEMPTED:
            self._schedule.within(self._options.grace, self._options.grace + _FORCE)
        elif self._control.polled:
            self._schedule.within(_INTERRUPT_TERM, _INTERRUPT_KILL)
        else:
            self._schedule.within(0.0, _FORCE)

    def _allow_for_suspension(self, late: float) -> None:
        """Gives the ranks their time again if this process woke up so many seconds late.

        It was suspended, and they with it: by SIGSTOP, by `scontrol suspend`, or with its virtual machine.
        """
        limit = self._options.stall_limit
        if late > min(_SUSPENDED, limit / 2 or _SUSPENDED):
            self._no_stall_before = time.monotonic() + limit
            self._schedule.delay(late)

    def _check_early_exits(self) -> None:
        if self._schedule.is_decided or not self._running:
            return
        elsewhere = self._coordinator is not None and self._coordinator.others_leave
        due = self._early_exits.look(self._ended.values(), self._running, self._beats(), elsewhere=elsewhere)
        if due is not None:
            self._schedule.within(*due)

    def _check_stall(self) -> None:
        """Ends a run that is in a deadlock; only reports one that is merely slow."""
        if self._schedule.is_decided or not self._running or is_debugged(self._directory):
            return
        if time.monotonic() < self._no_stall_before:
            return
        found = self._stall_watch.look(self._running)
        if found is None:
            return
        if self._coordinator is not None:  # the rank that the others wait for may be on another host
            self._coordinator.stall.set(found, lasts=self._options.stall_limit / 2)
        elif found.verdict.is_deadlock:
            self.stall = found
            self._schedule.within(0.0, _FORCE)
        else:
            print(printable("\n".join(describe(found.verdict, found.snapshots))), file=sys.stderr, flush=True)

    def _check_server(self) -> None:
        """Kills a fork server that is stopped (SIGSTOP) while all its ranks have ended, which it cannot report then."""
        ended = bool(self._running) and all(process_state(pid) in ("Z", "") for pid in self._running.values())
        if not ended or process_state(self._server.pid) != "T":
            self._stopped_since = float("inf")
            return
        self._stopped_since = min(self._stopped_since, time.monotonic())
        if 0 < self._options.stall_limit < time.monotonic() - self._stopped_since and not self._server.closed:
            say(f"all ranks have ended, and their parent process (pid {self._server.pid}) is stopped by a signal.")
            self._server.kill()

    def _send_due_signals(self) -> None:
        self._wait_for_saving(time.monotonic())
        for number in self._schedule.take_due() if self._running else ():
            self._control.ending = True
            self._told.update(self._running)
            self._server.signal(number, self._running)
            if number is signal.SIGKILL:
                self._killed_at = time.monotonic()
        if time.monotonic() > self._killed_at + _FORCE:  # the server is stopped, or hangs
            self._server.kill()

    def _wait_for_saving(self, now: float) -> None:
        """After one Ctrl-C, ranks that write a checkpoint get a few seconds more."""
        if self._reason is not StopReason.INTERRUPTED or self._asked_twice:
            return
        if self._schedule.next_due > now or now > self._asked_at + _INTERRUPT_SAVE_LIMIT:
            return
        elsewhere = self._coordinator is not None and self._coordinator.others_save
        if elsewhere or any(beat.phase == "save" for beat in self._beats()):
            self._schedule.postpone(_TICK, _TICK + 1.0)

    def _beats(self) -> list[Beat]:
        """The last heartbeats of the running ranks."""
        return list(read_beats(self._directory, self._running).values())

    def _note_lost_ranks(self) -> None:
        """Notes an end for every rank that the lost server can no longer report."""
        lost = [rank for rank in self._ranks if rank not in self._ended]
        self.server_lost = bool(lost) and self._reason is StopReason.NONE
        for rank in lost:
            self._told.add(rank)
            self._note_end(rank, -signal.SIGKILL, time.monotonic())
