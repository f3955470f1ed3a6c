"""The picture of the traffic as text."""

from __future__ import annotations

from lockstep.explain.traffic.facts import Moment, Traffic, Way
from lockstep.explain.words import Chosen, amount, folded_table, left_out, paragraph, plural


def traffic_text(facts: Traffic) -> str:
    """Each way message by message, then all of them in one table."""
    lines = [*paragraph(headline(facts)), ""]
    for way in facts.ways:
        lines += [f"{way.name} (level {way.level})", *paragraph(way.how, indent="  ")]
        lines += [f"  {line}" for line in _messages(way)]
        lines += [f"  In a step {way.formula}.", *left_out(*not_drawn(way)), ""]
    rows = [(way.name, [way.level, *loads(way)]) for way in facts.ways]
    return "\n".join(
        [*lines, *folded_table("", ["level", "sends most", "receives most"], rows), *paragraph(LEGEND)]
    )


LEGEND = (
    "P: bytes of the gradients; W: ranks, or workers; S: servers; n: tree nodes that a rank hands over. Through shared "
    "memory (one host, CPU) the ordered way writes its nodes once."
)


def headline(facts: Traffic) -> str:
    """The numbers that were asked for."""
    return (
        f"{facts.parameters:,} float32 gradients (P = {amount(facts.bytes)}) of K = {facts.micro_batches:,} "
        f"micro-batches, {plural(facts.ranks, 'rank')}, {plural(facts.servers, 'server')}"
    )


def loads(way: Way) -> list[str]:
    """What the busiest process sends and receives."""
    return [_busiest(way, way.sent), _busiest(way, way.received)]


def not_drawn(way: Way) -> list[str]:
    """What the picture leaves out."""
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
        return f"{amount(most)} (each)"
    return f"{amount(most)} ({way.ends[loads.index(most)]})"


def _messages(way: Way) -> list[str]:
    """A table where all moments use the same links, each once; else a line for each sender."""
    links = [tuple((m.sender, m.receiver) for m in moment.messages) for moment in way.moments]
    if len(set(links)) == 1 and len({sender for sender, _ in links[0]}) == len(links[0]) and len(links) > 1:
        columns = [f"{_short(way.ends[a])} -> {_short(way.ends[b])}" for a, b in links[0]]
        rows = [(moment.title, [message.what for message in moment.messages]) for moment in way.moments]
        return [*folded_table("", columns, rows), f"{sizes(way.moments[0])} a message"]
    return [line for moment in way.moments for line in _moment_lines(way, moment)]


def _moment_lines(way: Way, moment: Moment) -> list[str]:
    if not moment.messages:
        return [f"{moment.title}: nothing travels"]
    groups: dict[tuple[int, str], list[str]] = {}
    for message in moment.messages:
        groups.setdefault((message.sender, message.what), []).append(_short(way.ends[message.receiver]))
    said = [f"{_short(way.ends[sender])} -> {' '.join(to)}: {what}" for (sender, what), to in groups.items()]
    return [f"{moment.title}: {sizes(moment)} a message", *(f"    {line}" for line in said)]


def sizes(moment: Moment) -> str:
    """Bytes of the messages of a moment."""
    least, most = (choose(message.bytes for message in moment.messages) for choose in (min, max))
    few, many = amount(least), amount(most)
    return many if few == many else f"{few} to {many}"


def _short(name: str) -> str:
    return name.removeprefix("rank ").replace("worker ", "w").replace("server ", "s")
