"""A rank is killed, preempted or stuck in each phase of a run, with real processes."""

import time
from pathlib import Path

import pytest
from tests.launch.command import Command

SCRIPT = Path(__file__).with_name("phased_training.py")
LONG_EVALUATION = SCRIPT.with_name("long_evaluation.py")
SLOW = pytest.mark.slow
SAVED = "Saved in {}. Continue with the same command and --resume auto, in a script with resume='auto'."
PREEMPTED = "Preempted: {} ranks stopped at step {}. Exit code 75."


@pytest.fixture
def command(tmp_path):
    one = Command(tmp_path)
    yield one
    one.clean_up()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The output of a run on one process that nothing happens to."""
    one = Command(tmp_path_factory.mktemp("undisturbed"))
    assert one.start(SCRIPT, one.folder, devices="cpu:1").end() == (0, [])
    return one.stdout


@pytest.mark.fault("P2")
@pytest.mark.parametrize(
    "phase",
    [
        "evaluate",
        pytest.param("data", marks=SLOW),
        pytest.param("save", marks=SLOW),
        pytest.param("prepare", marks=SLOW),
    ],
)
def test_a_rank_killed_in_any_phase_ends_all_and_is_named_with_it(command, phase):
    step = -1 if phase == "prepare" else 2
    code, lines = command.start(SCRIPT, command.folder, f"1:{phase}:{step}:killed", devices="cpu:2").end()
    assert time.monotonic() - float((command.folder / "disturbed").read_text()) < 5
    assert code == 4
    place = phase if phase == "prepare" else f"step {3 if phase != 'data' else 2}, {phase}"
    assert lines[0].startswith(f"rank 1 killed by SIGKILL, {place} (")
    assert len(lines) <= 15
    command.wait_until_nothing_runs()


@SLOW
@pytest.mark.fault("P7", "P5")
@pytest.mark.parametrize("phase", ["evaluate", "data", "save", "prepare"])
def test_a_request_to_stop_in_any_phase_is_kept_and_nothing_is_lost(command, undisturbed, phase):
    step = -1 if phase == "prepare" else 2
    code, lines = command.start(SCRIPT, command.folder, f"1:{phase}:{step}:preempted", devices="cpu:2").end()
    stopped = {"prepare": 1, "data": 3}.get(phase, 4)
    saved = command.folder / "run" / f"step-{stopped:08}"
    assert (code, lines) == (75, [SAVED.format(saved), PREEMPTED.format(2, stopped)])
    assert saved.exists()
    assert command.start(SCRIPT, command.folder, devices="cpu:2").end()[0] == 0
    assert command.stdout == undisturbed


@pytest.mark.fault("P7", "P5")
@pytest.mark.slow
def test_a_long_evaluation_is_left_within_seconds_and_done_again(command, tmp_path):
    (tmp_path / "undisturbed").mkdir()
    one = Command(tmp_path / "undisturbed")
    assert one.start(LONG_EVALUATION, one.folder, devices="cpu:1").end() == (0, [])
    code, lines = command.start(LONG_EVALUATION, command.folder, "slow", devices="cpu:4").end()
    assert time.monotonic() - float((command.folder / "disturbed").read_text()) < 8, "the evaluation takes 20 s"
    assert (code, lines) == (
        75,
        [SAVED.format(command.folder / "run/step-00000040"), PREEMPTED.format(4, 40)],
    )
    before = command.stdout
    assert command.start(LONG_EVALUATION, command.folder, devices="cpu:2").end()[0] == 0
    assert before + command.stdout == one.stdout
    assert before.count("epoch") == command.stdout.count("epoch") == 1
    command.wait_until_nothing_runs()


@SLOW
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        pytest.param("0:save:2:hung", "threading.Event().wait()", marks=pytest.mark.fault("K10")),
        pytest.param("1:data:2:holding", "ctypes.PyDLL(None).sleep(600)", marks=pytest.mark.fault("P12")),
    ],
    ids=["while it saves", "with the interpreter's lock held"],
)
def test_a_rank_that_hangs_is_named_with_its_line(command, fault, line):
    command.start(SCRIPT, command.folder, fault, devices="cpu:2", options=("--stall-limit", "0.5"))
    code, lines = command.end()
    assert code == 5
    number = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if line in text)
    report = next(text for text in lines if text.startswith("Stalled"))
    rank, phase = fault.split(":")[:2]
    assert f"rank {rank}" in report
    assert phase in report
    assert f"{SCRIPT}:{number}" in report
    command.wait_until_nothing_runs()
