"""The picture of the traffic of a gradient sum over ranks: a ring, the ordered reduction, a parameter server."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.plan import BatchShape
from lockstep.errors import ConfigError
from lockstep.explain.drawing import (
    Chosen,
    Drawing,
    PictureFacts,
    at_least_one,
    folded_table,
    left_out,
    paragraph,
    rank_style,
)
from lockstep.reduce import NodeLayout, OrderedReducer, RingReducer
from lockstep.strategies.parameter_server import ParameterServer
from lockstep.strategies.parameter_server.shards import Size, spread
from lockstep.text import format_bytes, grouped, plural

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
class Transfer:
    """A message from one process to another."""

    sender: int
    receiver: int
    what: str
    bytes: int


@dataclass(frozen=True)
class Moment:
    """Messages that are sent at once."""

    title: str
    messages: tuple[Transfer, ...]
    """Those between drawn processes."""


@dataclass(frozen=True)
class Way:
    """One way to sum gradients over ranks."""

    name: str
    level: str
    how: str
    """A sentence on its property."""
    ends: tuple[str, ...]
    """Names of all processes, by number."""
    shown: Chosen
    """The drawn processes."""
    rounds_left_out: str
    moments: tuple[Moment, ...]
    formula: str
    """Bytes that a rank sends; P: bytes of the gradients, W: ranks or workers, S: servers, n: tree nodes of a rank."""
    sent: tuple[int, ...]
    """Bytes that each process sends in a step."""
    received: tuple[int, ...]


@dataclass(frozen=True)
class TrafficFacts(PictureFacts):
    """The contents of the picture."""

    bytes: int
    """Of all gradients, in float32."""
    ranks: int
    servers: int
    micro_batches: int
    parameters: int
    ways: tuple[Way, ...]


def explain_traffic(
    *, ranks: int = 4, servers: int = 1, micro_batches: int | None = None, parameters: int = 21_797_672
) -> TrafficFacts:
    """The messages of one step, in three ways.

    Args:
        ranks: W, which compute gradients.
        servers: S, in addition to the ranks, for the parameter server.
        micro_batches: K of the recipe; by default 8, or the number of ranks if that is larger.
        parameters: of the model, in float32; by default those of ResNet-34.

    Raises:
        ConfigError: the numbers do not fit together.
    """
    k = max(8, ranks) if micro_batches is None else micro_batches
    at_least_one(ranks=ranks, servers=servers, micro_batches=k, parameters=parameters)
    if max(ranks, servers) > MOST_RANKS:
        raise ConfigError(
            f"--ranks={ranks} and --servers={servers} are too many to draw. Use at most {MOST_RANKS} of each."
        )
    BatchShape(global_batch=k, micro_batches=k).check_holders(ranks)
    nodes = [len(held) for held in NodeLayout.of(k, ranks).ranks]
    ways = (_ring(ranks, parameters), _ordered(nodes, parameters), _server(nodes, servers, parameters))
    return TrafficFacts(parameters * NUMBER_BYTES, ranks, servers, k, parameters, ways)


def ring_chunk(number: int, rank: int, ranks: int) -> int:
    """The piece that a rank sends to the next one in a round of a ring all-reduce.

    In the first ``ranks - 1`` rounds the receiver adds the piece to its own. Then every piece is complete on one rank,
    and as many rounds again pass it on to all.
    """
    return (rank - number) % ranks


def _ring(ranks: int, parameters: int) -> Way:
    half, shown = ranks - 1, Chosen.of(ranks, MOST_ENDS)
    rounds = Chosen.of(2 * half, MOST_ROUNDS)
    size = NUMBER_BYTES * parameters
    moments = []
    for number in rounds.shown:
        phase = f"reduce-scatter {number + 1}" if number < half else f"all-gather {number - half + 1}"
        pairs = ((rank, (rank + 1) % ranks) for rank in shown.shown)
        messages = [
            Transfer(sender, receiver, f"piece {ring_chunk(number, sender, ranks)}", size // ranks)
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
    to_all = [Transfer(a, b, f"the receiver's piece of {plural(nodes[a], 'node')}", nodes[a] * piece) for a, b in pairs]
    gather = [Transfer(a, b, f"sum of piece {a}", piece) for a, b in pairs]
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
    # Bytes of each server's keys, if the model is one parameter that may be cut anywhere.
    keys = spread({"all": Size(parameters, parameters * NUMBER_BYTES)}, servers)
    rows = ([key.rows or (0, parameters) for key in held] for held in keys)
    sizes = [NUMBER_BYTES * sum(stop - start for start, stop in held) for held in rows]
    total, ends = sum(sizes), workers + servers
    of_workers = Chosen.of(workers, MOST_ENDS - 2).shown
    here = [workers + number for number in Chosen.of(servers, 2).shown]
    shown = Chosen((*of_workers, *here), ends)
    push = []
    for worker in of_workers:
        what = f"the server's keys of {plural(nodes[worker], 'node')}"
        push += [Transfer(worker, server, what, nodes[worker] * sizes[server - workers]) for server in here]
    pull = [
        Transfer(server, other, "new values", sizes[server - workers])
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


def _ranks(ranks: int) -> tuple[str, ...]:
    return tuple(f"rank {rank}" for rank in range(ranks))


def traffic_text(facts: TrafficFacts) -> str:
    """Each way message by message, then all in one table."""
    lines = [*paragraph(headline(facts)), ""]
    for way in facts.ways:
        lines += [f"{way.name} (level {way.level})", *paragraph(way.how, indent="  ")]
        lines += [f"  {line}" for line in _messages(way)]
        lines += [f"  In a step {way.formula}.", *left_out(*not_drawn(way)), ""]
    rows = [(way.name, [way.level, *loads(way)]) for way in facts.ways]
    lines += folded_table(["level", "sends most", "receives most"], rows)
    return "\n".join([*lines, *paragraph(LEGEND)])


LEGEND = (
    "P: bytes of the gradients; W: ranks, or workers; S: servers; n: tree nodes that a rank hands over. Through shared "
    "memory (one host, CPU) the ordered way writes its nodes once."
)


def headline(facts: TrafficFacts) -> str:
    """The given numbers."""
    return (
        f"{facts.parameters:,} float32 gradients (P = {format_bytes(facts.bytes)}) of K = {facts.micro_batches:,} "
        f"micro-batches, {plural(facts.ranks, 'rank')}, {plural(facts.servers, 'server')}"
    )


def loads(way: Way) -> list[str]:
    """The traffic of the busiest process: sent and received."""
    return [_busiest(way, way.sent), _busiest(way, way.received)]


def not_drawn(way: Way) -> list[str]:
    """The processes and rounds that the picture leaves out."""
    if len(way.shown.shown) == way.shown.total:
        return [way.rounds_left_out]
    kinds = dict.fromkeys(name.split()[0] for name in way.ends)
    parts = []
    for kind in kinds:
        numbers = [number for number, name in enumerate(way.ends) if name.startswith(f"{kind} ")]
        shown = tuple(number - numbers[0] for number in way.shown.shown if number in numbers)
        parts.append(Chosen(shown, len(numbers)).left_out(kind))
    return [*parts, way.rounds_left_out]


def _busiest(way: Way, loads: tuple[int, ...]) -> str:
    most = max(loads)
    if min(loads) == most:
        return f"{format_bytes(most)} (each)"
    return f"{format_bytes(most)} ({way.ends[loads.index(most)]})"


def _messages(way: Way) -> list[str]:
    """A table if all moments use the same links, each once; else a line for each sender."""
    links = [tuple((m.sender, m.receiver) for m in moment.messages) for moment in way.moments]
    if len(set(links)) == 1 and len({sender for sender, _ in links[0]}) == len(links[0]) and len(links) > 1:
        columns = [f"{_short(way.ends[a])} -> {_short(way.ends[b])}" for a, b in links[0]]
        rows = [(moment.title, [message.what for message in moment.messages]) for moment in way.moments]
        return [*folded_table(columns, rows), f"{sizes(way.moments[0])} a message"]
    return [line for moment in way.moments for line in _moment_lines(way, moment)]


def _moment_lines(way: Way, moment: Moment) -> list[str]:
    if not moment.messages:
        return [f"{moment.title}: nothing travels"]
    groups = grouped(((each.sender, each.what), _short(way.ends[each.receiver])) for each in moment.messages)
    said = [f"{_short(way.ends[sender])} -> {' '.join(to)}: {what}" for (sender, what), to in groups.items()]
    return [f"{moment.title}: {sizes(moment)} a message", *(f"    {line}" for line in said)]


def sizes(moment: Moment) -> str:
    """Bytes of the messages of a moment."""
    least, most = (choose(message.bytes for message in moment.messages) for choose in (min, max))
    few, many = format_bytes(least), format_bytes(most)
    return many if few == many else f"{few} to {many}"


def _short(name: str) -> str:
    return name.removeprefix("rank ").replace("worker ", "w").replace("server ", "s")


_LEAD, _ROW = 96.0, 34.0
_NARROW, _WIDE = 144.0, 220.0
_SMALL, _LARGE = 10.0, 30.0


def traffic_svg(facts: TrafficFacts) -> str:
    """A diagram for each way: a line for each process, time to the right, an arrow for each message."""
    drawing = Drawing(headline(facts))
    for way in facts.ways:
        _way(drawing, way)
    drawing.caption(LEGEND)
    return drawing.svg()


def _way(drawing: Drawing, way: Way) -> None:
    top = drawing.bottom + 28
    drawing.text(0, top, f"{way.name} (level {way.level})", "strong")
    moments = [moment for moment in way.moments if moment.messages]
    pieces = [_pieces(moment) for moment in moments]
    step, box = (_WIDE if len(moments) <= 2 else _NARROW), (_LARGE if any(pieces) else _SMALL)
    rows = {number: top + 56 + _ROW * place for place, number in enumerate(way.shown.shown)}
    for place, (number, y) in enumerate(rows.items()):
        drawing.text(0, y, way.ends[number])
        drawing.line([(_LEAD, y), (_LEAD + step * len(moments) + box, y)], "dashed")
        for column, words in enumerate([*pieces, {}]):
            drawing.box(_LEAD + step * column, y - 10, box, 20, rank_style(place), words.get(number, ""))
        kind = way.ends[number].split()[0]  # a rank, worker or server
        if way.shown.gap_before(number) and way.ends[number - 1].startswith(f"{kind} "):
            drawing.text(0, y - _ROW / 2, "...", "soft")
    for column, moment in enumerate(moments):
        left = _LEAD + step * column + box
        drawing.text(left - box, top + 18, moment.title, "soft", size=11)
        drawing.text(left - box, top + 33, f"{sizes(moment)} each", "soft", size=11)
        for message in moment.messages:
            drawing.line([(left, rows[message.sender]), (left + step - box - 2, rows[message.receiver])], arrow=True)
    sent, received = loads(way)
    which = " The box says which piece a rank sends." if any(pieces) else ""
    summary = f"{way.how}{which} In a step {way.formula}. Most sent: {sent}. Most received: {received}."
    drawing.caption(summary, *left_out(*not_drawn(way)))


def _pieces(moment: Moment) -> dict[int, str]:
    """The piece that each process sends, for those that send only one."""
    senders = [message.sender for message in moment.messages]
    return {
        message.sender: message.what.removeprefix("piece ")
        for message in moment.messages
        if senders.count(message.sender) == 1 and message.what.startswith("piece ")
    }
