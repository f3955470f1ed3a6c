"""A run hangs, real processes: the report names the rank and the line, within three limits, and nothing stays."""

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 2.0
LOOP, PLAIN = HERE / "hanging_loop.py", HERE / "plain_loop.py"


def line_of(script, text):
    return next(n for n, line in enumerate(script.read_text().splitlines(), 1) if text in line)


def hang(command, script, *arguments):
    """The lines of the report of a run that hangs; asserts the exit code and that nothing is left."""
    command.start(script, *arguments, options=("--stall-limit", str(LIMIT)))
    code, lines = command.end()
    assert code == 5, lines
    lines = [line for line in lines if "Warning" not in line]
    start = next(n for n, line in enumerate(lines) if line.startswith("Stalled"))
    assert len(lines[start:]) <= 25
    command.wait_until_nothing_runs()
    return lines[start:]


def silence(lines):
    return float(lines[0].split("no progress for ")[1].split()[0])


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.fault("P10", "D3")
def test_a_rank_stuck_in_its_loader_is_named_with_the_line_of_the_data_set(command, workers):
    lines = hang(command, LOOP, "loader", workers)
    line = line_of(LOOP, "# stuck here")
    assert "the others wait for rank " in lines[0]
    assert f"data at {LOOP}:{line}, in __getitem__: `NEVER.wait()" in lines[0]
    assert silence(lines) <= 3 * LIMIT


@pytest.mark.parametrize("exchange", ["memory", pytest.param("collectives", marks=pytest.mark.slow)])
@pytest.mark.fault("P10", "C1")
def test_a_collective_under_a_rank_condition_is_named(command, exchange):
    lines = hang(command, LOOP, "condition", 0, exchange)
    assert f"rank 0 waits in another collective than the others at {LOOP}:{line_of(LOOP, '# only rank 0')}" in lines[0]
    assert silence(lines) <= 3 * LIMIT


@pytest.mark.parametrize("kind", ["stopped", "stopped with its parent"])
@pytest.mark.slow
@pytest.mark.fault("P12")
def test_a_stopped_process_is_named(command, kind):
    lines = hang(command, LOOP, kind)
    assert "rank 1 is stopped by a signal, in step 3, update" in lines[0]
    assert silence(lines) <= 3 * LIMIT


@pytest.mark.fault("C1", "C2")
@pytest.mark.slow
def test_ranks_in_different_collectives_are_shown_with_what_they_called(command):
    lines = hang(command, LOOP, "mismatch")
    assert "in another collective than the others" in lines[0]
    called = [line.strip() for line in lines if " called #" in line]
    assert [line.partition(" called")[0] for line in called] == ["rank 0", "rank 1", "rank 2"]
    assert "all_reduce [4]" in called[0]
    assert "all_gather [4]" in called[1]
    assert "all_gather [9]" in called[2]


@pytest.mark.fault("P10")
@pytest.mark.slow
def test_a_plain_script_is_explained_too(command):
    lines = hang(command, PLAIN)
    line = line_of(PLAIN, "# never comes")
    assert f"the others wait for rank 1, which is in start at {PLAIN}:{line}" in lines[0]


@pytest.mark.slow
def test_everything_that_was_seen_is_kept(command):
    lines = hang(command, LOOP, "condition")
    bundle = Path(lines[-1].partition(": ")[2])
    found = json.loads(bundle.read_text())
    assert (found["kind"], found["culprits"]) == ("mismatch", [0])
    assert [rank["step"] for rank in found["ranks"]] == [3, 4, 4]
    assert any(str(LOOP) in frame for frame in found["ranks"][1]["stack"])
