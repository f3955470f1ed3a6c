"""Entries are put into an editor's settings; nothing else of the file changes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.debug import merge, merge_into, parse
from lockstep.errors import ConfigError

ENTRY = {"name": "ours", "type": "debugpy", "args": ["--lr", "0.1"]}
COMMENTED = """\
{
    // Use IntelliSense to learn about possible attributes.
    "version": "0.2.0",
    "configurations": [
        {
            "name": "mine", /* not // a line */ "url": "http://localhost/*",
        }, // the last one
    ],
}
"""


def put(text, entry=ENTRY):
    return merge(text, "configurations", "name", [entry])


def test_a_new_file_is_made_with_its_folder(tmp_path):
    path = tmp_path / ".vscode" / "launch.json"
    assert merge_into(path, "configurations", "name", [ENTRY], "0.2.0")
    assert json.loads(path.read_text()) == {"version": "0.2.0", "configurations": [ENTRY]}
    assert list(path.parent.iterdir()) == [path]


def test_writing_the_same_again_changes_nothing(tmp_path):
    path = tmp_path / "launch.json"
    merge_into(path, "configurations", "name", [ENTRY], "0.2.0")
    before = path.stat()
    assert not merge_into(path, "configurations", "name", [ENTRY], "0.2.0")
    assert path.stat() == before


def test_comments_and_trailing_commas_of_the_user_stay():
    merged = put(COMMENTED)
    for line in COMMENTED.splitlines():
        assert line.rstrip(",") in merged
    assert parse(merged)["configurations"] == [{"name": "mine", "url": "http://localhost/*"}, ENTRY]


def test_an_entry_of_the_same_name_is_replaced_where_it_stands():
    text = '{"configurations": [{"name": "ours", "old": [1,],}, {"name": "mine"}]}'
    assert parse(put(text)) == {"configurations": [ENTRY, {"name": "mine"}]}


@pytest.mark.parametrize("text", ["{}", "// nothing yet\n{ }", '{"version": "0.2.0"}', '{"inputs": [],}'])
def test_a_file_without_the_list_gets_one(text):
    assert parse(put(text)) == {**parse(text), "configurations": [ENTRY]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"configurations": [', "Cannot add 1 configuration to "),
        ('{"configurations": {}}', "is not an object whose 'configurations' is a list"),
        ("[1, 2]", "is not an object"),
        ('{"configurations": [{"name": "ours", // mine\n "old": 1}]}', "has a comment in it"),
        ("[" * 5000 + "]" * 5000, "64 deep"),
        (b"\xff\xfe\x00", "cannot be read as text"),
        ("{}" + " " * (1 << 20), "larger than 1 MiB"),
    ],
)
def test_what_cannot_be_merged_is_refused_and_left_as_it_is(tmp_path, content, said):
    path = tmp_path / "launch.json"
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        merge_into(path, "configurations", "name", [ENTRY], "0.2.0")
    assert path.read_bytes() == data


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / ".vscode").write_text("a file")
    with pytest.raises(ConfigError, match=r"launch\.json cannot be (read|written)"):
        merge_into(tmp_path / ".vscode" / "launch.json", "configurations", "name", [ENTRY], "0.2.0")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMED = st.builds(
    lambda name, rest: {**rest, "name": name},
    st.sampled_from(["ours", "a", "b"]),
    VALUES.map(lambda value: {"value": value}),
)


@given(
    st.dictionaries(st.text(), VALUES, max_size=3),
    st.lists(NAMED, max_size=4, unique_by=lambda entry: entry["name"]),
    st.sampled_from([None, 0, 2]),
    st.sampled_from(["", '// a comment "{[\n', "/* , ] } */"]),
)
def test_any_file_keeps_what_it_holds(others, entries, indent, comment):
    content = {**others, "configurations": entries}
    text = comment + json.dumps(content, indent=indent) + comment
    merged = put(text)
    rest = [entry for entry in entries if entry["name"] != "ours"]
    found = parse(merged)
    assert ENTRY in found["configurations"]
    assert [entry for entry in found["configurations"] if entry["name"] != "ours"] == rest
    assert {**found, "configurations": []} == {**content, "configurations": []}
    assert merged.startswith(comment)
    assert merged.endswith(comment)
