"""Jobs drawn at random, on the layouts of their seeds."""

import tomllib

import pytest
from tests.sameness import jobs


def test_a_seed_always_gives_the_same_job_and_each_is_a_table_of_settings():
    drawn = [jobs.draw(seed) for seed in range(200)]
    assert [jobs.draw(seed) for seed in range(200)] == drawn
    assert len({text for text, _ in drawn}) == 200
    for text, layouts in drawn:
        assert {"model", "data", "optimizer", "training"} <= tomllib.loads(text).keys()
        assert len(layouts) == 2


@pytest.mark.parametrize(
    ("log", "last", "resumed", "differs"),
    [
        ([1, 2, 3], ["accuracy 1"], False, False),
        ([1, 2], ["accuracy 1"], False, True),
        ([1, 2, 4], ["accuracy 1"], False, True),
        ([1, 2, 3], ["accuracy 2"], False, True),
        ([2, 3], ["accuracy 1"], True, False),
        ([2, 4], ["accuracy 1"], True, True),
        ([2], ["accuracy 1"], True, True),
    ],
)
def test_a_record_or_a_last_line_that_differs_is_seen(log, last, resumed, differs):
    def ended(steps, last):
        trained = object.__new__(jobs.Trained)
        trained.log, trained.last = [{"step": step, "loss": step / 2} for step in steps], last
        return trained

    found = jobs.difference(ended([1, 2, 3], ["accuracy 1"]), ended(log, last), resumed=resumed)
    assert bool(found) is differs


@pytest.mark.slow
def test_jobs_have_the_numbers_of_one_device_on_every_layout(tmp_path):
    for seed in range(6):
        (folder := tmp_path / str(seed)).mkdir()
        for name, what, said in jobs.run_seed(seed, folder):
            assert what in ("equal", "refused"), f"seed {seed} on {name}: {what}: {said}"
