"""The picture of the samples: the reads of each rank in each step, by DistributedSampler and by the sample plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.plan import BatchShape, SamplePlan, Share
from lockstep.errors import ConfigError
from lockstep.explain.drawing import (
    LETTER,
    Chosen,
    Drawing,
    PictureFacts,
    at_least_one,
    folded_table,
    left_out,
    paragraph,
    rank_style,
)
from lockstep.text import plural

MOST_STEPS = 6
MOST_RANKS = 8
MOST_CLASSIC = 20_000_000


@dataclass(frozen=True)
class SampleGroup:
    """Samples that go through the model at once."""

    micro_batch: int | None
    """k; None where there are no numbered micro-batches."""
    samples: tuple[int, ...]
    again: tuple[bool, ...]
    """For each sample: True if any rank has read it earlier in the epoch."""


@dataclass(frozen=True)
class Scheme:
    """One way to distribute an epoch."""

    steps: Chosen
    cells: tuple[tuple[tuple[SampleGroup, ...], ...], ...]
    """The reads of each drawn rank in each drawn step."""
    step_samples: tuple[int, ...]
    """Number of samples that all ranks read in each drawn step."""
    read_again: int
    """Repeated reads of samples in the whole epoch."""
    never_read: int
    """Samples that no rank reads."""


@dataclass(frozen=True)
class SamplesFacts(PictureFacts):
    """The contents of the picture."""

    samples: int
    batch: int
    micro_batches: int
    shuffle: bool
    ranks: Chosen
    ours: Scheme
    classic: Scheme | None
    why_no_classic: str


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
) -> SamplesFacts:
    """Distributes an epoch over data-parallel ranks.

    Args:
        samples: size of the data set.
        ranks: data-parallel ranks.
        batch: samples of a rank in a step of the classic way; the sample plan has a global batch of ``ranks * batch``.
        micro_batches: K; by default the number of ranks.
        shuffle: visit the samples in the order of ``seed`` and ``epoch``.
        seed: of both orders.
        epoch: number of the epoch.
        drop_last: leave out an incomplete last step.

    Raises:
        ConfigError: the numbers do not fit together.
    """
    k = ranks if micro_batches is None else micro_batches
    for name, value, most in (
        ("samples", samples, 10**12),
        ("epoch", epoch, 10**9),
        ("batch times --ranks", ranks * batch, 10**6),
    ):
        if not 0 <= value <= most:
            raise ConfigError(f"--{name} should be from 0 to {most:,} and is {value:,}.")
    shape = _shape(samples, ranks, batch, k)
    plan = SamplePlan(samples=samples, shape=shape, seed=seed, shuffle=shuffle, drop_last=drop_last)
    shown = Chosen.of(ranks, MOST_RANKS)
    ours = _ours(plan, epoch, shown)  # before torch, which has its own words for a seed that does not fit
    classic, why = None, ""
    try:
        if orders := _classic_orders(samples, ranks, shuffle, seed, epoch, drop_last):
            classic = _classic(orders, samples, batch, shown)
        else:
            why = (
                "torch's DistributedSampler makes a list of all samples on every rank; it is shown where samples "
                f"times ranks are at most {MOST_CLASSIC:,}."
            )
    except ModuleNotFoundError:
        why = "torch is not installed, so its DistributedSampler is not shown."
    return SamplesFacts(samples, batch, k, shuffle, shown, ours, classic, why)


def _shape(samples: int, ranks: int, batch: int, micro_batches: int) -> BatchShape:
    at_least_one(samples=samples, ranks=ranks, batch=batch, micro_batches=micro_batches)
    try:
        shape = BatchShape(global_batch=ranks * batch, micro_batches=micro_batches)
    except ConfigError as error:
        raise ConfigError(f"--ranks={ranks} times --batch={batch} is the global batch. {error}") from error
    shape.check_holders(ranks)
    return shape


def _ours(plan: SamplePlan, epoch: int, ranks: Chosen) -> Scheme:
    share = Share(holders=ranks.total)
    steps = Chosen.of(plan.steps_per_epoch, MOST_STEPS)
    plans = [plan.step(epoch, position) for position in steps.shown]
    cells = tuple(
        tuple(
            tuple(
                SampleGroup(k, tuple(step.indices[k].tolist()), (False,) * len(step.indices[k]))
                for k in share.of(step.leaves, holder=rank)
            )
            for step in plans
        )
        for rank in ranks.shown
    )
    return Scheme(steps, cells, tuple(step.samples for step in plans), 0, plan.dropped_samples)


def _classic_orders(samples: int, ranks: int, shuffle: bool, seed: int, epoch: int, drop_last: bool) -> list[list[int]]:
    """The samples that torch's own sampler gives each rank; none for too large a set."""
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
    cells = tuple(
        tuple((SampleGroup(None, tuple(orders[r][i : i + batch]), tuple(again[r][i : i + batch])),) for i in starts)
        for r in ranks.shown
    )
    sizes = tuple(len(orders) * len(orders[0][i : i + batch]) for i in starts)
    return Scheme(steps, cells, sizes, sum(map(sum, again)), samples - len(seen))


_MOST_NUMBERS = 6


def samples_text(facts: SamplesFacts) -> str:
    """Both ways as tables of ranks and steps, at most 100 columns wide."""
    lines = [*paragraph(headline(facts)), ""]
    if facts.classic:
        lines += [
            "torch's DistributedSampler + DataLoader",
            *_table(facts, facts.classic),
            *paragraph(classic_verdict(facts, facts.classic)),
            "",
        ]
    else:
        lines += [*paragraph(facts.why_no_classic), ""]
    lines += ["Lockstep", *_table(facts, facts.ours), *paragraph(our_verdict(facts))]
    lines += left_out(*not_drawn(facts))
    return "\n".join(lines)


def not_drawn(facts: SamplesFacts) -> list[str]:
    """The ranks and steps that the picture leaves out."""
    schemes = [facts.ours, *([facts.classic] if facts.classic else [])]
    steps = dict.fromkeys(scheme.steps.left_out("step") for scheme in schemes)
    return [facts.ranks.left_out("rank"), *steps]


def headline(facts: SamplesFacts) -> str:
    """The given numbers."""
    order = "in a shuffled order" if facts.shuffle else "in the order 0, 1, 2, ..."
    ranks = facts.ranks.total
    return (
        f"{plural(facts.samples, 'sample')} on {plural(ranks, 'rank')}, {facts.batch} for each rank in a step "
        f"(global batch {ranks * facts.batch:,}), {order}"
    )


def classic_verdict(facts: SamplesFacts, scheme: Scheme) -> str:
    """The effect of torch's sampler on the epoch."""
    words = f"Rank r takes every {_ordinal(facts.ranks.total)} sample from r on."
    if facts.ranks.total == 1:
        words = "One rank takes all samples."
    if scheme.read_again:
        words += (
            f" {plural(scheme.read_again, 'reading')} of a sample that was read before (marked *), so that all "
            "ranks read equally many. How many depends on the number of ranks, and such a sample counts again in the "
            "mean of its step."
        )
    if scheme.never_read:
        words += f" Samples that nobody reads: {scheme.never_read:,}."
    if not scheme.read_again and not scheme.never_read:
        words += " Here the ranks divide the samples, so none is read twice."
    return words


def our_verdict(facts: SamplesFacts) -> str:
    """The effect of the sample plan on the epoch."""
    words = "Every sample is read exactly once."
    if facts.ours.never_read:
        words = f"No sample is read twice; {plural(facts.ours.never_read, 'sample')} of the last step left out."
    global_batch, last = facts.ranks.total * facts.batch, facts.ours.step_samples[-1]
    if last < global_batch:
        words += f" The last step has {plural(last, 'sample')}, and its mean is over {last:,}."
    return (
        f"{words} A step's micro-batches k0 to k{facts.micro_batches - 1} are the same on any number of "
        f"ranks up to {facts.micro_batches:,}; a rank takes consecutive ones (fsdp: every n-th)."
    )


def part_words(part: SampleGroup, most: int = _MOST_NUMBERS) -> str:
    """Such as ``k0 4 5``; long ones as ``k0 4 5 .. 31``."""
    names = [f"{number}{'*' if again else ''}" for number, again in zip(part.samples, part.again)]
    if len(names) > most:
        names = [*names[: max(1, most - 3)], "..", names[-1]]
    return " ".join(names if part.micro_batch is None else [f"k{part.micro_batch}", *names])


def _table(facts: SamplesFacts, scheme: Scheme) -> list[str]:
    def cell(parts: tuple[SampleGroup, ...]) -> str:
        drawn = parts if len(parts) <= 3 else (*parts[:1], None, parts[-1])
        most = _MOST_NUMBERS if len(parts) == 1 else _MOST_NUMBERS // 2
        return " | ".join(".." if part is None else part_words(part, most) for part in drawn) or "-"

    rows = [(name, list(map(cell, cells))) for name, cells in zip(facts.ranks.names("rank"), scheme.cells)]
    return folded_table(scheme.steps.names("step"), rows)


def _ordinal(number: int) -> str:
    tens, ones = divmod(number, 10)
    return f"{number}{'th' if tens % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(ones, 'th')}"


_LEAST_BOX, _HEIGHT, _MOST_BOXES = 34.0, 28.0, 4
_LEAD, _GAP = 84.0, 26.0


def samples_svg(facts: SamplesFacts) -> str:
    """One row of boxes for each rank, in its colour; a sample that is read again stands out."""
    drawing = Drawing(headline(facts))
    if facts.classic:
        _scheme(drawing, "torch's DistributedSampler", facts, facts.classic)
        drawing.caption(classic_verdict(facts, facts.classic).replace("marked *", "in red"))
    else:
        drawing.caption(facts.why_no_classic)
    _scheme(drawing, "Lockstep", facts, facts.ours)
    drawing.caption(our_verdict(facts), *left_out(*not_drawn(facts)))
    return drawing.svg()


def _scheme(drawing: Drawing, name: str, facts: SamplesFacts, scheme: Scheme) -> None:
    top = drawing.bottom + 26
    drawing.text(0, top, name, "strong")
    numbered = any(part.micro_batch is not None for row in scheme.cells for cell in row for part in cell)
    box = max(_LEAST_BOX, 12 * LETTER * len(str(facts.samples - 1)) + 6)
    row_height = _HEIGHT + (26 if numbered else 12)
    x = _LEAD
    for column, step in enumerate(scheme.steps.shown):
        if scheme.steps.gap_before(step):
            drawing.text(x, top + 26 + row_height / 2, "...", "soft")
            x += 34
        cells = [row[column] for row in scheme.cells]
        drawing.text(x, top + 22, f"step {step}", "soft", size=12)
        widths = [
            _cell(drawing, x, top + 36 + number * row_height, rank, cell, box)
            for number, (rank, cell) in enumerate(zip(facts.ranks.shown, cells))
        ]
        x += max([*widths, 60.0]) + _GAP
    for number, rank in enumerate(facts.ranks.shown):
        y = top + 36 + number * row_height
        drawing.text(0, y + _HEIGHT / 2, f"rank {rank}")
        if facts.ranks.gap_before(rank):
            drawing.text(0, y - 7, "...", "soft")


def _cell(drawing: Drawing, left: float, y: float, rank: int, parts: tuple[SampleGroup, ...], box: float) -> float:
    """Draws the reads of a rank in a step; returns the width."""
    x = left
    for part in parts[:2]:
        start = x
        for sample, again in _some(part):
            if sample is None:
                drawing.text(x + 4, y + _HEIGHT / 2, "..", "soft")
                x += 24
                continue
            style = "alarm" if again else rank_style(rank)
            drawing.box(x, y, box, _HEIGHT, style, str(sample))
            x += box + 2
        if part.micro_batch is not None:
            drawing.text((start + x - 2) / 2, y + _HEIGHT + 8, f"k{part.micro_batch}", "soft", size=11, at="middle")
        x += 8
    if len(parts) > 2:
        drawing.text(x, y + _HEIGHT / 2, f"+ {len(parts) - 2}", "soft")
        x += 30
    return x - left


def _some(part: SampleGroup) -> list[tuple[int | None, bool]]:
    pairs: list[tuple[int | None, bool]] = list(zip(part.samples, part.again))
    return pairs if len(pairs) <= _MOST_BOXES else [*pairs[:2], (None, False), pairs[-1]]
