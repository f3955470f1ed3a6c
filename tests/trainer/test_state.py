from lockstep.trainer import Progress


def judged(metric, values):
    progress = Progress(metric)
    return [
        progress.judge(epoch, 10 * epoch, {metric: value}) for epoch, value in enumerate(values)
    ], progress


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
