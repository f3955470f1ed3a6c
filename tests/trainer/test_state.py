from functools import partial

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigError
from lockstep.trainer import Accuracy, Progress


def judged(metric, values):
    progress = Progress(metric)
    return [progress.judge(epoch, 10 * epoch, {metric: value}) for epoch, value in enumerate(values)], progress


def test_several_numbers_are_no_accuracy_to_judge_by():
    with pytest.raises(ConfigError, match=r"metrics\.accuracy gives several numbers"):
        Progress("validation_accuracy").judge(0, 10, {"validation_accuracy_0": 0.5})


def test_higher_accuracy_is_better():
    better, progress = judged("validation_accuracy", [0.5, 0.7, 0.7, 0.6])
    assert better == [True, True, False, False]
    assert (progress.best, progress.best_epoch, progress.best_step, progress.since_best) == (0.7, 1, 10, 2)


def test_lower_loss_is_better_and_nan_never_is():
    better, progress = judged("validation_loss", [2.0, float("nan"), 1.0])
    assert better == [True, False, True]
    assert progress.best == 1.0


def test_progress_continues_from_what_was_stored():
    _, progress = judged("validation_loss", [2.0, 3.0])
    later = Progress("validation_loss")
    later.load_state_dict(progress.as_dict())
    assert later == progress


def test_a_best_result_of_another_metric_loss_or_validation_set_is_forgotten():
    """A loss of 0.35 was worse than an accuracy of 0.13: the last lines showed that, and training ended."""
    stored = judged("validation_accuracy", [0.13])[1].as_dict()
    for later in Progress("validation_loss"), Progress("validation_accuracy", judged="another set"):
        later.load_state_dict(stored)
        assert later.best is None and later.since_best == 0
    del stored["judged"]  # of an earlier version
    later.load_state_dict(stored)
    assert later.best == 0.13


SCORES = torch.tensor([[[3.0, 0.0, 3.0, 0.0], [0.0, 3.0, 0.0, 3.0]]])  # one sample, two classes, four tokens


@pytest.mark.parametrize(
    ("loss", "target", "right", "counted"),
    [
        (nn.CrossEntropyLoss(), [[0, 1, 1, -100]], 2, 3),
        (nn.CrossEntropyLoss(ignore_index=0), [[0, 1, 0, 1]], 2, 2),
        (nn.NLLLoss(ignore_index=1), [[0, 1, 1, 0]], 1, 2),
        (partial(nn.functional.cross_entropy, ignore_index=1), [[0, 1, 0, 0]], 2, 3),
        (nn.functional.cross_entropy, [[0, 1, 0, 0]], 3, 4),
        (nn.CrossEntropyLoss(), [[-100] * 4], 0, 0),
        (nn.CrossEntropyLoss(), [[[0.6, 0.6, 0.4, 0.4], [0.4, 0.4, 0.6, 0.6]]], 2, 4),
        (nn.CrossEntropyLoss(ignore_index=0), [[[0.6, 0.6, 0.4, 0.4], [0.4, 0.4, 0.6, 0.6]]], 2, 4),
    ],
)
def test_accuracy_counts_the_targets_that_the_loss_counts(loss, target, right, counted):
    found = Accuracy.of(loss)(SCORES, torch.tensor(target))
    assert tuple(map(int, found)) == (right, counted)


@pytest.mark.parametrize(
    ("output", "target"),
    [
        ((SCORES, SCORES), torch.zeros(1, 4)),
        (torch.zeros(4, 2), torch.zeros(4, 1, dtype=torch.long)),  # was counted 16 times
        (torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.long)),
        (torch.zeros(4), torch.zeros(4, dtype=torch.long)),
        (torch.zeros(4, 2), torch.zeros(4)),
    ],
)
def test_what_a_loss_of_its_own_kind_takes_has_no_accuracy(output, target):
    with pytest.raises(ConfigError, match=r"Derive the loss from torch\.nn\.Module"):
        Accuracy.of(nn.CrossEntropyLoss())(output, target)


def test_a_loss_of_numbers_has_no_accuracy():
    assert Accuracy.of(nn.MSELoss()) is None


def test_any_number_is_better_than_nan():
    """A first evaluation that was NaN stayed the best, and an early stop ended the run."""
    better, progress = judged("validation_loss", [float("nan"), 2.0, 3.0])
    assert better == [True, True, False]
    assert progress.best == 2.0
