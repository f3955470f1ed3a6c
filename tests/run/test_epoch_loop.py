"""The position of a run, whatever its loops do; no process and no model needed."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count, islice, zip_longest

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import lockstep
from lockstep.core.plan import StepPlan
from lockstep.data.batch import Batch
from lockstep.errors import ConfigError
from lockstep.run.epoch_loop import EpochLoop, EpochSteps

STEPS = 3


def read(epoch, first, count=STEPS):
    for position in range(first, count):
        step = epoch * count + position
        yield Batch(StepPlan(epoch=epoch, step=step, position=position, packed=b"", indices=(np.array([0]),)), ())


def steps(course, after=lambda: None):
    for batch in course.steps(read, after):
        yield batch.plan.epoch, batch.plan.position


def place(course):
    position = course.position
    return position.epoch, position.done, position.step, position.inside


def test_every_step_of_every_epoch_is_walked():
    course = EpochLoop()
    seen = [step for _ in course.epochs(2) for step in steps(course)]
    assert seen == [(epoch, position) for epoch in range(2) for position in range(STEPS)]
    assert place(course) == (2, 0, 6, False)


def test_without_epochs_every_loop_is_the_next_epoch():
    course = EpochLoop()
    seen = [step for _ in range(2) for step in steps(course)]
    assert seen == [(epoch, position) for epoch in range(2) for position in range(STEPS)]


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_loop_that_would_have_no_step_since_the_one_before_left_the_last_is_refused(in_epochs):
    """``next(iter(run.batches(data)))`` ended in StopIteration, and each other loop with a break trained nothing."""
    course = EpochLoop()

    def leave(position):
        for _, each in steps(course):
            course.backward_passes += 1
            if each == position:
                return

    for _ in course.epochs(1) if in_epochs else range(1):
        leave(1)
        leave(2)  # goes on there
        with pytest.raises(ConfigError, match="called again in epoch 1, whose steps are all done"):
            leave(0)
    if in_epochs:
        return
    course = EpochLoop()
    for _ in course.epochs(2):
        leave(2)
        break
    assert [list(steps(course)) for _ in course.epochs(1)] == [[]]  # what follows the steps is still to be done


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_backward_pass_beside_a_thread_that_reads_the_batches_is_refused_on_several_processes(is_alone):
    course = EpochLoop(is_alone=is_alone)
    batches = course.steps(read, lambda: None)
    with ThreadPoolExecutor(1) as thread:
        plan = thread.submit(next, batches).result().plan
        with nullcontext() if is_alone else pytest.raises(ConfigError, match="another thread reads"):
            course.begin_backward(plan)
        thread.submit(list, batches).result()
    course.begin_backward(plan)  # the thread has read all


@pytest.mark.parametrize(("epoch", "warnings"), [(0, 0), (2, 1)])
def test_a_loop_of_its_own_is_warned_where_it_was_resumed_after_an_epoch(caplog, epoch, warnings):
    """``for epoch in range(3)`` trains three more epochs then."""
    course = EpochLoop()
    course.position.epoch, course.is_resumed = epoch, True
    for _ in range(3):
        list(steps(course))
    assert caplog.text.count("write for epoch in run.epochs(N)") == warnings
    assert caplog.text.count("begin it at a count in run.extra") == warnings
    caplog.clear()
    course = EpochLoop()
    course.position.epoch, course.is_resumed = epoch, True
    assert [step for _ in course.epochs(epoch + 4) for step in steps(course)]
    assert not caplog.text


def test_steps_before_a_loop_over_epochs_are_told_and_refused_in_a_resumed_run(caplog):
    """A search for a learning rate took steps of the first epoch, and those of a later one after a resume."""
    course = EpochLoop()
    next(steps(course))  # a look at the first batch is no step
    for _ in course.epochs(1):
        list(steps(course))
    assert not caplog.text
    list(steps(course))
    assert [step for _ in course.epochs(3) for step in steps(course)] == [(2, 0), (2, 1), (2, 2)]
    assert "before run.epochs(3), and count as part of the run, which goes on at step 0 of epoch 3" in caplog.text
    course = EpochLoop()
    course.position.epoch, course.is_resumed = 1, True
    list(steps(course))
    with pytest.raises(ConfigError, match="a run of its own"):
        next(course.epochs(3))


def bar(batches):
    for batch in batches:
        yield batch
        assert batch, "shown"


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (enumerate, "the count of enumerate begins anew"),
        (lambda batches: enumerate(bar(batches)), "the count of enumerate begins anew"),
        (lambda batches: bar(enumerate(batches)), "the count of enumerate begins anew"),
        (
            lambda batches: zip(batches, DataLoader([0, 1, 2])),
            "the _SingleProcessDataLoaderIter in zip begins",
        ),
        (lambda batches: zip_longest(batches, [1]), "the list_iterator in zip_longest begins anew"),
        (lambda batches: map(lambda *each: each, count(), batches), "the count in map begins anew"),
        (lambda batches: islice(batches, 9), "the count of islice begins anew"),
        (lambda batches: enumerate(batches, 2), ""),
        (bar, ""),
        (iter, ""),
    ],
)
def test_what_counts_the_steps_or_is_read_beside_them_is_named_where_an_epoch_goes_on(caplog, around, said):
    for done in (0, 2):
        course = EpochLoop()
        course.position.done, course.is_resumed = done, True
        for _ in course.epochs(2):
            for _ in around(EpochSteps(course.steps(read, lambda: None), STEPS)):
                pass
        assert len(caplog.records) == (done == 2 and said != "")
    assert f"goes on at step 2 of epoch 1, and {said}" in caplog.text or not said


@pytest.mark.parametrize(
    ("around", "said"),
    [
        (enumerate, "the count of enumerate begins anew"),
        (lambda epochs: zip(epochs, (0.1, 0.2, 0.3)), "the tuple_iterator in zip begins anew"),
        (lambda epochs: zip((0.1, 0.2, 0.3), epochs), "the tuple_iterator in zip begins anew"),
        (lambda epochs: (each for each in zip((e for e in epochs), count())), "the count in zip begins anew"),
        (lambda epochs: islice(epochs, 2), "the count of islice begins anew"),
        (lambda epochs: enumerate(epochs, 1), ""),
        (lambda epochs: (each for each in epochs), ""),
        (iter, ""),
    ],
)
def test_what_is_iterated_beside_the_epochs_is_named_where_a_run_goes_on(caplog, around, said):
    """``zip(run.epochs(3), (0.1, 0.02, 0.01))`` gave the second epoch the rate of the first one, without a word."""
    for epoch in (0, 1):
        course = EpochLoop()
        course.position.epoch, course.is_resumed = epoch, True
        for _ in around(course.epochs(3)):
            list(steps(course))
        assert len(caplog.records) == (epoch == 1 and said != "")
    assert f"goes on at epoch 2, and {said}" in caplog.text or not said


@pytest.mark.parametrize(("epoch", "warnings"), [(1, 0), (2, 1)])
def test_what_is_iterated_beside_the_epochs_of_a_second_loop_begins_with_it(caplog, epoch, warnings):
    course = EpochLoop()
    course.position.epoch, course.is_resumed = epoch, True
    for _ in course.epochs(1):
        list(steps(course))
    for _ in zip(course.epochs(3), (0.1, 0.2)):
        list(steps(course))
    assert caplog.text.count("in zip begins anew") == warnings


def test_a_step_counts_as_done_once_its_backward_has_run():
    course = EpochLoop()
    for _ in steps(course):
        course.count_step()
        assert course.position.step == 0
        course.backward_passes += 1
        course.count_step()
        course.count_step()
        assert place(course) == (0, 1, 1, True)
        break


def test_a_step_that_was_skipped_is_done_all_the_same():
    course = EpochLoop()
    list(steps(course))
    assert place(course) == (1, 0, STEPS, False)


def test_after_a_break_the_next_epoch_follows_and_a_checkpoint_says_so():
    course, seen = EpochLoop(), []
    for _ in course.epochs(2):
        walk = steps(course)
        seen.append(next(walk))
        course.backward_passes += 1
        walk.close()
        assert course.position.done == 1
        assert not course.position.inside
    assert seen == [(0, 0), (1, 0)]


def test_leaving_both_loops_is_a_place_within_the_epoch():
    course = EpochLoop()
    for _ in course.epochs(2):
        for _ in steps(course):
            course.backward_passes += 1
            break
        break
    assert place(course) == (0, 1, 1, True)
    assert list(steps(course)) == [(0, 1), (0, 2)]


def test_a_second_loop_over_epochs_after_one_that_was_left_at_the_end_of_an_epoch_is_refused():
    course = EpochLoop()
    for _ in course.epochs(2):
        list(steps(course))
        break
    assert list(course.epochs(0)) == []  # nothing to do
    with pytest.raises(ConfigError, match=r"run\.epochs\(3\) was called after another loop .* the end of epoch 1\."):
        next(course.epochs(3))


def test_without_epochs_a_loop_goes_on_where_the_last_one_was_left():
    course = EpochLoop()
    for _ in steps(course):
        course.backward_passes += 1
        break
    assert list(steps(course)) == [(0, 1), (0, 2)]
    assert course.position.epoch == 1


def test_backward_passes_over_one_batch_are_numbered():
    course, numbers = EpochLoop(), []
    for _ in steps(course):
        numbers.append(course.backward_passes)
        course.backward_passes += 1
        numbers.append(course.backward_passes)
    assert numbers == [0, 1] * STEPS


def backward(course, batch, waiting=()):
    number = course.begin_backward(batch.plan, waiting)
    course.end_backward(batch.plan)
    return number


@pytest.mark.parametrize("in_epochs", [False, True])
def test_steps_taken_ahead_are_done_once_their_backward_passes_have_run(in_epochs):
    """They counted when the next batch was taken, and the last ones had the numbers of second passes."""
    course = EpochLoop()
    for epoch in course.epochs(2) if in_epochs else range(2):
        walk = course.steps(read, lambda: None)
        course.steps_left(STEPS)
        first, second = next(walk), next(walk)
        assert backward(course, first) == 0
        course.count_step()  # as in a save
        assert place(course) == (epoch, 1, epoch * STEPS + 1, True)
        (third,) = walk
        assert backward(course, second) == 0
        assert place(course) == (epoch, 2, epoch * STEPS + 2, True)
        assert backward(course, second) == 1
        assert backward(course, third) == 0
        assert course.position.step == (epoch + 1) * STEPS
    again = taken_up(course)
    assert again.position.step == 2 * STEPS
    assert [list(steps(again)) for _ in again.epochs(2)] == [[]] * (not in_epochs)


def test_steps_taken_ahead_are_counted_in_epochs_of_unequal_lengths():
    """Those of a shorter data set had numbers of steps that were over, and a resumed run did them again."""
    course, step = EpochLoop(), 0
    for epoch, length in zip(course.epochs(4), (6, 2, 6, 3), strict=True):
        course.steps_left(length)
        for done, batch in enumerate(list(course.steps(partial(read, count=length), lambda: None)), 1):
            assert [backward(course, batch), backward(course, batch)] == [0, 1]
            step += 1
            assert place(course) == (epoch, done, step, done < length)


def test_steps_that_are_over_are_not_begun_again():
    """As ``while True: for batch in steps: yield batch`` does, which waited for ever."""
    course = EpochLoop()
    walk = EpochSteps(course.steps(read, lambda: None), STEPS)
    assert next(walk) is not None
    assert len(list(walk)) == STEPS - 1
    with pytest.raises(ConfigError, match=r"Call run\.batches\(data\) anew"):
        iter(walk)


@pytest.mark.parametrize("in_epochs", [False, True])
def test_a_pass_over_a_step_that_a_checkpoint_counts_as_done_is_refused(in_epochs):
    """``itertools.cycle(run.batches(data))`` trained on at one place; a resumed run ended with other bits."""
    course = EpochLoop()
    for _ in course.epochs(2) if in_epochs else range(2):
        course.steps_left(STEPS)
        batches = list(course.steps(read, lambda: None))
        for batch in (*batches, *batches):
            backward(course, batch)
        course.note_save()
    with pytest.raises(ConfigError, match="batch of step 3 again"):
        backward(course, batches[0])


def test_a_batch_kept_for_a_common_step_leaves_the_numbers_of_passes_as_they_are():
    course = EpochLoop()
    walk = course.steps(read, lambda: None)
    course.steps_left(STEPS)
    kept, current = next(walk), next(walk)
    assert [backward(course, kept), backward(course, current, [1]), backward(course, kept)] == [0, 1, 2]
    assert next(walk).plan.position == 2
    assert place(course) == (0, 2, 2, True)


def test_a_second_loop_in_one_epoch_is_refused_rather_than_empty():
    course = EpochLoop()
    with pytest.raises(ConfigError, match=r"again in epoch 1.*ConcatDataset.*Without run.epochs, "):
        for _ in course.epochs(1):
            list(steps(course))
            list(steps(course))


def test_two_loops_at_once_are_refused():
    course = EpochLoop()
    with pytest.raises(ConfigError, match="at once"):
        list(zip(steps(course), steps(course)))


def taken_up(course):
    """As a run that was resumed where this one went back to; see ``resuming.resume``."""
    course.go_back()
    other = EpochLoop()
    other.position.load_state_dict(course.position.as_dict())
    return other


def test_what_follows_the_last_step_of_an_epoch_can_be_done_again():
    course = EpochLoop()
    for epoch in course.epochs(2):
        assert not course.can_go_back or epoch == 1
        for _ in steps(course):
            assert not course.can_go_back
        if epoch == 1:
            break
    again = taken_up(course)
    assert [(epoch, list(steps(again))) for epoch in again.epochs(2)] == [(1, [])]
    assert place(again) == (2, 0, 2 * STEPS, False)


def test_without_epochs_going_back_is_to_the_epoch_whose_steps_are_done():
    course = EpochLoop()
    list(steps(course))
    assert place(course) == (1, 0, STEPS, False)
    again = taken_up(course)
    assert place(again) == (0, STEPS, STEPS, True)
    assert list(steps(again)) == []
    assert list(steps(again)) == [(1, position) for position in range(STEPS)]


def test_what_follows_all_epochs_can_be_done_again_without_any_of_them():
    course = EpochLoop()
    for _ in course.epochs(2):
        list(steps(course))
    again = taken_up(course)
    assert [list(steps(again)) for _ in again.epochs(2)] == []


def test_from_an_epoch_that_was_left_early_there_is_no_way_back():
    course = EpochLoop()
    for _ in course.epochs(1):
        walk = steps(course)
        next(walk)
        course.backward_passes += 1
        walk.close()
        assert not course.can_go_back


@pytest.mark.parametrize("stop", [None, 1, 5, 6, 8])
def test_steps_are_numbered_without_repeating_where_epochs_have_other_lengths(stop, tmp_path):
    """Dropout is keyed by the number: a data set that shrank had the masks of steps before it once more."""
    data = torch.utils.data.TensorDataset(torch.ones(24, 16), torch.zeros(24, 16))

    def train(resume, stop):
        run = lockstep.init(global_batch=4, micro_batches=2, checks="off", **resume)
        net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout())
        _, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=0.0))
        seen = []
        for epoch in run.epochs(3):
            for batch in run.batches(torch.utils.data.Subset(data, range((24, 8, 12)[epoch]))):
                loss = run.backward(batch, torch.nn.functional.mse_loss)
                seen.append((batch.plan.step, run.position.step, float(loss)))
                optimizer.step()
                optimizer.zero_grad()
                if batch.plan.step == stop:
                    run.save(directory=tmp_path, wait=True)
                    return seen
        return seen

    if stop is None:
        seen = train({}, None)
        assert [(step, done) for step, done, _ in seen] == [(n, n) for n in range(6 + 2 + 3)]
        assert len({loss for _, _, loss in seen}) == len(seen)
    else:
        assert train({}, stop) + train({"resume": tmp_path}, None) == train({}, None)


def test_steps_of_data_sets_that_take_turns_are_numbered_without_repeating():
    course, numbers = EpochLoop(), []
    for epoch in course.epochs(4):
        turn = partial(read, count=3 if epoch % 2 else 5)
        numbers += [batch.plan.step for batch in course.steps(turn, lambda: None)]
    assert numbers == list(range(5 + 3 + 5 + 3))


def test_after_an_epoch_that_was_left_early_steps_are_numbered_on():
    course, numbers = EpochLoop(), []
    for _ in course.epochs(2):
        for batch in course.steps(read, lambda: None):
            numbers.append(batch.plan.step)
            course.backward_passes += 1
            if batch.plan.position == 1:
                break
    assert numbers == [0, 1, 2, 3]
