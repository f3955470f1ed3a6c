"""The picture of the samples as text."""

from __future__ import annotations

from lockstep.explain.samples.facts import Part, Samples, Scheme
from lockstep.explain.words import folded_table, left_out, paragraph, plural

_MOST_NUMBERS = 6


def samples_text(facts: Samples) -> str:
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


def not_drawn(facts: Samples) -> list[str]:
    """What the picture leaves out."""
    schemes = [facts.ours, *([facts.classic] if facts.classic else [])]
    steps = dict.fromkeys(scheme.steps.left_out("step") for scheme in schemes)
    return [facts.ranks.left_out("rank"), *steps]


def headline(facts: Samples) -> str:
    """The numbers that were asked for."""
    order = "in a shuffled order" if facts.shuffle else "in the order 0, 1, 2, ..."
    ranks = facts.ranks.total
    return (
        f"{plural(facts.samples, 'sample')} on {plural(ranks, 'rank')}, {facts.batch} for each rank in a step "
        f"(global batch {ranks * facts.batch:,}), {order}"
    )


def classic_verdict(facts: Samples, scheme: Scheme) -> str:
    """What torch's sampler does to the epoch."""
    words = f"Rank r takes every {_ordinal(facts.ranks.total)} sample from r on."
    if facts.ranks.total == 1:
        words = "One rank takes all samples."
    if scheme.read_again:
        words += (
            f" {plural(scheme.read_again, 'reading')} of a sample that was read before (marked *), so that all "
            "ranks have as many: how many depends on the number of ranks, and such a sample counts once more in its "
            "step's mean."
        )
    if scheme.never_read:
        words += f" Samples that nobody reads: {scheme.never_read:,}."
    if not scheme.read_again and not scheme.never_read:
        words += " Here the ranks divide the samples, so none is read twice."
    return words


def our_verdict(facts: Samples) -> str:
    """What the sample plan does to the epoch."""
    words = "Every sample is read exactly once."
    if facts.ours.never_read:
        words = (
            f"No sample is read twice; {plural(facts.ours.never_read, 'sample')} of the last step left out."
        )
    global_batch, last = facts.ranks.total * facts.batch, facts.ours.step_samples[-1]
    if last < global_batch:
        words += f" The last step has {plural(last, 'sample')}, and its mean is over {last:,}."
    return (
        f"{words} A step's micro-batches k0 to k{facts.micro_batches - 1} are the same on any number of "
        f"ranks up to {facts.micro_batches:,}; a rank takes a run of them (fsdp: every n-th)."
    )


def part_words(part: Part, most: int = _MOST_NUMBERS) -> str:
    """Such as ``k0 4 5``; long ones as ``k0 4 5 .. 31``."""
    names = [f"{number}{'*' if again else ''}" for number, again in zip(part.samples, part.again)]
    if len(names) > most:
        names = [*names[: max(1, most - 3)], "..", names[-1]]
    return " ".join(names if part.micro_batch is None else [f"k{part.micro_batch}", *names])


def _table(facts: Samples, scheme: Scheme) -> list[str]:
    def cell(parts: tuple[Part, ...]) -> str:
        drawn = parts if len(parts) <= 3 else (*parts[:1], None, parts[-1])
        most = _MOST_NUMBERS if len(parts) == 1 else _MOST_NUMBERS // 2
        return " | ".join(".." if part is None else part_words(part, most) for part in drawn) or "-"

    heads = [f"{'.. ' if scheme.steps.gap_before(step) else ''}step {step}" for step in scheme.steps.shown]
    rows = [
        (f"{'.. ' if facts.ranks.gap_before(rank) else ''}rank {rank}", [cell(parts) for parts in cells])
        for rank, cells in zip(facts.ranks.shown, scheme.cells)
    ]
    return folded_table("", heads, rows)


def _ordinal(number: int) -> str:
    tens, ones = divmod(number, 10)
    return f"{number}{'th' if tens % 10 == 1 else {1: 'st', 2: 'nd', 3: 'rd'}.get(ones, 'th')}"
