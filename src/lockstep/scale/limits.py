"""Says in one sentence what limits scaling and what to change: a pure function of what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.scale.measured import Row
from lockstep.scale.phases import work

_COMPUTING = ("forward", "backward", "compute", "copy")


@dataclass(frozen=True)
class Machine:
    """What the layouts had to run on and with."""

    cores: int
    """Processors that this process may use."""
    threads: int
    """Of each rank."""
    workers: int
    """Loader processes of each rank."""
    micro_batches: int
    """K of the recipe."""


def lost_seconds(alone: Row, many: Row, machine: Machine) -> dict[str, float]:
    """Seconds per step that keep a layout from an ideal speed-up, by cause. Never negative.

    The ideal step takes ``alone / devices``. Data, computing and optimizer are judged by the slowest rank, whose work
    bounds the step; ``micro-batches`` is what computing K in ceil(K / devices) rounds costs, and ``computing`` what a
    micro-batch takes longer than on one device.
    """
    devices, slowest = many.devices, many.ranks[many.slowest]
    one = _sum(alone.phases, _COMPUTING)
    rounds = -(-machine.micro_batches // devices)
    expected = one * rounds / machine.micro_batches
    mean = sum(_sum(rank, _COMPUTING) for rank in many.ranks) / len(many.ranks)
    own = max(mean, expected)
    lost = {
        "data": slowest.get("data", 0.0) - alone.phases.get("data", 0.0) / devices,
        "communication": many.communication - alone.communication / devices,
        "optimizer": slowest.get("optimizer", 0.0) - alone.phases.get("optimizer", 0.0) / devices,
        "micro-batches": expected - one / devices,
        "imbalance": max(0.0, _sum(slowest, _COMPUTING) - own),
        "computing": own - expected,
    }
    return {cause: max(0.0, seconds) for cause, seconds in lost.items()}


def sentence(alone: Row, many: Row, machine: Machine) -> str:
    """What limits the layout ``many``, compared with one device, and what to change.

    Args:
        alone: one device.
        many: a layout of several devices.
        machine: what they ran on.
    """
    share = f"{many.label} reaches {100 * many.efficiency.median:.0f} % of an ideal speed-up"
    busy = many.devices * machine.threads
    if busy > machine.cores:
        most = max(1, machine.cores // machine.threads)
        return (
            f"{share}: too few cores, since {many.devices} devices with {_counted(machine.threads, 'thread')} each "
            f"need {busy} and there are {machine.cores}. Use at most {_counted(most, 'device')} here, or more cores."
        )
    lost = lost_seconds(alone, many, machine)
    cause = max(lost, key=lambda name: lost[name])
    if many.efficiency.median >= _GOOD or lost[cause] <= 0.0:
        return f"{share}: nothing here limits scaling. Try more devices."
    part = f"{1000 * lost[cause]:.2g} ms of each step of {1000 * many.step.median:.3g} ms"
    return f"{share}: what limits it is {_SAID[cause](part, many, machine)}"


_GOOD = 0.95


def _data(part: str, many: Row, machine: Machine) -> str:
    return (
        f"waiting for data ({part}). Raise data.workers above {machine.workers} where cores are free, or read data "
        "that is decoded already."
    )


def _communication(part: str, many: Row, machine: Machine) -> str:
    return (
        f"communication that computing does not hide ({part}). Give each device more to compute between two exchanges "
        '(a larger global_batch), send fewer bytes (reduce = "bf16"), or use a faster link.'
    )


def _optimizer(part: str, many: Row, machine: Machine) -> str:
    return (
        f"the optimizer, which every device runs over all parameters ({part}). Raise global_batch, use a fused "
        'optimizer, or share the parameters out (strategy "fsdp").'
    )


def _micro_batches(part: str, many: Row, machine: Machine) -> str:
    k, rounds = machine.micro_batches, -(-machine.micro_batches // many.devices)
    return (
        f"that {many.devices} devices do not divide micro_batches = {k}: some compute {rounds} while others wait "
        f"({part}). Choose micro_batches = {rounds * many.devices}, which is another recipe, or a number of devices "
        f"that divides {k}."
    )


def _imbalance(part: str, many: Row, machine: Machine) -> str:
    return (
        f"rank {many.slowest}, for which the others wait ({part}): it is busy for "
        f"{1000 * work(many.ranks[many.slowest]):.3g} ms of a step. See what else runs on its device, or whether its "
        "samples or layers are larger."
    )


def _computing(part: str, many: Row, machine: Machine) -> str:
    wanted = many.devices * (machine.threads + machine.workers)
    if wanted > machine.cores:
        return (
            f"too few cores: with data.workers = {machine.workers}, {many.devices} devices ask for {wanted} and there "
            f"are {machine.cores}, so that computing takes longer than on one device ({part}). Lower data.workers."
        )
    return (
        f"computing itself, which takes longer than on one device ({part}): devices share memory bandwidth, caches or "
        "clock, or exchange within forward and backward. Use devices of their own, or a strategy that exchanges less."
    )


_SAID: dict[str, Callable[[str, Row, Machine], str]] = {
    "data": _data,
    "communication": _communication,
    "optimizer": _optimizer,
    "micro-batches": _micro_batches,
    "imbalance": _imbalance,
    "computing": _computing,
}


def _sum(phases: Mapping[str, float], names: tuple[str, ...]) -> float:
    return sum(phases.get(name, 0.0) for name in names)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
