"""A worker's end of the store: it asks, and waits for the answer; no threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from lockstep.strategies.parameter_server.asynchronous.inbox import connect
from lockstep.strategies.parameter_server.asynchronous.meeting import Meeting
from lockstep.strategies.parameter_server.asynchronous.stop import Stop
from lockstep.strategies.parameter_server.asynchronous.tensors import ModelBuffers, as_bytes, from_bytes
from lockstep.strategies.parameter_server.asynchronous.wire import LOST, Message, Refused, receive, send
from lockstep.strategies.parameter_server.holding import Holding


class Client:
    """Connected with all servers.

    Args:
        rank: this worker's.
        servers: rank and port of each server; the first keeps the clock and the running buffers.
        token: the run's secret.
        patience: seconds that a message which was begun may take.
        holding: which server holds what.
        buffers: the model's running buffers.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, int],
        token: bytes,
        patience: float,
        holding: Holding,
        buffers: ModelBuffers,
    ) -> None:
        self._holding, self._buffers = holding, buffers
        self._ranks = list(servers)
        self._connections = [connect(port, token, rank, patience) for port in servers.values()]
        self._meetings = 0
        self.version = 0
        """Updates in the values that were pulled last."""
        self.stop = Stop()
        self.bytes_sent = 0

    def push(self, gradients: Mapping[str, Tensor], statistics: Tensor, report: Mapping[str, Any]) -> None:
        """Sends each server its part of the gradients of a step.

        Args:
            gradients: of all parameters; empty where this worker had no micro-batch.
            statistics: sum of what forward passes left in running buffers, for the first server.
            report: the rest; see ``Pool``.
        """
        content = {**report, "version": self.version, **self.stop.as_content()}
        for server in range(len(self._ranks)):
            body = b""
            if gradients:
                body = bytes(as_bytes(self._holding.flat(server, gradients)))
                body += bytes(as_bytes(statistics)) if server == 0 else b""
            self._send(server, Message("push", content, body))
            self.bytes_sent += len(body)

    def pull(self) -> None:
        """Sets the model to the servers' values; waits while this worker is too far ahead."""
        for server in range(len(self._ranks)):
            values = self._ask(server, Message("pull"))
            if server == 0:
                self.version = int(values.content["version"])
            set_values(self._holding, self._buffers, server, values.body)

    def meet(self, label: str, value: Any, body: bytes | memoryview = b"") -> Meeting:
        """See ``Service.meet``."""
        self._meetings += 1
        for server in range(1, len(self._ranks)):
            self._send(server, Message("rest", {"number": self._meetings}))
        told = {"label": label, "number": self._meetings, "value": value}
        met = self._ask(0, Message("meet", told, body))
        return Meeting(met.content["values"], met.content["living"])

    def tally(self, row: Sequence[float]) -> None:
        """Sends counts to the first server."""
        self._send(0, Message("tally", {"row": list(row)}))

    def farewell(self) -> None:
        """Says goodbye to all servers."""
        for connection in self._connections:
            with suppress(OSError):  # a server that has gone needs none
                send(connection, Message("bye"))
            connection.close()

    def _ask(self, server: int, message: Message) -> Message:
        self._send(server, message)
        try:
            answer = receive(self._connections[server], self._largest(server))
        except (OSError, Refused) as error:
            raise self._gone(server) from error
        self.stop.adopt(answer.content)
        return answer

    def _send(self, server: int, message: Message) -> None:
        try:
            send(self._connections[server], message)
        except OSError as error:
            raise self._gone(server) from error

    def _largest(self, server: int) -> int:
        return self._holding.numel(server) * self._holding.dtype.itemsize + self._buffers.nbytes

    def _gone(self, server: int) -> ConnectionError:
        return ConnectionResetError(f"{LOST}: the parameter server on rank {self._ranks[server]} has gone.")


def set_values(holding: Holding, buffers: ModelBuffers, server: int, body: Any) -> None:
    """Sets the model to a server's answer to a pull."""
    size = holding.numel(server) * holding.dtype.itemsize
    view = memoryview(body)
    holding.set_values(server, from_bytes(view[:size], holding.dtype, holding.device))
    if server == 0:
        buffers.set(view[size:])


def get_values(holding: Holding, buffers: ModelBuffers) -> bytes:
    """The body of a server's answer to a pull: its values, on the first server the running buffers too."""
    body = bytes(as_bytes(holding.flat(holding.server, holding.parameters)))
    return body + buffers.as_bytes() if holding.server == 0 else body
