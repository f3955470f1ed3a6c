"""Any table and any option is a job or a ``ConfigError``, never anything else; damaged files are in tests/fuzz."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.config.job import JobConfig
from lockstep.config.job_file import apply_overrides, parse_set
from lockstep.config.reader import read_table
from lockstep.errors import ConfigError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.sampled_from(["model", "data", "loss", "optimizer", "schedule", "training", "run", "weights", "job"])


@settings(max_examples=300)
@given(st.dictionaries(SECTIONS, VALUES, max_size=6))
def test_any_table_is_a_job_or_a_list_of_problems(table):
    config, problems = read_table(JobConfig, table)
    assert (config is None) == bool(problems)
    assert all(problem.text for problem in problems)


@settings(max_examples=300)
@given(st.text(max_size=30))
def test_any_option_is_an_override_or_a_config_error(text):
    try:
        override = parse_set(text)
    except ConfigError:
        return
    apply_overrides({"model": {"target": "a:b", "sizes": [1, 2]}}, [override])
