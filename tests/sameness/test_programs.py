"""The generator of programs itself, and programs that are equal or refused in every layout."""

import dataclasses

import pytest
from tests.sameness import programs
from tests.sameness.drawing import BETWEEN, SINGLE, draw, layouts, plain_program, text_of
from tests.sameness.parts import BLOCKS, DATA, ENDS, GROUPS, HELPERS, LINES, LOSSES, OPTIMIZERS, SHAPES
from tests.sameness.programs import Verdict, compare, run_seeds, shrink
from tests.sameness.trials import Ended, Layout, run_trial, script

DDP = Layout("ddp 2", 2, {"strategy": "ddp"})
PLAIN = plain_program()


def finding_text(tally):
    return "\n\n".join(
        f"seed {program.seed} on {[layout.name for layout in phases]}: {verdict.what}: {verdict.said}\n"
        + script(text_of(program), phases[-1])
        + verdict.traceback
        for program, phases, verdict in tally.findings
    )


def test_a_seed_always_gives_the_same_source():
    texts = {seed: text_of(draw(seed)) for seed in range(200)}
    assert {seed: text_of(draw(seed)) for seed in range(200)} == texts
    assert len(set(texts.values())) == 200
    for text in texts.values():
        compile(text, "program.py", "exec")


@pytest.mark.parametrize(
    ("field", "table"),
    [
        ("data", DATA),
        ("loss", LOSSES),
        ("optimizer", OPTIMIZERS),
        ("group", GROUPS),
        ("end", ENDS),
        ("shape", SHAPES),
        ("between", BETWEEN),
        ("saves", ("start", "step")),
    ],
)
def test_every_part_makes_a_source(field, table):
    for name in table:
        program = dataclasses.replace(PLAIN, **{field: name})
        compile(text_of(program), "program.py", "exec")


def test_every_block_and_line_makes_a_source():
    for name in BLOCKS:
        text = text_of(dataclasses.replace(PLAIN, blocks=(name,)))
        compile(text, "program.py", "exec")
        for helper in HELPERS.values():
            assert (helper.defined in text) == (helper.source in text)
    for name in LINES:
        compile(text_of(dataclasses.replace(PLAIN, lines=(name,))), "program.py", "exec")


def test_layouts_are_filled_by_the_micro_batches():
    for seed in range(200):
        program = draw(seed)
        recipe = dict(program.recipe)
        k, shards = recipe["micro_batches"], recipe.get("tensor", {}).get("shards", 0)
        for phases in layouts(program):
            assert all(
                layout.ranks <= max(k, 4, shards) and ("pipeline" not in layout.name or layout.ranks <= k)
                for layout in phases
            )


@pytest.mark.parametrize(
    ("found", "what"),
    [
        ([{"loss": "1", "fingerprint": "a"}, {"loss": "1", "fingerprint": "a"}], "equal"),
        ([{"loss": "1", "fingerprint": "b"}, {"loss": "1", "fingerprint": "b"}], "differs"),
        ([{"loss": "1", "fingerprint": "a"}, {"loss": "2", "fingerprint": "a"}], "differs"),
        ([{"loss": "1"}, {"loss": "1"}], "differs"),
        ([{"loss": "1", "fingerprint": "a", "more": 1}, {"loss": "1", "fingerprint": "a"}], "differs"),
    ],
)
def test_every_value_of_every_rank_counts(found, what):
    reference = Ended("ran", [{"loss": "1", "fingerprint": "a"}])
    assert compare(reference, Ended("ran", found), DDP).what == what


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ("found (0 entries, was 2 entries)", "differs"),
        ("found (0 entries, was 2 entries), x (0, was 1)", "warned"),
    ],
)
def test_a_resumed_run_that_names_what_it_has_lost_is_no_finding(named, what):
    """Beside what the program itself collects."""
    said = f"The loop goes on to read variables that are not what they were at the checkpoint: {named}. What depends"
    ended = Ended("ran", [{"loss": "2"}], warnings=(said,))
    verdict = compare(Ended("ran", [{"loss": "1"}]), ended, DDP)
    assert (verdict.what, verdict.is_finding) == (what, what == "differs")


def test_a_program_may_be_stopped_twice_in_any_layout():
    found = [phases for seed in range(200) for phases in layouts(draw(seed)) if len(phases) > 1]
    assert {len(phases) for phases in found} == {2, 3}
    assert all(phases[0].stop < phases[1].stop for phases in found if len(phases) == 3)
    assert {"single", "fsdp 2", "server 2/1"} <= {layout.name for phases in found for layout in phases[:-1]}


def test_what_is_neither_equal_nor_refused_is_a_finding():
    reference = Ended("ran", [{}])
    for how, finding in (("hung", True), ("raised", True), ("refused", False)):
        assert compare(reference, Ended(how, message="said"), DDP).is_finding == finding


def test_a_finding_is_made_smaller_as_long_as_it_ends_as_before(monkeypatch):
    def judged(program, phases, timeout=0, reference=None):
        bad = "counter" in program.blocks and "clip" in program.lines
        return Verdict("differs" if bad else "equal")

    monkeypatch.setattr(programs, "judge", judged)
    large = dataclasses.replace(
        PLAIN,
        blocks=("linear", "counter", "relu", "dropout"),
        lines=("clip", "draw", "evaluate"),
        optimizer="adam",
        epochs=2,
    )
    small, _ = shrink(large, [DDP], Verdict("differs"))
    assert (small.blocks, small.lines, small.optimizer, small.epochs) == (("counter",), ("clip",), "sgd", 1)


def test_a_program_ends_as_it_should_and_an_error_of_its_own_is_told_apart():
    ends = {}
    for name, lines in {
        "plain": "",
        "own": "raise KeyError('mine')",
        "refused": "run.prepare(model)",
    }.items():
        text = text_of(PLAIN).replace("    trained = model\n", f"    trained = model\n    {lines}\n")
        ended = run_trial(text, [SINGLE])
        ends[name] = ended.how, ended.own
    assert ends == {"plain": ("ran", False), "own": ("raised", True), "refused": ("refused", False)}


def test_a_rank_that_waits_for_one_that_was_refused_is_not_waited_for():
    text = text_of(PLAIN).replace("    trained = model\n", "    trained = model\n    run.rank = run.world.rank\n")
    text = text.replace("            steps += 1", "            if run.rank == 1:\n                run.prepare(model)")
    assert run_trial(text, [DDP]).how == "refused"


@pytest.mark.timeout(120)
def test_random_programs_are_equal_or_refused():
    tally = run_seeds(range(3_000, 3_001), pairs=2)
    assert not tally.findings, finding_text(tally)
    assert tally.wrong <= 1
    assert sum(row["equal"] for row in tally.outcomes.values()) >= 1


def test_seeds_of_the_long_run(pytestconfig):
    first, _, last = pytestconfig.getoption("--programs").partition(":")
    assert int(first) < int(last)


@pytest.mark.slow
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("part", range(20))
def test_many_random_programs_are_equal_or_refused(part, pytestconfig):
    """--programs A:B says which seeds; each of the 20 tests takes its twentieth."""
    first, last = map(int, pytestconfig.getoption("--programs").split(":"))
    seeds = range(first, last)[part::20]
    tally = run_seeds(seeds, pairs=3)
    assert not tally.findings, finding_text(tally)
    assert tally.wrong <= len(seeds) * 0.1, tally.own_errors
