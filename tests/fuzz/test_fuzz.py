"""Thousands of damaged files: each is read right or refused in a sentence, and nothing is written elsewhere.

A round that fails is run again alone with ``explore(..., first=ROUND, rounds=1)``.
"""

import pytest
from tests.fuzz import checkpoints, images, job_files, records
from tests.fuzz.exploring import explore, watched

SEED = 20261121
SLOW = pytest.mark.slow
pytestmark = pytest.mark.timeout(1800)


def held(explored, *wanted):
    assert not explored.findings, "\n".join(f"round {number}: {what}" for number, what in explored.findings[:5])
    missing = [outcome for outcome in ("refused", *wanted) if not explored.outcomes[outcome]]
    assert not missing, f"no round came to {missing}: {explored.outcomes}"


@pytest.mark.parametrize("rounds", [200, pytest.param(10_000, marks=SLOW)])
@pytest.mark.fault("S6", "S7", "M11")
def test_damaged_job_files_are_jobs_or_are_refused(rounds, tmp_path):
    import torch._dynamo  # noqa: F401  # an optimizer imports it: it makes a folder for caches before anybody watches

    held(explore(job_files.attempt, rounds=rounds, seed=SEED, folder=tmp_path), "a job")


@pytest.mark.parametrize("rounds", [40, pytest.param(1_000, marks=SLOW)])
@pytest.mark.parametrize(
    "sharded", [pytest.param(False, marks=pytest.mark.slow), True], ids=["one writer", "three writers"]
)
@pytest.mark.fault("K3", "K6", "K8")
def test_damaged_checkpoints_go_on_or_are_refused(sharded, rounds, tmp_path_factory):
    attempt = checkpoints.Attempt(tmp_path_factory.mktemp("sound"), sharded)
    explored = explore(attempt, rounds=rounds, seed=SEED, folder=tmp_path_factory.mktemp("damaged"))
    held(explored, "gone on")


@pytest.mark.parametrize("rounds", [200, pytest.param(5_000, marks=SLOW)])
@pytest.mark.fault("D1", "K7", "M9")
def test_damaged_images_and_archives_are_read_or_are_refused(rounds, tmp_path):
    explored = explore(images.Attempt(), rounds=rounds, seed=SEED, folder=tmp_path)
    held(explored, "a photo", "data")


@pytest.mark.parametrize("rounds", [100, pytest.param(10_000, marks=SLOW)])
@pytest.mark.fault("D1", "M9")
def test_damaged_photos_in_any_format_are_read_or_refused_and_no_program_starts(rounds, tmp_path):
    explored = explore(images.Attempt(odd=True), rounds=rounds, seed=SEED, folder=tmp_path)
    held(explored, "a photo")


@pytest.mark.parametrize("rounds", [200, pytest.param(60_000, marks=SLOW)])
@pytest.mark.fault("T6", "X1")
def test_what_strangers_send_and_what_was_overwritten_is_taken_for_what_it_is(rounds, tmp_path_factory):
    attempt = records.Attempt(tmp_path_factory.mktemp("sound"))
    explored = explore(attempt, rounds=rounds, seed=SEED, folder=tmp_path_factory.mktemp("odd"))
    held(
        explored,
        "a stranger is refused",
        "a heartbeat",
        "no heartbeat",
        "a run",
        "no run",
        "a record",
        "no record",
    )


@SLOW
def test_damaged_jobs_that_are_taken_run_or_end_in_a_sentence(tmp_path):
    """Real runs of one epoch; whatever else the file says, they write into their run folder only."""
    texts = job_files.taken(SEED, 16, tmp_path)
    codes = [job_files.run(text, tmp_path / str(number)) for number, text in enumerate(texts)]
    assert codes.count(0) >= 6


def test_a_write_elsewhere_would_be_seen(tmp_path):
    (tmp_path / "inside").mkdir()
    with watched(tmp_path / "inside") as written:
        (tmp_path / "inside" / "file").write_text("")
        (tmp_path / "outside").write_text("")
        (tmp_path / "inside" / "file").rename(tmp_path / "moved")
    (tmp_path / "later").write_text("")
    assert written == {str(tmp_path / "outside"), str(tmp_path / "moved")}


def test_a_finding_names_its_round(tmp_path):
    def attempt(rng, folder):
        if rng.random() < 0.5:
            raise KeyError("from the depths")
        return "fine"

    explored = explore(attempt, rounds=20, seed=1, folder=tmp_path)
    number, what = explored.findings[0]
    assert "from the depths" in what
    assert explore(attempt, rounds=1, seed=1, folder=tmp_path, first=number).findings == [(number, what)]
