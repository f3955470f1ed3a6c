"""docs/strategies: every strategy has its row, and its commands are sound as they stand."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from lockstep.cli.command_line import _parser
from lockstep.cli.train import overrides, resolve_devices
from lockstep.config.job_file import BUILT_IN_JOBS, load_job
from lockstep.config.strategy_options import STRATEGIES
from lockstep.core.mesh import HYBRIDS
from lockstep.run import RunOptions

FOLDER = Path(__file__).parents[2] / "docs" / "strategies"
PAGES = sorted(FOLDER.glob("*.md"))
PAGE = FOLDER / "README.md"


def commands(kind):
    """Every line of the pages that begins with ``kind``, without its comment."""
    lines = [line.strip() for page in PAGES for line in page.read_text().splitlines()]
    return sorted({line.partition("   ")[0] for line in lines if line.startswith(kind)})


def table(title):
    """The cells of the rows under a heading, by the plain text of the first."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {re.sub(r"\]\(.*?\)|[`\[\]]", "", cells[0]): cells for cells in rows}


def test_every_strategy_has_a_row():
    assert sorted(table("All of them")) == sorted(STRATEGIES)


def test_every_page_is_linked_and_no_link_is_dead():
    links = {(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+?)\)", page.read_text())}
    assert [link for page, link in links if not (page.parent / link).exists()] == []
    assert {page.name for page in PAGES} - {link for page, link in links if page == PAGE} == {PAGE.name}


def test_every_mesh_there_is_has_a_command():
    found = {tuple(re.findall(r"(\w+)=\d", command.partition("--mesh ")[2])) for command in commands("lockstep train")}
    assert set(HYBRIDS) <= found


@pytest.mark.parametrize("command", commands("lockstep train"))
def test_a_command_to_train_is_a_job_that_breaks_no_rule(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "JOB.toml").write_text((BUILT_IN_JOBS / "digits.toml").read_text())
    words = shlex.split(command)[1:]
    arguments = _parser(words).parse_args(words)
    job = load_job(arguments.job, overrides(arguments))
    assert resolve_devices(job).count and job.run.devices == int(arguments.devices)
    assert job.training.strategy == arguments.strategy


@pytest.mark.parametrize("command", commands("lockstep verify"))
def test_another_command_has_the_options_that_the_tool_has(command):
    words = shlex.split(command)[1:]
    assert _parser(words).parse_args(words).strategies


@pytest.mark.parametrize("line", commands("lockstep.init("))
def test_a_call_of_init_has_options_that_there_are(line):
    (statement,) = ast.parse(line).body
    given = {word.arg: ast.literal_eval(word.value) for word in statement.value.keywords}
    options = RunOptions.of(**{"global_batch": 64, "micro_batches": 8, **given})
    assert options.strategy == given["strategy"]
