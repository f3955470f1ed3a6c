"""The harness' end: process groups that stay alive, asleep, and run a round of steps when told.

All sides of a comparison are alive at once and take turns, A B C A B C, within minutes: what else the machine
does hits them alike.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.commands import environment

START_LIMIT = 180.0
"""Seconds that a side has to start all its ranks."""
ROUND_LIMIT = 300.0
"""Seconds that one round may take."""

Command = Callable[[Path], list[str]]
"""Makes a side's command line from the path of the control socket."""


class SideError(RuntimeError):
    """A side did not start, or died in a round."""


@dataclass(frozen=True)
class Side:
    """One running side: its launcher and a connection to each rank."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    connections: list[socket.socket]
    peaks: list[float] = field(default_factory=list)
    """Peak memory of each rank after the last round, in bytes beyond what it held before training."""

    def round(self, warm_up: int, steps: int) -> float:
        """Milliseconds per step of one round, by the slowest rank's clock."""
        order = json.dumps({"warm_up": warm_up, "steps": steps}).encode() + b"\n"
        for connection in self.connections:
            _send(self, connection, order)
        answers = [_receive(self, connection) for connection in self.connections]
        self.peaks[:] = [answer["peak"] for answer in answers]
        return 1000 * max(answer["seconds"] for answer in answers) / steps

    def stop(self) -> None:
        """Ends the ranks' loops and waits for a clean exit."""
        for connection in self.connections:
            _send(self, connection, b'{"stop": true}\n')
        if self.process.wait(timeout=START_LIMIT):
            raise self.failure(f"ended with status {self.process.returncode}")

    def failure(self, what: str) -> SideError:
        """The error that shows the end of the side's log."""
        tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-60:])
        return SideError(f"Side {self.name!r} {what}. The end of what it printed:\n{tail}")


@contextmanager
def running(commands: Mapping[str, Command], processes: int | Mapping[str, int]) -> Iterator[list[Side]]:
    """Starts the sides one after the other, and stops all of them on the way out.

    ``processes`` is the number of ranks, of all sides or of each by name.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as stack:
        sides = []
        for name, command in commands.items():
            ranks = processes if isinstance(processes, int) else processes[name]
            sides.append(_start(name, command, ranks, Path(folder), stack))
        yield sides
        for side in sides:
            side.stop()


def _start(name: str, command: Command, ranks: int, folder: Path, stack: ExitStack) -> Side:
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    control = folder / f"{name}.sock"
    listener.bind(str(control))
    listener.listen(ranks)
    log = folder / f"{name}.log"
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(
        command(control), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment()
    )
    stack.callback(_end, process)
    side = Side(name, process, log, [])
    listener.settimeout(1.0)
    for _ in range(int(START_LIMIT)):
        try:
            connection = stack.enter_context(listener.accept()[0])
        except TimeoutError:
            if process.poll() is not None:
                raise side.failure(f"ended with status {process.returncode} before training") from None
            continue
        connection.settimeout(ROUND_LIMIT)
        side.connections.append(connection)
        _receive(side, connection)
        if len(side.connections) == ranks:
            return side
    raise side.failure(f"had {len(side.connections)} of {ranks} ranks ready after {START_LIMIT:.0f} s")


def _send(side: Side, connection: socket.socket, order: bytes) -> None:
    try:
        connection.sendall(order)
    except OSError as error:
        raise side.failure("lost a rank") from error


def _receive(side: Side, connection: socket.socket) -> dict[str, float]:
    line = b""
    while not line.endswith(b"\n"):
        try:
            part = connection.recv(4096)
        except TimeoutError:
            raise side.failure(f"did not finish a round in {ROUND_LIMIT:.0f} s") from None
        except OSError as error:
            raise side.failure("lost a rank") from error
        if not part:
            raise side.failure("lost a rank")
        line += part
    return json.loads(line)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
