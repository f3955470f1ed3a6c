"""Values that are ranks, conditions that test one, and the lines that one rank reaches."""

import ast

import pytest

from lockstep.lint.ranks import (
    FIRST,
    GLOBAL,
    LOCAL,
    OTHERS,
    on_one_rank,
    proved_rank,
    rank_kind,
    rank_test,
    runs_on_ranks,
)
from lockstep.lint.script import Script

IMPORTS = "import os\nimport torch.distributed as dist\n"


def last_value(text):
    """The script and the value of its last statement."""
    script = Script(IMPORTS + text)
    return script, script.tree.body[-1].value


@pytest.mark.parametrize(
    ("text", "proved", "kind"),
    [
        ("x = dist.get_rank()", GLOBAL, GLOBAL),
        ("x = dist.get_rank(group)", "", GLOBAL),
        ("x = int(os.environ['LOCAL_RANK'])", LOCAL, LOCAL),
        ("x = int(os.getenv('SLURM_PROCID', 0))", GLOBAL, GLOBAL),
        ("r = dist.get_rank()\nx = r", GLOBAL, GLOBAL),
        ("x = args.local_rank", "", LOCAL),
        ("x = rank % 8", "", LOCAL),
        ("x = config['rank']", "", GLOBAL),
        ("x = gpu", "", ""),
    ],
)
def test_a_value_is_proved_to_be_a_rank_or_called_one(text, proved, kind):
    script, value = last_value(text)
    assert (proved_rank(script, value), rank_kind(script, value)) == (proved, kind)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank == 0", FIRST),
        ("rank != 0", OTHERS),
        ("rank", OTHERS),
        ("not rank", FIRST),
        ("rank > 0", OTHERS),
        ("rank < 1", FIRST),
        ("rank in (-1, 0)", FIRST),
        ("rank in (0, 1)", ""),
        ("is_main_process()", FIRST),
        ("not is_main_process()", OTHERS),
        ("rank == 0 and step % 10 == 0", FIRST),
        ("rank != 0 or done", ""),
        ("step == 0", ""),
    ],
)
def test_a_condition_lets_one_rank_or_the_others_through(text, expected):
    assert rank_test(*last_value(f"x = {text}")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("if rank == 0:\n    save()", True),
        ("if rank == 0:\n    pass\nelse:\n    save()", False),
        ("def f():\n    if rank != 0:\n        return\n    save()", True),
        ("def f():\n    save()\nif rank == 0:\n    f()", True),
        ("def f():\n    save()\nif rank == 0:\n    f()\nf()", False),
        ("@rank_zero_only\ndef f():\n    save()", True),
        ("rank == 0 and save()", True),
        ("save()", False),
    ],
)
def test_a_line_is_reached_by_one_rank_only(text, expected):
    script = Script(IMPORTS + text)
    (call,) = [call for call in script.calls if script.name(call) == "save"]
    assert on_one_rank(script, call) is expected


def test_a_parent_that_spawns_is_no_rank():
    script = Script("def work(rank):\n    step()\ndef step():\n    inside()\nspawn(work, nprocs=2)\noutside()\n")
    calls = {script.name(call): call for call in script.calls}
    assert runs_on_ranks(script, calls["inside"])
    assert not runs_on_ranks(script, calls["outside"])
    assert isinstance(script.scope(calls["outside"]), ast.Module)
