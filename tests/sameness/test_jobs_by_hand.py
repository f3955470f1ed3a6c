"""Jobs drawn at random against loops written by hand, in float64."""

import pytest
from tests.sameness.jobs_by_hand import difference, draw


@pytest.mark.parametrize("seed", [2, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 130))])
def test_what_a_job_logs_and_writes_is_what_a_loop_by_hand_computes(seed, tmp_path):
    assert difference(draw(seed), tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("table", "setting", "value", "said"),
    [
        ("optimizer", "lr", 0.051, "loss"),
        ("optimizer", "weight_decay", 0.2, "loss"),
        ("training", "clip_norm", 0.01, "loss"),
        ("log", "every", 1, "lines"),
        ("data.train", "seed", 5, "loss"),
    ],
)
def test_another_loop_by_hand_differs(table, setting, value, said, tmp_path):
    job = draw(8)
    other = {**job, table: {**job[table], setting: value}}
    assert said in difference(job, tmp_path, other)
