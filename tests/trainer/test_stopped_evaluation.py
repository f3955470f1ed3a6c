"""A job that is asked to stop in an evaluation leaves it, and its log is then that of the uninterrupted run."""

import pytest
from tests.ranks import run_ranks
from tests.trainer.test_trainer import outcome, records, trainer

from lockstep import checkpoint
from lockstep.run import evaluation
from lockstep.runtime.control import Stopped, StopReason


def stopped(world, folder):
    """Trains until rank 0 is asked to stop in the middle of the third evaluation."""
    evaluation.AGREE_EVERY = 0.0
    job = trainer(world, folder)
    evaluations, evaluate = [], job.run.evaluate

    def asking(data, metrics, **options):
        evaluations.append(data)
        if len(evaluations) == 3 and world.rank == 0:
            job.run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)
        return evaluate(data, metrics, **options)

    job.run.evaluate = asking
    with pytest.raises(Stopped):
        job.fit()
    job._logger.close()
    return len(evaluations), job.run.position.as_dict()


def without_speed(folder):
    return [
        {key: value for key, value in record.items() if key not in ("samples_per_second", "seconds")}
        for record in records(folder)
    ]


@pytest.mark.fault("P7")
def test_the_log_and_the_best_result_are_those_of_the_uninterrupted_run(tmp_path):
    (whole,) = run_ranks(outcome, 1, tmp_path / "whole", {})
    for evaluations, position in run_ranks(stopped, 3, tmp_path / "cut"):
        assert (evaluations, position["epoch"], position["step"], position["inside"]) == (3, 2, 12, True)
    assert run_ranks(outcome, 2, tmp_path / "cut", {"resume": "auto"}) == [whole] * 2
    assert without_speed(tmp_path / "cut") == without_speed(tmp_path / "whole")
    assert checkpoint.read_best(tmp_path / "cut") == checkpoint.read_best(tmp_path / "whole")
    newest, other = (checkpoint.read_newest(tmp_path / name).state for name in ("cut", "whole"))
    assert newest.progress["position"] == other.progress["position"]
    assert newest.progress["extra"]["trainer"] == other.progress["extra"]["trainer"]
