"""The page of the planted faults, made from their results."""

from pathlib import Path

from tests.verify.planted.test_runs import CASES, UNCERTAIN
from tests.verify.planted.unforeseen import UNFORESEEN

PAGE = Path(__file__).parents[3] / "docs" / "planted-faults.md"

_HEAD = """# Planted faults

Every row is one mistake in a training loop on 2 or 4 real processes that adds its gradients by hand, as in the
scripts people write (`tests/verify/planted/`). The loop calls [`Recorder`](verify.md#a-loop-of-your-own); the diagnosis
sees nothing but what the ranks wrote down, and the records of a run on one process. Each loop is run without its
mistake too, and then nothing must be found but rounding.

This page is written by `python -m tests.verify.planted`, and `make test` compares it with what verify says.

"""
_TAIL = """
{found} of {count} are found, {right} with the right cause. The first ten are those that the project was asked for, and
the last {last} came from attacks on verify. "Known" in the column "right" is a mistake whose cause does not follow from
the records: verify says what differs first and lists what could explain it.

Without its mistake, each loop differs from its run on one process by rounding at most. Dropout is the exception: ranks
that draw masks of their own draw other masks than one process does, and verify says so: "{randomness}".

The mistake of row {operator} is in the reference too; it is known from recording the reference twice.
The last column says whether the cause is right as well where the reference is the same script, with its mistake, on one
process, as under `lockstep verify --script`. {alone} are. What is missing there is alike on all ranks and in the
reference (threads, implementation), or a scale that the reference's own mistake hides (accumulation).

`make test-all` runs the faults on other numbers of ranks, with AdamW, with DistributedDataParallel and in bf16 too. It
also runs {unforeseen} mistakes that were planted after the diagnosis was written (`unforeseen.py`): all are found, each
with the step and the place; where the diagnosis has no word for a mistake it says which quantity went wrong first.
"""


_RUNS = """
## In runs of Lockstep

The same for mistakes in the model, the loss or the loop of a run on 2 ranks (`test_runs.py`). The checks of the first
steps refuse some of these programs; `verify` then ends with the sentence of the refusal. What it says without them:

| mistake | what verify says | right |
|---|---|---|
"""


def _table_of_runs():
    rows = [(case.__name__.replace("_", " "), cause) for case, (cause, _) in CASES.items() if cause]
    return "".join(
        f"| {name[0].upper()}{name[1:]} | {cause.value} | {'known' if cause in UNCERTAIN else 'yes'} |\n"
        for name, cause in rows
    )


def page(results):
    """The whole page."""
    operator = next(n for n, each in enumerate(results, 1) if each.fault.is_in_reference)
    randomness = next(
        each.sound.cause.value for each in results if each.fault.loop.__name__ == "OneMask" and each.sound
    )
    tail = _TAIL.format(
        found=sum(each.is_found for each in results),
        right=sum(each.is_right for each in results),
        alone=sum(each.is_right_alone for each in results),
        count=len(results),
        last=len(results) - 24,
        randomness=randomness,
        operator=operator,
        unforeseen=len(UNFORESEEN),
    )
    return _HEAD + _table(results) + tail + _RUNS + _table_of_runs()


def _table(results):
    lines = [
        "| | mistake | ranks | found | since | what verify says | right | same script |",
        f"|{'---|' * 8}",
    ]
    for number, each in enumerate(results, 1):
        found = each.found
        since = "the start" if found is not None and found.step < 0 else f"step {found.step}" if found else ""
        cells = (
            str(number),
            each.fault.says.removesuffix("."),
            str(each.fault.ranks),
            "yes" if each.is_found else "no",
            since,
            _said(found),
            _verdict(each.found, is_right=each.is_right),
            _verdict(each.alone, is_right=each.is_right_alone),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _said(found):
    """The cause and its detail, without the numbers of a floating-point result, which other processors may round."""
    if found is None:
        return ""
    possible = f"; possible: {'; '.join(found.possible)}" if found.possible else ""
    return f"{found.cause.value}{possible}"


def _verdict(found, *, is_right):
    if not is_right:
        return "no"
    return "known" if found.possible else "yes"
