"""Predicts the time of a step on W devices from the times of one device, and of the exchange of gradients alone.

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

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.config.job import JobConfig
from lockstep.core.plan import share
from lockstep.core.summation_tree import nodes_within
from lockstep.errors import EXIT_DONE, ConfigError, RankError, nearest
from lockstep.launch.supervisor import run_sequentially
from lockstep.scale.measured import Round, Row
from lockstep.text import comma_separated, grouped


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
    inside: NetworkLink
    """Between devices of one host; each device has its own."""
    between: NetworkLink
    """Between hosts; the devices of a host share it."""
    per_host: int = 8
    """Devices of a host."""


_PCIE = NetworkLink(10e-6, 31.5e9)  # PCIe 4.0 x16
_NVLINK = NetworkLink(5e-6, 450e9)  # NVLink 4
_INTERNET = NetworkLink(20e-3, 12.5e6)  # 100 Mb
_WHOLE_WORLD = 1 << 20

PRESETS = {
    each.name: each
    for each in (
        Interconnect("pcie", _PCIE, _PCIE, _WHOLE_WORLD),
        Interconnect("nvlink", _NVLINK, _NVLINK, _WHOLE_WORLD),
        Interconnect("ethernet10", _PCIE, NetworkLink(30e-6, 1.25e9)),
        Interconnect("ethernet100", _PCIE, NetworkLink(15e-6, 12.5e9)),
        Interconnect("ethernet400", _NVLINK, NetworkLink(10e-6, 50e9)),
        Interconnect("infiniband", _NVLINK, NetworkLink(3e-6, 50e9)),  # NDR
        Interconnect("internet100", _INTERNET, _INTERNET, 1),
    )
}
"""By name; between hosts of 8 devices, unless all devices are alike."""


def presets(names: str) -> list[Interconnect]:
    """The presets of a comma-separated list, or all if it is empty; ``ConfigError`` for an unknown name."""
    words = comma_separated(names)
    for word in words:
        if word not in PRESETS:
            raise ConfigError(f"interconnect {word!r} is not known.{nearest(word, tuple(PRESETS))}")
    return [PRESETS[word] for word in words] or list(PRESETS.values())


def tree_nodes(micro_batches: int, ranks: int) -> tuple[int, int]:
    """Tree nodes that ranks exchange in a step: the most of one rank, and of all ranks."""
    parts = (share(micro_batches, ranks, rank) for rank in range(ranks))
    counts = [len(nodes_within(part.start, part.stop, micro_batches)) for part in parts]
    return max(counts), sum(counts)


def ring_seconds(size: float, ranks: int, by: Interconnect) -> float:
    """A ring all-reduce of ``size`` bytes."""
    inside, hosts = _hosts(ranks, by)
    within = 2 * (inside - 1) * (by.inside.latency + size / (inside * by.inside.rate))
    return within + 2 * (hosts - 1) * (by.between.latency + size / (hosts * by.between.rate))


def ordered_seconds(size: float, ranks: int, by: Interconnect, nodes: tuple[int, int], adding: float) -> float:
    """An ordered all-reduce of ``size`` bytes.

    ``nodes`` are those of ``tree_nodes``, ``adding`` the bytes that a device adds to others in a second.
    """
    most, total = nodes
    inside, hosts = _hosts(ranks, by)
    part = most * size / ranks
    to_peers = (inside - 1) * (by.inside.latency + part / by.inside.rate)
    to_others = (ranks - inside) * (by.between.latency + inside * part / by.between.rate)
    adds = (total - 1) * size / ranks / adding
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
            samples=measured.samples_per_epoch,
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
    nodes = tree_nodes(k, devices)
    sent = _BYTES_OF_FP32[one.reduce]
    buckets = [
        ring_seconds(size, devices, by)
        if one.reduce == "ring"
        else ordered_seconds(size * sent, devices, by, nodes, adding * sent)  # it adds float32, however it was sent
        for size in bucket_sizes(one.gradient_bytes)
    ]
    return _prediction(one, devices, by.name, k, exposed_seconds(buckets, one.backward))


def predict_here(one: OneDevice, devices: int, measured: dict[int, float], busy: float) -> Prediction:
    """A world on this machine, from the measured exchange alone, of which nothing is hidden since it needs the cores.

    ``measured`` is seconds by bytes of an exchange among ``devices``, ``busy`` the computing threads per core.
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


def _prediction(one: OneDevice, devices: int, name: str, k: int, exchange: float, busy: float = 1.0) -> Prediction:
    rounds = -(-k // devices)
    scale = k / one.micro_batches
    step = busy * (rounds * one.micro_batch + one.rest) + one.data * scale / devices + exchange
    alone = one.micro_batches * one.micro_batch + one.data + one.rest
    global_batch = k * one.micro_batch_size
    rate = global_batch / step
    base = one.micro_batches * one.micro_batch_size / alone
    epoch = -(-one.samples // global_batch) * step  # of fewer samples, the last takes as long
    return Prediction(name, devices, step, epoch, rate / base / devices, exchange, k == one.micro_batches)


SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
"""Bytes of the measured messages; the size of the gradients is added."""
_ENTRY = "lockstep.scale.rank:time_exchange"
_SECONDS_EACH = 0.3


@dataclass(frozen=True)
class CheckedPrediction:
    """A world that was predicted and measured."""

    label: str
    devices: int
    predicted: float
    """Seconds per epoch."""
    measured: float
    """Seconds per epoch, the median."""

    @property
    def error(self) -> float:
        """The relative error of the prediction; negative where it is too short."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Forecast:
    """Predictions and the measurements behind them."""

    one: OneDevice
    adding: float
    """Bytes per second that a device adds up."""
    messages: dict[int, dict[int, float]]
    """Seconds of an exchange alone, by number of ranks and bytes."""
    here: tuple[CheckedPrediction, ...]
    worlds: tuple[Prediction, ...]

    @property
    def note(self) -> str:
        """The assumptions of the predictions."""
        k = self.one.micro_batches
        return (
            f"Every device is assumed to be as fast as the one measured here. Beyond {k} devices, micro_batches = {k} "
            "is too small for the world: there (*) each device computes one micro-batch and the global batch grows, "
            "which is another recipe. The efficiency is that of full steps. The model is described in docs/scale.md."
        )


def forecast(
    config: JobConfig,
    one: OneDevice,
    rows: Sequence[Row],
    links: Sequence[Interconnect],
    cores: int,
    folder: Path,
) -> Forecast:
    """Measures the exchange among as many ranks as ``ddp`` was measured on (or 2), and predicts.

    Args:
        config: the job.
        one: times of one device.
        rows: all measured layouts.
        links: interconnects of larger worlds.
        cores: of this machine.
        folder: for the files of the ranks.

    Raises:
        RankError: the measurement of the exchange failed.
    """
    compared = [row for row in rows if row.strategy == "ddp" and not row.refused]
    messages, adding = {}, 0.0
    for ranks in [row.devices for row in compared] or [2]:
        messages[ranks], adding = _measure(config, one, ranks, folder)
    checked = []
    for row in compared:
        here = predict_here(one, row.devices, messages[row.devices], row.devices * config.run.threads / cores)
        checked.append(CheckedPrediction(row.label, row.devices, here.epoch, row.epoch.median))
    worlds = (predict(one, devices, link, adding) for link in links for devices in WORLDS)
    return Forecast(one, adding, messages, tuple(checked), tuple(worlds))


def _measure(config: JobConfig, one: OneDevice, ranks: int, folder: Path) -> tuple[dict[int, float], float]:
    """Seconds by bytes, of the slowest rank, and bytes added per second."""
    here = folder / f"messages-{ranks}"
    here.mkdir()
    payload = {
        "reduce": one.reduce,
        "micro_batches": one.micro_batches,
        "sizes": sorted({*SIZES, max(4, one.gradient_bytes)}),
        "seconds": _SECONDS_EACH,
        "threads": config.run.threads,
        "timeout": config.run.timeout,
    }
    outcome = run_sequentially(_ENTRY, payload, ranks=ranks, threads=config.run.threads, folder=here)
    if outcome.code != EXIT_DONE:
        raise RankError(f"Measuring the exchange among {ranks} ranks failed: {' '.join(outcome.lines)}")
    found = [json.loads((here / f"messages-{rank}.json").read_text()) for rank in range(ranks)]
    slowest = {int(size): max(each["seconds"][size] for each in found) for size in found[0]["seconds"]}
    return slowest, min(each["adding"] for each in found)


def checked_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head, and a row for each world that was measured too."""
    return [
        ("layout", "predicted s/epoch", "measured s/epoch", "error"),
        *(
            (each.label, f"{each.predicted:.3g}", f"{each.measured:.3g}", f"{100 * each.error:+.0f} %")
            for each in found.here
        ),
    ]


def world_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head of interconnects, and a row for each number of devices; ``*`` where it needs another recipe."""
    rows = grouped(
        (f"{each.devices}{'' if each.same_recipe else ' *'}", f"{each.epoch:.3g} ({100 * each.efficiency:.0f} %)")
        for each in found.worlds
    )
    interconnects = dict.fromkeys(each.interconnect for each in found.worlds)
    return [("devices", *interconnects), *((name, *cells) for name, cells in rows.items())]


def message_table(found: Forecast) -> list[tuple[str, ...]]:
    """A head of numbers of ranks, and a row for each size, in milliseconds."""
    each = list(found.messages.values())
    rows = ((f"{size:,}", *(f"{1000 * seconds[size]:.3g}" for seconds in each)) for size in each[0])
    return [("bytes", *(f"{ranks} ranks" for ranks in found.messages)), *rows]
