"""The process that has torch imported once and forks every rank of one run.

It runs no torch operator and never touches a GPU, so that a fork of it is sound; it forks from its main
thread, so that the parent-death signal of a rank means the server's end; and it is tied to the supervisor the
same way.

    supervisor ── JSON lines over a socket pair ──> fork server ── fork ──> ranks
               <── started, ended (in order) ──────
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lockstep.launch.parent_death import arm
from lockstep.launch.rank import RankTask, run_rank
from lockstep.launch.targets import from_json


def main() -> None:
    """Serves one run; the arguments are the socket, the signal pipe and the supervisor's process id."""
    channel_number, signal_pipe, supervisor = (int(argument) for argument in sys.argv[1:4])
    arm(supervisor)
    channel = socket.socket(fileno=channel_number)
    with channel.makefile("r") as lines:
        order = json.loads(lines.readline())
    try:
        _import(order["preload"])
    except Exception:
        _tell(channel, event="broken", message=traceback.format_exc())
        return
    task = _Server(channel).serve(order, signal_pipe)
    if task is not None:
        run_rank(task)
    os._exit(0)


def _import(preload: list[str]) -> None:
    """Imports torch, and what the target asked for if it is there; the rank says what is missing.

    The garbage collector rests meanwhile (a tenth of the time), and never looks at what was imported afterwards, so
    that its marks do not copy the pages that all ranks share.
    """
    gc.disable()
    importlib.import_module("torch.distributed")
    from lockstep.launch.light_torch import postpone_compiler

    postpone_compiler()
    for name in preload:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()


class _Server:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._ranks: dict[int, int] = {}  # process id -> rank
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)

    def serve(self, order: Mapping[str, Any], signal_pipe: int) -> RankTask | None:
        """Forks the ranks and reports until the last has ended; in a fork, returns that rank's task."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno())
        server = os.getpid()
        for rank in order["ranks"]:
            process = os.fork()
            if process == 0:
                self._forget()
                return RankTask(
                    **rank,
                    parent=server,
                    log_directory=order["log_directory"],
                    signal_pipe=signal_pipe,
                    target=from_json(order["target"]),
                )
            self._ranks[process] = rank["rank"]
            _tell(self._channel, event="started", rank=rank["rank"], pid=process)
        self._watch()
        return None

    def _forget(self) -> None:
        """Gives up, in a fork, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._wake, self._woken, self._channel):
            end.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            received = b""
            self._reap()
            while self._ranks:
                for key, _ in selector.select():
                    if key.fileobj is self._channel:
                        received = self._obey(received + self._receive())
                    else:
                        self._woken.recv(4096)
                self._reap()

    def _receive(self) -> bytes:
        part = self._channel.recv(65536)
        if not part:  # the supervisor has gone; its death signal is on the way
            raise SystemExit
        return part

    def _obey(self, received: bytes) -> bytes:
        *lines, rest = received.split(b"\n")
        for line in lines:
            command = json.loads(line)
            for process, rank in self._ranks.items():
                if rank in command["ranks"]:
                    _send_signal(process, signal.Signals(command["signal"]))
        return rest

    def _reap(self) -> None:
        """Reports ended ranks, and ends what they started while their number cannot be used again."""
        while self._ranks:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            rank = self._ranks.pop(ended.si_pid)
            code = os.waitstatus_to_exitcode(status)
            _tell(self._channel, event="ended", rank=rank, code=code, time=time.monotonic())


def _send_signal(process: int, number: signal.Signals) -> None:
    """SIGKILL goes to all that the rank started as well."""
    if number is signal.SIGKILL:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process, number)
    os.kill(process, number)  # not reaped yet, so the number is still this rank's


def _tell(channel: socket.socket, **event: Any) -> None:
    channel.sendall(json.dumps(event).encode() + b"\n")
