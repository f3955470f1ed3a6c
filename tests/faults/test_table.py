"""docs/faults.md says what the tests hold, and every fault has a test or a reason."""

from tests.faults.matrix import ROWS
from tests.faults.table import PAGE, markers, render


def test_the_page_is_what_the_tests_hold():
    assert PAGE.read_text() == render(markers()), "write it again: python -m tests.faults.table"


def test_every_row_has_a_test_or_a_reason():
    found = markers()
    bare = [row.number for row in ROWS if row.number not in found and not row.open]
    assert not bare, f"neither a test nor a reason: {bare}"


def test_every_marker_names_a_row():
    unknown = set(markers()) - {row.number for row in ROWS}
    assert not unknown


def test_the_numbers_are_distinct():
    assert len({row.number for row in ROWS}) == len(ROWS)


def test_a_marker_on_a_single_parameter_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.faults.table.ROOT", tmp_path)
    (tmp_path / "test_some.py").write_text(
        "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.fault('P1'))])\n"
        "@pytest.mark.fault('P2', 'P3')\n"
        "def test_it(n): pass\n\n"
        "def test_other(): pass\n"
    )
    assert markers(tmp_path) == {number: [("test_some.py", "test_it")] for number in ("P1", "P2", "P3")}
