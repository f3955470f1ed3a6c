"""The harness of ``benchmarks/``, with sides that need no torch."""

import sys
import textwrap
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

STEPPER = """
    import sys
    from pathlib import Path
    from harness.gate import Gate

    control, log, name = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    gate = Gate(control, rank=0)
    with log.open("a") as written:
        while True:
            written.write(name)
            written.flush()
            if not gate.step_done():
                break
"""


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "harness"]:
        del sys.modules[name]


@pytest.fixture
def stepper(tmp_path):
    script = tmp_path / "stepper.py"
    script.write_text(textwrap.dedent(STEPPER))
    return script


def test_sides_run_rounds_of_equal_length_in_turn(harness, stepper, tmp_path):
    from harness.sides import running

    log = tmp_path / "log"
    commands = {
        name: lambda control, name=name: [sys.executable, str(stepper), str(control), str(log), name] for name in "AB"
    }
    with running(commands, processes=1) as sides:
        for _ in range(2):
            for side in sides:
                assert side.round(warm_up=1, steps=3) > 0
    assert log.read_text() == "AAAABBBB" * 2


def test_a_side_that_ends_early_shows_what_it_printed(harness, tmp_path):
    from harness.sides import SideError, running

    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such data')")
    with (
        pytest.raises(SideError, match=r"ended with status 1 before training(.|\n)*no such data"),
        running({"A": lambda control: [sys.executable, str(script)]}, processes=1),
    ):
        pass


def test_a_side_that_dies_in_a_round_is_named(harness, tmp_path):
    from harness.sides import SideError, running

    script = tmp_path / "dying.py"
    script.write_text(
        "import sys; from pathlib import Path; from harness.gate import Gate; Gate(Path(sys.argv[1]), rank=0)"
    )
    with (
        pytest.raises(SideError, match="Side 'A' lost a rank"),
        running({"A": lambda control: [sys.executable, str(script), str(control)]}, processes=1) as sides,
    ):
        sides[0].round(warm_up=0, steps=1)


def test_a_ratio_is_taken_within_each_alternation(harness):
    from harness.spread import ratios

    spread = ratios([1.0, 20.0, 3.0, 4.0, 5.0], [2.0, 40.0, 6.0, 4.0, 10.0])
    assert spread.median == 0.5
    assert spread.text() == "0.50 (0.50–0.50; 0.50–1.00)"
