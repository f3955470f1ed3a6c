"""Who sends what to whom when gradients are summed over ranks: a ring, the ordered reduction, a parameter server."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import ConfigError
from lockstep.explain.words import Chosen, at_least_one, plural
from lockstep.plan import BatchShape
from lockstep.reduce import Holding, OrderedReducer, RingReducer
from lockstep.strategies.parameter_server import ParameterServer
from lockstep.strategies.parameter_server.keys import Size, spread

MOST_ENDS = 8
MOST_ROUNDS = 6
MOST_RANKS = 4096
NUMBER_BYTES = 4
_ALONE = "One rank has all gradients: nothing travels."
_RING = (
    ", and a rank speaks to the next one only. Each piece is added on its way round, beginning at another rank: the "
    "order of additions depends on the number of ranks."
)
_ORDERED = (
    ". Rank j gets piece j of every rank's tree nodes, adds them along the tree, and gives the sum to all: collectives "
    "only move bytes, so they cannot change a sum."
)
_SERVER = (
    "A worker pushes its tree nodes to the server that holds the parameter; the server adds them along the tree, "
    "updates, and all pull the new values. A server's link carries what a ring shares out over all."
)


@dataclass(frozen=True)
class Message:
    """What one process sends to another."""

    sender: int
    receiver: int
    what: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """What happens at once."""

    title: str
    messages: tuple[Message, ...]
    """Those between the processes that are drawn."""


@dataclass(frozen=True)
class Way:
    """One way to sum gradients over ranks."""

    name: str
    level: str
    how: str
    """Its peculiarity, in a sentence."""
    ends: tuple[str, ...]
    """Names of all processes, by number."""
    shown: Chosen
    """The processes that are drawn."""
    rounds_left_out: str
    moments: tuple[Moment, ...]
    formula: str
    """Bytes that a rank sends; P: bytes of the gradients, W: ranks or workers, S: servers, n: tree nodes of a rank."""
    sent: tuple[int, ...]
    """Bytes that each process sends in a step."""
    received: tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """All that the picture says."""

    ranks: int
    servers: int
    micro_batches: int
    parameters: int
    ways: tuple[Way, ...]

    @property
    def bytes(self) -> int:
        """Of all gradients, in float32."""
        return self.parameters * NUMBER_BYTES

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return {"bytes": self.bytes} | asdict(self)


def explain_traffic(
    *, ranks: int = 4, servers: int = 1, micro_batches: int | None = None, parameters: int = 21_797_672
) -> Traffic:
    """What travels in one step, by three ways.

    Args:
        ranks: W, which compute gradients.
        servers: S, beside the ranks, for the parameter server.
        micro_batches: K of the recipe; by default 8, or as many as there are ranks.
        parameters: of the model, in float32; by default those of ResNet-34.

    Raises:
        ConfigError: the numbers do not go together.
    """
    k = max(8, ranks) if micro_batches is None else micro_batches
    at_least_one(ranks=ranks, servers=servers, micro_batches=k, parameters=parameters)
    if max(ranks, servers) > MOST_RANKS:
        raise ConfigError(
            f"--ranks={ranks} and --servers={servers} are more than is drawn. Use at most {MOST_RANKS}."
        )
    BatchShape(global_batch=k, micro_batches=k).check_holders(ranks)
    holding = Holding.of(k, ranks)
    nodes = [len(held) for held in holding.ranks]
    ways = (_ring(ranks, parameters), _ordered(nodes, parameters), _server(nodes, servers, parameters))
    return Traffic(ranks, servers, k, parameters, ways)


def ring_chunk(number: int, rank: int, ranks: int) -> int:
    """Which piece a rank sends to the next one in a round of a ring all-reduce.

    In the first ``ranks - 1`` rounds the receiver adds the piece to its own; then every piece is complete on one rank,
    and in as many rounds more it goes on to all.
    """
    gathering = number >= ranks - 1
    return (rank - number + (1 if gathering else 0) + (ranks - 1 if gathering else 0)) % ranks


def _ring(ranks: int, parameters: int) -> Way:
    half, shown = ranks - 1, Chosen.of(ranks, MOST_ENDS)
    rounds = Chosen.of(2 * half, MOST_ROUNDS)
    size = NUMBER_BYTES * parameters
    moments = []
    for number in rounds.shown:
        phase = f"reduce-scatter {number + 1}" if number < half else f"all-gather {number - half + 1}"
        pairs = ((rank, (rank + 1) % ranks) for rank in shown.shown)
        messages = [
            Message(sender, receiver, f"piece {ring_chunk(number, sender, ranks)}", size // ranks)
            for sender, receiver in pairs
            if receiver in shown.shown
        ]
        moments.append(Moment(f"{phase}/{half}", tuple(messages)))
    total = 2 * half * size // ranks
    return Way(
        "ring",
        RingReducer.level.value,
        _ALONE if ranks == 1 else f"Gradients are cut into {plural(ranks, 'piece')}{_RING}",
        _ranks(ranks),
        shown,
        rounds.left_out("round"),
        tuple(moments),
        "each rank sends 2 (W - 1) / W P",
        (total,) * ranks,
        (total,) * ranks,
    )


def _ordered(nodes: list[int], parameters: int) -> Way:
    ranks = len(nodes)
    piece = -(-parameters // ranks) * NUMBER_BYTES
    shown = Chosen.of(ranks, MOST_ENDS)
    pairs = [(a, b) for a in shown.shown for b in shown.shown if a != b]
    to_all = [
        Message(a, b, _node_words(nodes[a], "the receiver's piece of"), nodes[a] * piece) for a, b in pairs
    ]
    gather = [Message(a, b, f"sum of piece {a}", piece) for a, b in pairs]
    moments = (Moment("all_to_all", tuple(to_all)), Moment("fold", ()), Moment("all_gather", tuple(gather)))
    return Way(
        "ordered",
        OrderedReducer.level.value,
        _ALONE if ranks == 1 else f"Gradients are cut into {plural(ranks, 'piece')}{_ORDERED}",
        _ranks(ranks),
        shown,
        "",
        moments if ranks > 1 else (),
        "each rank sends (n + 1) (W - 1) / W P",
        tuple((ranks - 1) * (own + 1) * piece for own in nodes),
        tuple((sum(nodes) - own + ranks - 1) * piece for own in nodes),
    )


def _server(nodes: list[int], servers: int, parameters: int) -> Way:
    workers = len(nodes)
    sizes = _server_bytes(servers, parameters)
    total, ends = sum(sizes), workers + servers
    shown = _workers_and_servers(workers, servers)
    here = [number for number in shown.shown if number >= workers]
    push = [
        Message(
            worker,
            server,
            _node_words(nodes[worker], "the server's keys of"),
            nodes[worker] * sizes[server - workers],
        )
        for worker in shown.shown
        if worker < workers
        for server in here
    ]
    pull = [
        Message(server, other, "new values", sizes[server - workers])
        for server in here
        for other in shown.shown
        if other != server
    ]
    return Way(
        "parameter_server",
        ParameterServer.level.value,
        _SERVER,
        tuple(f"worker {number}" for number in range(workers)) + tuple(f"server {s}" for s in range(servers)),
        shown,
        "",
        (Moment("push", tuple(push)), Moment("update", ()), Moment("pull", tuple(pull))),
        "a worker sends n P, a server (W + S - 1) / S P",
        tuple(own * total for own in nodes) + tuple(size * (ends - 1) for size in sizes),
        (total,) * workers + tuple(size * sum(nodes) + total - size for size in sizes),
    )


def _server_bytes(servers: int, parameters: int) -> list[int]:
    """Bytes of each server's keys, if the model is one parameter that may be cut anywhere."""
    keys = spread({"all": Size(parameters, parameters * NUMBER_BYTES)}, servers)
    rows = ([key.rows or (0, parameters) for key in held] for held in keys)
    return [NUMBER_BYTES * sum(stop - start for start, stop in held) for held in rows]


def _workers_and_servers(workers: int, servers: int) -> Chosen:
    """The first of both, so that both are drawn."""
    first = Chosen.of(workers, MOST_ENDS - 2).shown
    last = Chosen.of(servers, 2).shown
    return Chosen((*first, *(workers + number for number in last)), workers + servers)


def _ranks(ranks: int) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in range(ranks))


def _node_words(nodes: int, what: str) -> str:
    return f"{what} {plural(nodes, 'node')}"
