"""The time of a step on W devices, from what one device takes: pure functions.

    step(W) = ceil(K / W) x micro-batch  +  data / W  +  exposed exchange(W)  +  rest

``rest`` is the optimizer and what else every device does for itself. For W > K the recipe cannot be kept: K is
then W and the global batch grows with it, and such a line says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigError
from lockstep.scale.measured import Round, Row
from lockstep.scale.prediction.collectives import (
    Nodes,
    bucket_sizes,
    exposed_seconds,
    interpolated,
    ordered_seconds,
    ring_seconds,
)
from lockstep.scale.prediction.links import Interconnect

WORLDS = tuple(2**power for power in range(1, 13))
"""2 to 4,096 devices."""
_BYTES_OF_FP32 = {"ordered": 1.0, "ring": 1.0, "bf16": 0.5}


@dataclass(frozen=True)
class OneDevice:
    """What was measured on one device; seconds."""

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
        """From the row of one device.

        Raises:
            ConfigError: there is no formula for the reducer.
        """
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
    """A world on a stated interconnect, each device as fast as the measured one.

    Args:
        one: what was measured.
        devices: of the world, at least 2.
        by: what connects them.
        adding: bytes per second that a device adds to others.
    """
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
    """A world on this machine, from the measured exchange alone; nothing of it is hidden, since it needs the cores.

    Args:
        one: what was measured.
        devices: of the world.
        measured: seconds of an exchange among so many devices, by bytes.
        busy: threads that compute for each core; below 1 as good as 1.
    """
    exchange = interpolated(measured, one.gradient_bytes)
    return _prediction(one, devices, "this machine", one.micro_batches, exchange, max(1.0, busy))


def require_formula(reduce: str) -> None:
    """Raises ``ConfigError`` where the exchange of a reducer cannot be predicted."""
    if reduce not in _BYTES_OF_FP32:
        raise ConfigError(
            f"--predict was asked for a job with training.reduce = {reduce!r}, for which there is no formula. It knows "
            f"{', '.join(_BYTES_OF_FP32)}: choose one with --set training.reduce=ordered."
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
