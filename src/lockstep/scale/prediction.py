"""Predicts the time of a step on W devices from the times of one device: pure functions.

    step(W) = ceil(K / W) x micro-batch  +  data / W  +  exposed exchange(W)  +  rest

``rest`` is the optimizer and all else that every device does itself. For W > K the recipe cannot be kept: K becomes W
and the global batch grows with it; such predictions are marked.

Rates of interconnects are nominal, one-way: PCIe 4.0 x16 is 16 GT/s on 16 lanes in 128b/130b; NVLink 4 is half
of the 900 GB/s that NVIDIA states for both directions of an H100; Ethernet and InfiniBand NDR are their line rates
(IEEE 802.3, IBTA). Latencies are common values per message of a collective: measure your own where they matter.

An exchange of gradients follows the model of latency and rate (Hockney):

    W  devices         g  devices of a host       H = ceil(W / g)  hosts
    n  bytes           s  tree nodes per rank     a, r  latency and rate: _i inside a host, _b between hosts

A ring (Patarasuk and Yuan 2009; per step every device sends n / W), on hosts as reduce-scatter inside, ring between,
and gather inside, where g devices share the link of their host:

    2 (g - 1) (a_i + n / (g r_i))  +  2 (H - 1) (a_b + n / (H r_b))

The ordered sum: all_to_all of the nodes, pair by pair (Thakur, Rabenseifner and Gropp 2005); the adds; all_gather:

    (g - 1) (a_i + s n / (W r_i)) + (W - g) (a_b + g s n / (W r_b))  +  adds  +  (W - 1) (a_x + n / (W r_x))

with x = b as soon as there are two hosts. The ordered sum does not gather inside hosts first.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.core.plan import share
from lockstep.core.summation_tree import nodes_within
from lockstep.errors import ConfigError, nearest
from lockstep.scale.measured import Round, Row


@dataclass(frozen=True)
class NetworkLink:
    """A connection of two devices: a message of n bytes takes ``latency + n / rate`` seconds."""

    latency: float
    """Seconds."""
    rate: float
    """Bytes per second."""


@dataclass(frozen=True)
class Interconnect:
    """The connections of a world of devices."""

    name: str
    words: str
    """Its full name."""
    inside: NetworkLink
    """Between devices of one host; each device has its own."""
    between: NetworkLink
    """Between hosts; the devices of a host share it."""
    per_host: int = 8
    """Devices of a host."""


_PCIE = NetworkLink(10e-6, 31.5e9)
_NVLINK = NetworkLink(5e-6, 450e9)
_WHOLE_WORLD = 1 << 20

PRESETS = {
    each.name: each
    for each in (
        Interconnect("pcie", "PCIe 4.0 x16 throughout", _PCIE, _PCIE, _WHOLE_WORLD),
        Interconnect("nvlink", "NVLink 4 throughout", _NVLINK, _NVLINK, _WHOLE_WORLD),
        Interconnect("ethernet10", "10 Gb Ethernet, hosts of 8 on PCIe", _PCIE, NetworkLink(30e-6, 1.25e9)),
        Interconnect("ethernet100", "100 Gb Ethernet, hosts of 8 on PCIe", _PCIE, NetworkLink(15e-6, 12.5e9)),
        Interconnect(
            "ethernet400", "400 Gb Ethernet, hosts of 8 on NVLink", _NVLINK, NetworkLink(10e-6, 50e9)
        ),
        Interconnect("infiniband", "InfiniBand NDR, hosts of 8 on NVLink", _NVLINK, NetworkLink(3e-6, 50e9)),
        Interconnect(
            "internet100",
            "100 Mb internet link, one device each",
            NetworkLink(20e-3, 12.5e6),
            NetworkLink(20e-3, 12.5e6),
            1,
        ),
    )
}
"""By name."""


def presets(names: str) -> list[Interconnect]:
    """The presets of a comma-separated list, or all if it is empty; ``ConfigError`` for an unknown name."""
    words = [word.strip() for word in names.split(",") if word.strip()]
    for word in words:
        if word not in PRESETS:
            raise ConfigError(f"interconnect {word!r} is not known.{nearest(word, tuple(PRESETS))}")
    return [PRESETS[word] for word in words] or list(PRESETS.values())


@dataclass(frozen=True)
class Nodes:
    """Numbers of tree nodes that ranks exchange in a step."""

    most: int
    """Of one rank."""
    total: int
    """Of all ranks."""

    @classmethod
    def of(cls, micro_batches: int, ranks: int) -> Nodes:
        """Counts the nodes where ``plan.share`` distributes the micro-batches."""
        parts = (share(micro_batches, ranks, rank) for rank in range(ranks))
        counts = [len(nodes_within(part.start, part.stop, micro_batches)) for part in parts]
        return cls(max(counts), sum(counts))


def ring_seconds(size: float, ranks: int, by: Interconnect) -> float:
    """A ring all-reduce of ``size`` bytes."""
    inside, hosts = _hosts(ranks, by)
    within = 2 * (inside - 1) * (by.inside.latency + size / (inside * by.inside.rate))
    return within + 2 * (hosts - 1) * (by.between.latency + size / (hosts * by.between.rate))


def ordered_seconds(size: float, ranks: int, by: Interconnect, nodes: Nodes, adding: float) -> float:
    """An ordered all-reduce of ``size`` bytes; ``adding`` is the bytes that a device adds to others in a second."""
    inside, hosts = _hosts(ranks, by)
    part = nodes.most * size / ranks
    to_peers = (inside - 1) * (by.inside.latency + part / by.inside.rate)
    to_others = (ranks - inside) * (by.between.latency + inside * part / by.between.rate)
    adds = (nodes.total - 1) * size / ranks / adding
    link = by.between if hosts > 1 else by.inside
    return to_peers + to_others + adds + (ranks - 1) * (link.latency + size / ranks / link.rate)


def exposed_seconds(per_bucket: list[float], hidden: float) -> float:
    """Seconds of the exchanges of buckets, in the order in which backward fills them, that backward cannot hide.

    ``hidden`` is the time of backward beside them; the last bucket is complete only when backward has ended.
    """
    return max(per_bucket[-1], sum(per_bucket) - hidden)


def bucket_sizes(total: int) -> list[int]:
    """Bytes of the buckets of gradients of ``total`` bytes: one of 1 MiB, then 8 MiB each."""
    sizes = [min(total, 1 << 20)]
    while (left := total - sum(sizes)) > 0:
        sizes.append(min(left, 8 << 20))
    return sizes


def interpolated(points: dict[int, float], size: float) -> float:
    """Seconds for ``size`` bytes from measured {bytes: seconds}: linear between them and beyond the largest.

    Below the smallest it is the time of the smallest, which is latency.
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


WORLDS = tuple(2**power for power in range(1, 13))
"""2 to 4,096 devices."""
_BYTES_OF_FP32 = {"ordered": 1.0, "ring": 1.0, "bf16": 0.5}


@dataclass(frozen=True)
class OneDevice:
    """Times of one device, in seconds."""

    micro_batch: float
    """Forward and backward of one micro-batch."""
    backward: float
    """The part of it that is backward."""
    data: float
    """Waiting for data in a step."""
    rest: float
    """Optimizer, setting gradients, and anything else in a step."""
    samples: int
    """In an epoch."""
    micro_batches: int
    micro_batch_size: int
    gradient_bytes: int
    reduce: str
    """Name of the reducer."""

    @classmethod
    def of(cls, row: Row, measured: Round, reduce: str) -> OneDevice:
        """From the row of one device; ``ConfigError`` where the reducer has no formula."""
        require_formula(reduce)
        phases, k = row.phases, measured.micro_batches
        backward = phases.get("backward", 0.0) / k
        computing = sum(phases.get(name, 0.0) for name in ("forward", "compute", "copy")) / k + backward
        rest = sum(phases.get(name, 0.0) for name in ("optimizer", "exchange", "other"))
        return cls(
            micro_batch=computing,
            backward=backward,
            data=phases.get("data", 0.0),
            rest=rest,
            samples=measured.steps_per_epoch * k * measured.micro_batch_size,
            micro_batches=k,
            micro_batch_size=measured.micro_batch_size,
            gradient_bytes=measured.parameter_bytes,
            reduce=reduce,
        )


@dataclass(frozen=True)
class Prediction:
    """A world that was not run."""

    interconnect: str
    devices: int
    step: float
    """Seconds."""
    epoch: float
    """Seconds."""
    efficiency: float
    """Samples per second per device, over those of one device."""
    exchange: float
    """Seconds of a step in which devices do nothing but exchange."""
    same_recipe: bool
    """False where K and the global batch had to grow with the devices."""


def predict(one: OneDevice, devices: int, by: Interconnect, adding: float) -> Prediction:
    """A world of at least 2 devices on a given interconnect, each device as fast as the measured one."""
    k = max(one.micro_batches, devices)
    nodes = Nodes.of(k, devices)
    size = one.gradient_bytes * _BYTES_OF_FP32[one.reduce]
    buckets = [
        ring_seconds(each, devices, by)
        if one.reduce == "ring"
        else ordered_seconds(each, devices, by, nodes, adding)
        for each in bucket_sizes(round(size))
    ]
    return _prediction(one, devices, by.name, k, exposed_seconds(buckets, one.backward))


def predict_here(one: OneDevice, devices: int, measured: dict[int, float], busy: float) -> Prediction:
    """A world on this machine, from the measured exchange alone, of which nothing is hidden since it needs the cores.

    ``measured`` is seconds by bytes of an exchange among so many devices, ``busy`` the computing threads per core.
    """
    exchange = interpolated(measured, one.gradient_bytes)
    return _prediction(one, devices, "this machine", one.micro_batches, exchange, max(1.0, busy))


def require_formula(reduce: str) -> None:
    """Raises ``ConfigError`` where the exchange of a reducer cannot be predicted."""
    if reduce not in _BYTES_OF_FP32:
        raise ConfigError(
            f"--predict has no formula for training.reduce = {reduce!r}. Choose one of {', '.join(_BYTES_OF_FP32)}, "
            "for example with --set training.reduce=ordered."
        )


def _prediction(
    one: OneDevice, devices: int, name: str, k: int, exchange: float, busy: float = 1.0
) -> Prediction:
    rounds = -(-k // devices)
    scale = k / one.micro_batches
    step = busy * (rounds * one.micro_batch + one.rest) + one.data * scale / devices + exchange
    alone = one.micro_batches * one.micro_batch + one.data + one.rest
    global_batch = k * one.micro_batch_size
    rate = global_batch / step
    base = one.micro_batches * one.micro_batch_size / alone
    epoch = max(1.0, one.samples / global_batch) * step
    return Prediction(name, devices, step, epoch, rate / base / devices, exchange, k == one.micro_batches)
