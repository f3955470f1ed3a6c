"""Thousands of damaged job files: each is a job or a ``ConfigError``, never anything else."""

import random
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.job.config import JobConfig
from lockstep.job.config_file import BUILT_IN_JOBS, load_job
from lockstep.job.config_overrides import apply_overrides, parse_set
from lockstep.job.config_reader import read_table

SOURCES = [path.read_text() for path in sorted(BUILT_IN_JOBS.glob("*.toml"))]
SPARE = [
    "[", "]", "{", "}", "=", '"', "'", '"""', "#", "\n", ",", ".", "[[data]]", "[model.x]", "target",
    "{data}", "{seed}", "-1", "0", "1e999", "nan", "9" * 30, "1979-05-27", "''", "[]", "{}", "\\u0000",
    "é", "[run]\ndevices = 1\n", "x = [1, {y = 2}]\n", "../..", "a:b", "micro_batches = 7\n", "epochs = 0\n",
]  # fmt: skip
ROUNDS = 2000


def damaged(text, rng):
    """The text after one to four random changes."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.randrange(12))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + rng.choice(SPARE) + text[at:]
        elif kind == 2:
            text = text[:at] + rng.choice(SPARE) + text[to:]
        elif kind == 3:
            text = text[:at] + rng.choice(string.printable) + text[to:]
        else:
            lines = text.splitlines(keepends=True) or [""]
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[one] = rng.choice(
                [lines[other], "", lines[one].replace(" = ", rng.choice(["=", " ", " = ["]))]
            )
            text = "".join(lines)
    return text


def test_two_thousand_damaged_job_files_give_a_job_or_a_config_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(20261120)
    path, jobs, refused = tmp_path / "job.toml", 0, 0
    for number in range(ROUNDS):
        text = damaged(rng.choice(SOURCES), rng)
        path.write_bytes(text.encode(errors="replace"))
        try:
            config = load_job(str(path), imports=number % 20 == 0)
        except ConfigError as error:
            refused += 1
            assert str(path) in str(error), text
        else:
            jobs += 1
            assert JobConfig.from_json(config.to_json()) == config
    assert jobs > ROUNDS // 50
    assert refused > ROUNDS // 2


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.sampled_from(
    ["model", "data", "loss", "optimizer", "schedule", "training", "run", "weights", "job"]
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(SECTIONS, VALUES, max_size=6))
def test_any_table_is_a_job_or_a_list_of_problems(table):
    config, problems = read_table(JobConfig, table)
    assert (config is None) == bool(problems)
    assert all(problem.text for problem in problems)


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=30))
def test_any_option_is_an_override_or_a_config_error(text):
    try:
        override = parse_set(text)
    except ConfigError:
        return
    apply_overrides({"model": {"target": "a:b", "sizes": [1, 2]}}, [override])
