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
        trained.gradients, trained.files, trained.table = [], {}, None
        return trained

    found = jobs.difference(ended([1, 2, 3], ["accuracy 1"]), ended(log, last), resumed=resumed)
    assert bool(found) is differs


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"gradients": ['{"step": 0, "norm": 2}']}, "gradients.jsonl"),
        ({"gradients": ['{"step": 0, "norm": 1}'] * 2}, "gradients.jsonl"),
        ({"files": {"best.json": "b"}}, "files"),
        ({"table": [{"step": 2}]}, "log.csv"),
        ({"gradients": ['{"step": 0, "norm": 1}', '{"step": 3, "norm": 1}']}, ""),  # the step after a stop
    ],
)
def test_a_file_that_differs_is_seen(changed, said):
    same = {"gradients": ['{"step": 0, "norm": 1}'], "files": {"best.json": "a"}, "table": [{"step": 1}]}
    one, two = (object.__new__(jobs.Trained) for _ in range(2))
    vars(one).update(same, log=[{"step": 1}], last=[])
    vars(two).update({**same, **changed}, log=[{"step": 1}], last=[])
    found = jobs.difference(one, two, resumed=False)
    assert found.startswith(said) and bool(found) == bool(said)


@pytest.mark.slow
def test_jobs_have_the_numbers_of_one_device_on_every_layout(tmp_path):
    kinds = set()
    for seed in range(6):
        (folder := tmp_path / str(seed)).mkdir()
        for name, what, said in jobs.run_seed(seed, folder):
            assert what in ("equal", "refused"), f"seed {seed} on {name}: {what}: {said}"
            kinds.add(what)
    assert "equal" in kinds
