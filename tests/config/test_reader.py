"""The line of a key of a TOML text."""

import tomllib

import pytest

from lockstep.config.reader import line_of

TEXT = '''\
top = 1 # a comment with = and [
[a]
"quoted key" = """
b = 2
[not.a.table]
"""
c.d = 'x = # ]'

[a.e] # comment
list = [ # first
    1, "], }",
    { f = 1, g.h = [2,
       3] },
]

[[many]]
x = 1
[[many]]
x = 2
[many.inner]
y = "\\"="
date = 1979-05-27T07:32:00Z
'''

EXPECTED = {
    ("top",): 1,
    ("a",): 2,
    ("a", "quoted key"): 3,
    ("a", "c"): 7,
    ("a", "c", "d"): 7,
    ("a", "e"): 9,
    ("a", "e", "list"): 10,
    ("a", "e", "list", 0): 11,
    ("a", "e", "list", 1): 11,
    ("a", "e", "list", 2): 12,
    ("a", "e", "list", 2, "f"): 12,
    ("a", "e", "list", 2, "g"): 12,
    ("a", "e", "list", 2, "g", "h"): 12,
    ("a", "e", "list", 2, "g", "h", 0): 12,
    ("a", "e", "list", 2, "g", "h", 1): 13,
    ("many",): 16,
    ("many", 0): 16,
    ("many", 0, "x"): 17,
    ("many", 1): 18,
    ("many", 1, "x"): 19,
    ("many", 1, "inner"): 20,
    ("many", 1, "inner", "y"): 21,
    ("many", 1, "inner", "date"): 22,
}


def test_every_key_has_its_line():
    assert {path: line_of(path, TEXT) for path in paths_of(tomllib.loads(TEXT))} == EXPECTED


def test_a_missing_key_is_given_the_line_of_the_table_around_it():
    assert line_of(("a", "e", "none", 3), TEXT) == 9
    assert line_of(("none",), TEXT) is None


@pytest.mark.parametrize("text", ["", "[", "=", "a", "a = ", 'a = "', "[[", "a = {", "a = [[[", "] = 1", '"""'])
def test_text_that_is_not_toml_has_no_lines(text):
    assert line_of(("key",), text) is None


def paths_of(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield (*path, key)
            yield from paths_of(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield (*path, number)
            yield from paths_of(item, (*path, number))


def test_every_key_of_the_built_in_jobs_is_found_on_a_line_that_names_it():
    from lockstep.config.job_file import BUILT_IN_JOBS

    for file in BUILT_IN_JOBS.glob("*.toml"):
        text = file.read_text()
        for path in paths_of(tomllib.loads(text)):
            if isinstance(path[-1], str):
                assert path[-1] in text.splitlines()[line_of(path, text) - 1]
