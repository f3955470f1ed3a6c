"""A server whose messages a test writes down, one after the other; nothing is sent and no process is started."""

import torch
from torch import nn

from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.strategies.parameter_server.asynchronous_server import Server
from lockstep.strategies.parameter_server.asynchronous_staleness import Clock
from lockstep.strategies.parameter_server.asynchronous_transport import ServerMessage
from lockstep.strategies.parameter_server.shards import ParameterShards


class Script:
    """Stands for the transport: gives what the test says has arrived, and keeps what was sent."""

    def __init__(self):
        self.arriving, self.sent, self.cut_off = [], [], []

    def get(self, timeout=None):
        assert self.arriving, "the server waits, and nothing more comes"
        return self.arriving.pop(0)

    def send(self, rank, message):
        self.sent.append((rank, message))
        return True

    def cut(self, rank):
        self.cut_off.append(rank)

    def close(self):
        pass


def push(value, version=0, *, leaves=1, weight=4.0, size=3, **changes):
    content = {
        "leaves": leaves,
        "weight": weight if leaves else 0.0,
        "loss": 1.0,
        "unused": [],
        "counters": [],
    }
    content |= {"version": version, "stop_at": 0, "stop_reason": 0, **changes}
    body = bytearray(torch.full((size,), float(value)).numpy().tobytes()) if leaves else b""
    return ServerMessage("push", content, body)


PULL = ServerMessage("pull")


def at_barrier(number, label="synchronize", value=None):
    return ServerMessage("barrier", {"label": label, "number": number, "value": value})


def a_server(workers=(1, 2), staleness=1, servers=(0,), step=0):
    model = nn.Linear(3, 1, bias=False)
    holding = ParameterShards(model, 1, 0)
    script = Script()
    nothing = nn.Identity()
    server = Server(
        *(script, list(servers), 0, Clock(workers, staleness), holding),
        *(RunningBuffers(nothing), step),
    )
    return server, script, holding


def answered(script):
    found = [rank for rank, message in script.sent if message.kind == "values"]
    script.sent.clear()
    return found
