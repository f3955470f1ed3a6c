"""Seconds that an exchange of gradients takes, by the model of latency and rate (Hockney): pure formulas.

    W  devices         g  devices of a host       H = ceil(W / g)  hosts
    n  bytes           s  tree nodes per rank     a, r  latency and rate: _i inside a host, _b between hosts

A ring (Patarasuk and Yuan 2009; per step every device sends n / W), on hosts as reduce-scatter inside, ring between,
and gather inside, where g devices share the link of their host:

    2 (g - 1) (a_i + n / (g r_i))  +  2 (H - 1) (a_b + n / (H r_b))

The ordered sum: all_to_all of the nodes, pair by pair (Thakur, Rabenseifner and Gropp 2005); the adds; all_gather:

    (g - 1) (a_i + s n / (W r_i)) + (W - g) (a_b + g s n / (W r_b))  +  adds  +  (W - 1) (a_x + n / (W r_x))

with x = b as soon as there are two hosts. The ordered sum as it is does not gather inside hosts first.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.plan import share
from lockstep.scale.prediction.links import Interconnect
from lockstep.tree import nodes_within


@dataclass(frozen=True)
class Nodes:
    """How many tree nodes the ranks bring to a step."""

    most: int
    """Of one rank."""
    total: int
    """Of all."""

    @classmethod
    def of(cls, micro_batches: int, ranks: int) -> Nodes:
        """When ``micro_batches`` are shared out by ``plan.share``."""
        parts = (share(micro_batches, ranks, rank) for rank in range(ranks))
        counts = [len(nodes_within(part.start, part.stop, micro_batches)) for part in parts]
        return cls(max(counts), sum(counts))


def ring_seconds(size: float, ranks: int, by: Interconnect) -> float:
    """A ring all-reduce of ``size`` bytes."""
    inside, hosts = _hosts(ranks, by)
    within = 2 * (inside - 1) * (by.inside.latency + size / (inside * by.inside.rate))
    return within + 2 * (hosts - 1) * (by.between.latency + size / (hosts * by.between.rate))


def ordered_seconds(size: float, ranks: int, by: Interconnect, nodes: Nodes, adding: float) -> float:
    """An ordered all-reduce of ``size`` bytes.

    Args:
        size: bytes of one node.
        ranks: that exchange.
        by: what they are connected by.
        nodes: of the step's tree.
        adding: bytes of one operand that a device adds to another in a second.
    """
    inside, hosts = _hosts(ranks, by)
    part = nodes.most * size / ranks
    to_peers = (inside - 1) * (by.inside.latency + part / by.inside.rate)
    to_others = (ranks - inside) * (by.between.latency + inside * part / by.between.rate)
    adds = (nodes.total - 1) * size / ranks / adding
    link = by.between if hosts > 1 else by.inside
    return to_peers + to_others + adds + (ranks - 1) * (link.latency + size / ranks / link.rate)


def exposed_seconds(per_bucket: list[float], hidden: float) -> float:
    """What is left of the exchanges of a step's buckets, one after the other, when backward hides what it can.

    Args:
        per_bucket: seconds of each, in the order in which backward fills them.
        hidden: seconds of backward that run beside them; the last bucket is complete only when backward is done.
    """
    return max(per_bucket[-1], sum(per_bucket) - hidden)


def bucket_sizes(total: int) -> list[int]:
    """Bytes of the buckets that gradients of ``total`` bytes are cut into: one of 1 MiB, then of 8 MiB each."""
    sizes = [min(total, 1 << 20)]
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, 8 << 20))
    return sizes


def interpolated(points: dict[int, float], size: float) -> float:
    """Seconds for ``size`` bytes from measured (bytes, seconds): straight lines between them, the last one continued.

    Below the smallest it is the smallest's time, which is latency.
    """
    known = sorted(points.items())
    if size <= known[0][0] or len(known) == 1:
        return known[0][1]
    upper = next((place for place, (each, _) in enumerate(known) if each >= size), len(known) - 1)
    (x0, y0), (x1, y1) = known[upper - 1], known[upper]
    return y0 + max(0.0, y1 - y0) * (size - x0) / (x1 - x0)


def _hosts(ranks: int, by: Interconnect) -> tuple[int, int]:
    """Devices of a host that take part, and hosts."""
    inside = min(ranks, by.per_host)
    return inside, -(-ranks // inside)
