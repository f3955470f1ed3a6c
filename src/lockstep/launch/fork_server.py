"""The process that imports torch once and forks every rank of one run, and the supervisor's end of it.

    supervisor (ServerProcess) ── JSON lines over a socket pair ──> fork server (_Server) ── fork ──> ranks
                               <── started, ended (in order) ──────

The server runs no torch operator and never touches a GPU, so it is safe to fork. It forks from its main thread, so the
parent-death signal of a rank means that the server has ended. It is tied to the supervisor in the same way, and lives
on for the moment that it takes to kill the ranks and the processes that they have started.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from lockstep.launch.rank_process import RankTask, run_rank
from lockstep.launch.targets import from_json
from lockstep.runtime.parent_death import arm, end_leftovers
from lockstep.runtime.process_handle import ProcessHandle, is_over
from lockstep.runtime.stop_signals import REASONS, stop_signals_held

_END_LIMIT = 2.0
_PAUSE = 0.02
_PROGRAM = "from lockstep.launch.fork_server import main; main()"


class ServerProcess:
    """A running fork server, in its own session, so that Ctrl-C at the terminal reaches only the supervisor.

    Stop signals are blocked until it has forked the ranks, because SLURM and systemd send them to every process of a
    job; then it passes them on to the supervisor through ``signal_pipe``, as the ranks do.
    """

    def __init__(self, order: Mapping[str, Any], environment: Mapping[str, str], signal_pipe: int) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            arguments = [str(theirs.fileno()), str(signal_pipe), str(os.getpid())]
            with stop_signals_held():
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _PROGRAM, *arguments],
                    env=dict(environment),
                    pass_fds=(theirs.fileno(), signal_pipe),
                    start_new_session=True,
                )
        self._run_directory = environment.get("LOCKSTEP_RUN_DIRECTORY", "")
        self._received = b""
        self.closed = False
        """True if the server has closed its end."""
        _send(self._channel, order)
        self._channel.setblocking(False)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends the server, the remaining ranks, and what they have started, unless the server ended by itself."""
        self._channel.close()
        if kind is not None or not _ends_within(self._process.pid, _END_LIMIT):
            self.kill()
        if _has_failed(self._process.pid):
            # The server is not reaped yet, so its id is still that of its session.
            end_leftovers(self._run_directory, self._process.pid)
        self._process.wait()

    def fileno(self) -> int:
        """The descriptor to wait on for events."""
        return self._channel.fileno()

    @property
    def end(self) -> str:
        """How the server has ended, once it has: killed, or with an error of its own."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"ended with exit code {code or 0}"
        return "was killed" if code == -signal.SIGKILL else f"was killed by {signal.Signals(-code).name}"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def events(self) -> list[dict[str, Any]]:
        """Returns the events that have arrived; never blocks."""
        try:
            while part := self._channel.recv(65536):
                self._received += part
            self.closed = True
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        return [json.loads(line) for line in lines]

    def signal(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Sends a signal to running ranks; SIGKILL also to their child processes."""
        try:
            _send(self._channel, {"signal": int(number), "ranks": list(ranks)})
        except (BrokenPipeError, ConnectionResetError):
            self.closed = True

    def kill(self) -> None:
        """Kills the server, and by the parent-death signal its ranks; may be called again.

        ``Popen.kill`` would reap a server that has ended, whose id could then be another process's.
        """
        os.kill(self._process.pid, signal.SIGKILL)


def _ends_within(process: int, seconds: float) -> bool:
    with suppress(OSError), ProcessHandle(process) as handle:
        return handle.has_ended(seconds)
    return False  # no descriptor is left


def _has_failed(process: int) -> bool:
    """Waits for a child to end and leaves it to be reaped; True, too, where the system does not tell how it ended."""
    if not hasattr(os, "waitid"):
        while not is_over(psutil.Process(process)):
            time.sleep(_PAUSE)
        return True
    try:
        ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # this program ignores SIGCHLD
        return True
    return ended is not None and (ended.si_code != os.CLD_EXITED or bool(ended.si_status))


def _next_ended(processes: Iterable[int]) -> int | None:
    """The id of a child that has ended and is not reaped; None if there is none."""
    if not hasattr(os, "waitid"):
        return next((each for each in processes if is_over(psutil.Process(each))), None)
    ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return None if ended is None else ended.si_pid


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
        text = f"No rank was started, because importing torch failed:\n{traceback.format_exc()}"
        _send(channel, {"event": "broken", "message": text})
        return
    task = _Server(channel).serve(order, signal_pipe, supervisor)
    if task is not None:
        run_rank(task)
    os._exit(0)


def _import(preload: list[str]) -> None:
    """Imports torch, and the target's modules if they exist; the rank reports those that do not.

    The garbage collector is off meanwhile, which saves a tenth of the time, and later ignores the imported objects, so
    that its marks do not copy the pages that all ranks share.
    """
    gc.disable()
    importlib.import_module("torch.distributed")
    from lockstep.runtime.lazy_compiler import postpone_compiler

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

    def serve(self, order: Mapping[str, Any], signal_pipe: int, supervisor: int) -> RankTask | None:
        """Forks the ranks and reports their ends until the last; in a fork, returns that rank's task."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        # The program that started the run may have blocked them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGCONT])
        signal.set_wakeup_fd(self._wake.fileno())
        server = os.getpid()
        for rank in order["ranks"]:
            try:
                process = os.fork()
            except OSError as error:
                text = (
                    f"No process could be made for rank {rank['rank']}: {error.strerror}. Start fewer with --devices, "
                    "or allow more processes and memory (ulimit -u, ulimit -v, the limits of a container)."
                )
                _send(self._channel, {"event": "broken", "message": text})
                self._end_everything()
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
            _send(self._channel, {"event": "started", "rank": rank["rank"], "pid": process})
        self._outlive_supervisor(supervisor)
        for number in REASONS:  # their numbers then arrive in ``_woken``; ignored ones stay ignored
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REASONS)
        self._watch(signal_pipe)
        return None

    def _outlive_supervisor(self, supervisor: int) -> None:
        """Asks for SIGCONT when the supervisor ends, which wakes a stopped process too, and then ends everything."""

        def look(number: int, frame: object) -> None:
            if os.getppid() != supervisor:
                self._end_everything()

        signal.signal(signal.SIGCONT, look)
        arm(supervisor, signal.SIGCONT)

    def _end_everything(self) -> NoReturn:
        """Kills the ranks and what they have started, and exits."""
        for process in self._ranks:
            _kill_group(process)
        end_leftovers(os.environ["LOCKSTEP_RUN_DIRECTORY"], os.getpid())
        os._exit(1)

    def _forget(self) -> None:
        """Closes, in a fork, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._wake, self._woken, self._channel):
            end.close()

    def _watch(self, signal_pipe: int) -> None:
        received = b""
        self._reap()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while self._ranks:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    stops = bytes(number for number in self._woken.recv(4096) if number in REASONS)
                    with suppress(BlockingIOError):  # full of such requests
                        os.write(signal_pipe, stops)
                if self._channel in ready:
                    if not (part := self._channel.recv(65536)):  # the supervisor has ended
                        self._end_everything()
                    received = self._forward_signals(received + part)
                self._reap()

    def _forward_signals(self, received: bytes) -> bytes:
        *lines, rest = received.split(b"\n")
        for line in lines:
            command = json.loads(line)
            for process in [each for each, rank in self._ranks.items() if rank in command["ranks"]]:
                if command["signal"] == signal.SIGKILL:
                    _kill_group(process)
                os.kill(process, command["signal"])  # not reaped yet, so the id is still this rank's
        return rest

    def _reap(self) -> None:
        """Reports ended ranks, and kills their child processes while their process id cannot be reused."""
        while self._ranks:
            process = _next_ended(self._ranks)
            if process is None:
                return
            _kill_group(process)
            _, status = os.waitpid(process, 0)
            rank = self._ranks.pop(process)
            code = os.waitstatus_to_exitcode(status)
            _send(self._channel, {"event": "ended", "rank": rank, "code": code, "time": time.monotonic()})


def _kill_group(rank: int) -> None:
    """Kills the child processes of a rank, given its process id, and the rank itself if it still runs."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank, signal.SIGKILL)


def _send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    channel.sendall(json.dumps(message).encode() + b"\n")
