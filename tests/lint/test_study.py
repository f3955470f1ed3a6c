"""The study in the documents adds up: scripts, findings and wrong ones, in each table."""

import re
from pathlib import Path

import pytest

from lockstep.lint import RULES

TEXT = (Path(__file__).parents[2] / "docs" / "lint-study.md").read_text()
TITLES = re.findall(r"^## The (\w+) set$", TEXT, flags=re.MULTILINE)


def rows(title):
    part = TEXT.partition(f"## The {title} set\n")[2].partition("\n## ")[0]
    return [line.split(" | ") for line in part.splitlines() if re.match(r"\| \S+/\S+ \|", line)]


def counted(title):
    cells = " ".join(row[3] for row in rows(title))
    return len(re.findall(r"LS\d{3}:\d+", cells)), cells.count("wrong")


def stated(title):
    row = re.search(
        rf"^\| {title} \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) % \| \d+ of \d+ \|$", TEXT, flags=re.MULTILINE
    )
    return [float(word) for word in row.groups()]


@pytest.mark.parametrize("title", TITLES)
def test_the_numbers_of_a_set_are_those_of_its_table(title):
    findings, wrong = counted(title)
    assert stated(title) == [len(rows(title)), findings, wrong, round(100 * wrong / findings, 1)]
    assert len(rows(title)) == 30
    assert all(re.fullmatch(r"[0-9a-f]{12}", row[2]) for row in rows(title))


def test_the_sum_is_the_sum_of_the_sets_and_below_a_tenth():
    scripts, findings, wrong, rate = stated("all")
    parts = [counted(title) for title in TITLES]
    assert [findings, wrong] == [sum(column) for column in zip(*parts)]
    assert scripts == 30 * len(TITLES)
    assert rate == round(100 * wrong / findings, 1) < 10


def test_every_wrong_finding_has_its_reason():
    reasons = re.findall(r"^\| (\S+) \| (LS\d{3}:\d+) \| \S", TEXT, flags=re.MULTILINE)
    marked = [
        (row[0].removeprefix("| "), place)
        for title in TITLES
        for row in rows(title)
        for place in re.findall(r"\*\*(LS\d{3}:\d+) wrong\*\*", row[3])
    ]
    assert sorted(reasons) == sorted(marked)


def test_every_rule_of_the_study_is_a_rule():
    assert set(re.findall(r"LS\d{3}", TEXT)) <= {rule.number for rule in RULES}
