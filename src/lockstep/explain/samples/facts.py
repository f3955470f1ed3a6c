"""Which rank reads which samples in which step: torch's DistributedSampler, and the sample plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.errors import ConfigError
from lockstep.explain.words import Chosen, at_least_one
from lockstep.plan import BatchShape, SamplePlan, Share

MOST_STEPS = 6
MOST_RANKS = 8
MOST_CLASSIC = 20_000_000


@dataclass(frozen=True)
class Part:
    """Samples that go through the model at once."""

    micro_batch: int | None
    """k; None where there are no numbered micro-batches."""
    samples: tuple[int, ...]
    again: tuple[bool, ...]
    """Of each sample, whether it was read earlier in the epoch, by any rank."""


@dataclass(frozen=True)
class Scheme:
    """One way to share an epoch out."""

    steps: Chosen
    cells: tuple[tuple[tuple[Part, ...], ...], ...]
    """Of each rank that is drawn, of each step that is drawn: what it reads."""
    step_samples: tuple[int, ...]
    """How many samples all ranks read in each step that is drawn."""
    read_again: int
    """Readings of a sample that was read before, in the whole epoch."""
    never_read: int
    """Samples that nobody reads."""


@dataclass(frozen=True)
class Samples:
    """All that the picture says."""

    samples: int
    batch: int
    micro_batches: int
    shuffle: bool
    ranks: Chosen
    ours: Scheme
    classic: Scheme | None
    why_no_classic: str

    def as_json(self) -> dict[str, Any]:
        """Everything, ready for ``json.dumps``."""
        return asdict(self)


def explain_samples(
    *,
    samples: int = 11,
    ranks: int = 2,
    batch: int = 2,
    micro_batches: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    epoch: int = 0,
    drop_last: bool = False,
) -> Samples:
    """How an epoch is shared out over data-parallel ranks.

    Args:
        samples: size of the data set.
        ranks: data-parallel ranks.
        batch: samples of a rank in a step of the classic way; ours takes ``ranks * batch`` as the global batch.
        micro_batches: K; by default as many as there are ranks.
        shuffle: visit the samples in the order of ``seed`` and ``epoch``.
        seed: of both orders.
        epoch: which epoch.
        drop_last: leave out what does not fill the last step.

    Raises:
        ConfigError: the numbers do not go together.
    """
    k = ranks if micro_batches is None else micro_batches
    _not_too_many(samples=(samples, 10**12), epoch=(epoch, 10**9), batch=(ranks * batch, 10**6))
    shape = _shape(samples, ranks, batch, k)
    plan = SamplePlan(samples=samples, shape=shape, seed=seed, shuffle=shuffle, drop_last=drop_last)
    shown = Chosen.of(ranks, MOST_RANKS)
    ours, why = _ours(plan, epoch, shown), ""
    try:
        orders = _classic_orders(samples, ranks, shuffle, seed, epoch, drop_last)
    except ModuleNotFoundError:
        orders, why = [], "torch is not installed, so its DistributedSampler is not shown."
    classic = _classic(orders, samples, batch, shown) if orders else None
    why = why or ("" if classic else _TOO_MANY)
    return Samples(samples, batch, k, shuffle, shown, ours, classic, why)


_TOO_MANY = (
    "torch's DistributedSampler makes a list of all samples on every rank; it is shown where samples times ranks are "
    f"at most {MOST_CLASSIC:,}."
)


def _shape(samples: int, ranks: int, batch: int, micro_batches: int) -> BatchShape:
    at_least_one(samples=samples, ranks=ranks, batch=batch, micro_batches=micro_batches)
    try:
        shape = BatchShape(global_batch=ranks * batch, micro_batches=micro_batches)
    except ConfigError as error:
        raise ConfigError(f"--ranks={ranks} times --batch={batch} is the global batch. {error}") from error
    shape.check_holders(ranks)
    return shape


def _not_too_many(**numbers: tuple[int, int]) -> None:
    for name, (value, most) in numbers.items():
        if not 0 <= value <= most:
            times = " times --ranks" if name == "batch" else ""
            raise ConfigError(
                f"--{name}{times} should be at most {most:,} and not negative, and is {value:,}."
            )


def _ours(plan: SamplePlan, epoch: int, ranks: Chosen) -> Scheme:
    share = Share(holders=ranks.total)
    steps = Chosen.of(plan.steps_per_epoch, MOST_STEPS)
    plans = [plan.step(epoch, position) for position in steps.shown]
    cells = [
        [[_fresh(k, step.indices[k].tolist()) for k in share.of(step.leaves, holder=rank)] for step in plans]
        for rank in ranks.shown
    ]
    return Scheme(steps, _frozen(cells), tuple(step.samples for step in plans), 0, plan.dropped_samples)


def _fresh(k: int, samples: list[int]) -> Part:
    return Part(k, tuple(samples), (False,) * len(samples))


def _classic_orders(
    samples: int, ranks: int, shuffle: bool, seed: int, epoch: int, drop_last: bool
) -> list[list[int]]:
    """What torch's own sampler gives each rank; nothing for too large a set."""
    if max(samples, ranks) * ranks > MOST_CLASSIC:
        return []
    from torch.utils.data import DistributedSampler

    orders = []
    for rank in range(ranks):
        sampler: DistributedSampler[int] = DistributedSampler(
            range(samples),  # type: ignore[arg-type]  # only its length is asked for
            num_replicas=ranks,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def _classic(orders: Sequence[Sequence[int]], samples: int, batch: int, ranks: Chosen) -> Scheme:
    """The steps of a DataLoader over each rank's samples."""
    length = len(orders[0])
    seen: set[int] = set()
    again: list[list[bool]] = [[] for _ in orders]
    for place in range(length):
        for rank, order in enumerate(orders):
            again[rank].append(order[place] in seen)
            seen.add(order[place])
    steps = Chosen.of(-(-length // batch), MOST_STEPS)
    starts = [step * batch for step in steps.shown]
    cells = [
        [[Part(None, tuple(orders[r][i : i + batch]), tuple(again[r][i : i + batch]))] for i in starts]
        for r in ranks.shown
    ]
    sizes = tuple(len(orders) * len(orders[0][i : i + batch]) for i in starts)
    return Scheme(steps, _frozen(cells), sizes, sum(map(sum, again)), samples - len(seen))


def _frozen(cells: Iterable[Iterable[Iterable[Part]]]) -> tuple[tuple[tuple[Part, ...], ...], ...]:
    return tuple(tuple(tuple(cell) for cell in row) for row in cells)
