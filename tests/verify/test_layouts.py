"""The layouts of a job that are compared."""

from lockstep.config.job_file import load_job
from lockstep.verify.layouts import layouts, reason_of

DIGITS = load_job("digits", [])


def labels(devices, *strategies, fitting=True):
    return [layout.label for layout in layouts(DIGITS, devices, strategies, fitting=fitting)]


def test_numbers_that_the_micro_batches_do_not_go_around_to_are_left_out_unless_asked_for():
    beyond = DIGITS.training.micro_batches + 1
    assert labels([2, beyond], "ddp") == ["ddp on 2"]
    assert labels([2, beyond], "ddp", fitting=False) == ["ddp on 2", f"ddp on {beyond}"]


def test_meshes_are_laid_out_for_every_even_number_from_four_on():
    assert labels([2, 3, 5], "hybrid") == []
    assert "data=2,pipeline=2 on 4" in labels([4], "hybrid")
    assert "data=2,pipeline=3 on 6" in labels([6], "hybrid")
    assert all("single" not in label for label in labels([1, 2, 4]))


def test_one_device_is_compared_as_ddp_only_and_servers_in_both_modes():
    assert labels([1]) == ["ddp on 1"]
    assert labels([2], "parameter_server") == [
        "parameter_server on 2",
        "parameter_server (asynchronous) on 2",
    ]


def test_the_reason_of_a_failed_layout_is_its_error():
    """A table said "rank 0 failed first, prepare (host a, pid 1):" and nothing more."""
    report = [
        "rank 0 failed first (host a, pid 1):",
        "Traceback (most recent call last):",
        "  File x",
        "StopIteration",
    ]
    assert reason_of([*report, "Logs: /tmp/a"]) == "rank 0 failed first (host a, pid 1): StopIteration"
    assert reason_of(["ConfigError: no."]) == "ConfigError: no."
    noted = [
        *report[:-1],
        "RuntimeError: batch1 must be a 3D tensor",
        "The data of a micro-batch: (int64 [0]).",
    ]
    assert reason_of([*noted, "  rank 0: the same error"]).endswith("pid 1): RuntimeError: batch1 must be a 3D tensor")
