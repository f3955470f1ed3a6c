"""Random programs against every layout: equal to ``single``, bit for bit, or refused in a sentence.

    python -m tests.sameness.programs --seeds 0:200            a table of outcomes, and each finding as a script
    python -m tests.sameness.programs --seeds 17:18 --show     the program of a seed

A program is drawn from the parts in ``texts`` by its seed. ``single`` is the reference; the other layouts of the seed
must end with the same losses, values and fingerprint, or be refused. What differs, raises another error, or hangs is a
finding; it is made smaller by leaving parts out as long as it ends as before. A program that raises an error of its own
on ``single`` is wrong in itself and does not count.
"""

import argparse
import collections
import dataclasses
import itertools
import re
import sys
import textwrap
import time

from tests.sameness.drawing import SINGLE, draw, layouts, plain, text_of
from tests.sameness.parts import BLOCKS
from tests.sameness.trials import Worlds, folder_of, run_trial, script

CLOSE = 2e-2
"""How far losses of layouts at level B may be apart, relative."""
_TOLD = (
    "at the checkpoint",
    "in this resumed run",
    "without the stop",
    "does not exist yet",
    "from where the run goes on",
)
"""Words of the warnings that a resumed run does not go on as it would have."""
_OWN = re.compile(r"(?<=: )found \([^)]*\)(\.|, )")
"""The values that a program collects, which is the first variable that such a warning names."""


@dataclasses.dataclass
class Verdict:
    """How a program ended on a layout: ``equal``, ``refused``, ``warned`` of a stop, or a finding."""

    what: str
    said: str = ""
    traceback: str = ""

    @property
    def is_finding(self):
        """True where neither equal nor refused."""
        return self.what not in ("equal", "refused", "close", "warned")


def compare(reference, ended, layout):
    """The verdict on a layout's end beside that of ``single``."""
    verdict = _compared(reference, ended, layout)
    warnings = [_OWN.sub("", words) for words in ended.warnings]
    told = [words for words in warnings if any(each in words for each in _TOLD) and ":  What" not in words]
    if told and verdict.is_finding and (verdict.what == "differs" or ended.own):
        return Verdict("warned", " ".join(told[0].split())[:220])
    return verdict


def _compared(reference, ended, layout):
    if ended.how == "refused":
        return Verdict("refused", ended.sentence, ended.traceback)
    if ended.how != "ran":
        return Verdict(ended.how, ended.sentence, ended.traceback)
    if not layout.exact:
        return _closeness(reference.found[0], ended.found)
    for rank, found in enumerate(ended.found):
        for key, value in reference.found[0].items():
            if key.endswith("fingerprint") and rank:
                continue
            if found.get(key, "nothing") != value and not (rank and found.get(key) is None):
                return Verdict("differs", f"{key}: {value} on single, {found.get(key)} on rank {rank}"[:220])
        if more := set(found) - set(reference.found[0]):
            return Verdict("differs", f"{sorted(more)[0]} is not there on single")
    return Verdict("equal")


def _closeness(reference, found):
    for each in found:
        for key, value in reference.items():
            if key.endswith("loss"):
                one, two = float.fromhex(value), float.fromhex(each.get(key, "nan"))
                if not abs(one - two) <= CLOSE * max(1.0, abs(one)):
                    return Verdict("differs", f"{key}: {one} on single, {two}")
    return Verdict("close")


def judge(program, phases, timeout=25.0, reference=None):
    """Runs a program on ``single``, unless that is given, and on a layout.

    Returns:
        The verdict; None where the program is wrong in itself.
    """
    text = text_of(program)
    with Worlds() as worlds:
        return _judged(text, phases, timeout, reference or run_trial(text, [SINGLE], timeout, worlds), worlds)


def _judged(text, phases, timeout, reference, worlds):
    if reference.how == "raised" and reference.own:
        return None
    if reference.how != "ran":
        return Verdict(
            "refused" if reference.how == "refused" else reference.how,
            reference.sentence,
            reference.traceback,
        )
    return compare(reference, run_trial(text, phases, timeout, worlds), phases[-1])


def smaller(program):
    """Programs with a part less, or an ordinary one in the place of another."""
    p = program
    recipe = dict(p.recipe)
    for field in ("blocks", "lines"):
        values = getattr(p, field)
        if len(values) > 2:
            yield dataclasses.replace(p, **{field: values[: len(values) // 2]})
            yield dataclasses.replace(p, **{field: values[len(values) // 2 :]})
        for place in range(len(values)):
            yield dataclasses.replace(p, **{field: values[:place] + values[place + 1 :]})
    for field, value in plain(p).items():
        if getattr(p, field) != value:
            yield dataclasses.replace(p, **{field: value})
    for key in ("precision", "channels_last", "sync_batch_norm", "fingerprint_every"):
        if recipe.get(key) not in (None, "fp32"):
            yield dataclasses.replace(p, recipe=tuple((k, v) for k, v in p.recipe if k != key))
    if p.count % recipe["global_batch"]:
        yield dataclasses.replace(p, count=max(1, p.count // recipe["global_batch"]) * recipe["global_batch"])
    for place, name in enumerate(p.blocks):
        if name != "linear" and p.kind in "vt" and BLOCKS[name].odd:
            yield dataclasses.replace(p, blocks=(*p.blocks[:place], "linear", *p.blocks[place + 1 :]))


def shrink(program, phases, verdict, seconds=40.0):
    """The smallest program found in so many seconds that ends in the same way."""
    until = time.monotonic() + seconds
    layouts_ = [phases[-1:], phases] if len(phases) > 1 else [phases]
    for tried in layouts_[:-1]:
        if _same(judge(program, tried), verdict):
            phases = tried
    found = True
    while found and time.monotonic() < until:
        found = False
        for candidate in smaller(program):
            if time.monotonic() > until:
                break
            try:
                other = judge(candidate, phases)
            except SyntaxError:
                continue
            if _same(other, verdict):
                program, found = candidate, True
                break
    return program, phases


def _same(other, verdict):
    return (
        other is not None
        and other.what == verdict.what
        and (verdict.what == "differs" or other.said[:40] == verdict.said[:40])
    )


@dataclasses.dataclass
class Tally:
    """The outcomes of many programs."""

    programs: int = 0
    pairs: int = 0
    wrong: int = 0
    outcomes: dict = dataclasses.field(default_factory=lambda: collections.defaultdict(collections.Counter))
    sentences: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    own_errors: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    findings: list = dataclasses.field(default_factory=list)

    def table(self):
        """Outcomes by layout."""
        columns = sorted({what for row in self.outcomes.values() for what in row})
        rows = [f"{'layout':28}" + "".join(f"{what:>10}" for what in columns)]
        for name, row in sorted(self.outcomes.items()):
            rows += [f"{name:28}" + "".join(f"{row[what]:>10}" for what in columns)]
        return "\n".join(rows)


def run_seeds(seeds, pairs=3, tell=lambda *_: None, timeout=25.0, without=()):
    """Runs the programs of some seeds, each on ``single`` and a few layouts.

    A finding counts where it is one in processes that have run nothing before, too.
    """
    tally = Tally()
    with Worlds() as worlds:
        for seed in seeds:
            program = draw(seed, without)
            text = text_of(program)
            tally.programs += 1
            reference = run_trial(text, [SINGLE], timeout, worlds)
            if reference.how == "raised" and reference.own:
                tally.wrong += 1
                tally.own_errors[reference.sentence[:90]] += 1
                tell(seed, "wrong", "", reference.sentence)
                continue
            chosen = layouts(program, pairs)
            if reference.how != "ran":
                verdict = Verdict(reference.how, reference.sentence, reference.traceback)
                _count(tally, program, [SINGLE], verdict, tell)
                chosen = chosen[:1]
            for phases in chosen:
                verdict = _beside(reference, run_trial(text, phases, timeout, worlds), phases)
                if verdict.is_finding:
                    reference = run_trial(text, [SINGLE], timeout)
                    verdict = _beside(reference, run_trial(text, phases, timeout), phases)
                _count(tally, program, phases, verdict, tell)
    return tally


def _beside(reference, ended, phases):
    """The verdict on the last phase; where ``single`` gave no reference, it may be refused, or run."""
    if reference.how == "ran":
        return compare(reference, ended, phases[-1])
    if ended.how == "ran":
        return Verdict("refused", "(single refused) " + ended.sentence)
    return Verdict(ended.how, ended.sentence, ended.traceback)


def _count(tally, program, phases, verdict, tell):
    name = " > ".join(layout.name for layout in phases)
    tally.pairs += 1
    tally.outcomes[phases[-1].name + (" resumed" if len(phases) > 1 else "")][verdict.what] += 1
    if verdict.what == "refused":
        tally.sentences[verdict.said] += 1
    if verdict.is_finding:
        tally.findings.append((program, phases, verdict))
    tell(program.seed, verdict.what, name, verdict.said)


def main(arguments=None):
    """Runs a range of seeds and prints what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.sameness.programs")
    parser.add_argument("--seeds", default="0:20", metavar="A:B", help="programs A to B - 1")
    parser.add_argument("--pairs", type=int, default=3, help="layouts of each program")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds after which a layout hangs")
    parser.add_argument("--seconds", type=float, default=1e9, help="begins no program after so many")
    parser.add_argument("--shrink", type=float, default=0.0, help="seconds to make each finding smaller")
    parser.add_argument("--folder", default="", help="where each finding is written as a script")
    parser.add_argument(
        "--without",
        default="",
        metavar="PART,...",
        help="parts that are not used",
    )
    parser.add_argument("--show", action="store_true", help="print the programs and run none")
    parser.add_argument("--sentences", action="store_true", help="print how often each refusal was said")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    without = {*given.without.split(",")}
    if given.show:
        for program in (draw(seed, without) for seed in seeds):
            print(text_of(program))
            print("#", *([layout.name for layout in phases] for phases in layouts(program, given.pairs)))
        return 0
    begin = time.monotonic()

    def tell(seed, what, name, said):
        if what not in ("equal", "close", "refused", "wrong", "warned"):
            print(f"seed {seed} on {name}: {what}: {said}", flush=True)

    within = itertools.takewhile(lambda _: time.monotonic() - begin < given.seconds, seeds)
    tally = run_seeds(within, given.pairs, tell, given.limit, without)
    print(tally.table())
    minutes = (time.monotonic() - begin) / 60
    print(
        f"{tally.programs} programs ({tally.wrong} wrong in themselves), {tally.pairs} pairs, {len(tally.findings)} "
        f"findings, {tally.pairs / minutes:.0f} pairs a minute"
    )
    if given.sentences:
        for counter in (tally.sentences, tally.own_errors):
            print(*(f"{count:5}  {said}" for said, count in counter.most_common()), sep="\n")
    for program, phases, verdict in tally.findings:
        found = program
        if given.shrink:
            found, phases = shrink(program, phases, verdict, given.shrink)
        name = " > ".join(layout.name for layout in phases)
        print(f"{program.seed} on {name}: {verdict.what}: {_summary(found)}")
        written = f"# seed {program.seed} on {name}: {verdict.what}: {verdict.said}\n" + script(
            text_of(found), phases[-1]
        )
        if given.folder:
            file = folder_of(given.folder) / f"{program.seed}-{name.replace(' ', '_').replace('/', '-')}.py"
            file.write_text(written + "\n" + textwrap.indent(verdict.traceback, "# "))
        else:
            print("\n" + written + textwrap.indent(verdict.traceback, "# "))
    return 1 if tally.findings else 0


def _summary(p):
    """The parts of a program that are not the ordinary ones, in a line."""
    ordinary = {
        "sequential",
        "tensors",
        "mean",
        "per_token",
        "sgd",
        "all",
        "none",
        "no_scheduler",
        "no_average",
    }
    fields = (
        p.shape,
        *p.blocks,
        p.data,
        p.loss,
        p.optimizer,
        p.group,
        p.scheduler,
        p.average,
        *p.lines,
        p.end,
    )
    return ", ".join(
        [
            *(each for each in fields if each not in ordinary),
            *(f"{k}={v}" for k, v in p.recipe if k != "seed"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
