"""Work of a loop at the start of an epoch, or after a save, is not done twice in a resumed run, nor left out."""

import random
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from tests.run.jobs import GLOBAL_BATCH, Left, begin, correct, dataset, leave, network, train_step
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR

import lockstep
from lockstep.errors import ConfigError
from lockstep.runtime import Callback


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.scale, self.scales, self.rows = network(), 1.0, [1.0], 0
        self.register_buffer("bound", torch.tensor(2.0))
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, inputs):
        self.rows = len(inputs)
        return (self.layers(inputs) * self.scale * self.scales[-1] + self.frozen(inputs)).clamp(max=self.bound)


class Loop:
    """A run within its second epoch, or one that goes on there; each of the functions is given this object."""

    def __init__(self, folder, *, prepared=None, start=None, saved=None, **options):
        torch.manual_seed(0)
        self.model, self.beside = Scaled(), network()
        optimizer = torch.optim.SGD([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        recipe = {"global_batch": GLOBAL_BATCH, "micro_batches": 8, "directory": folder, "resume": "auto"}
        self.run = lockstep.init(**recipe, **options)
        _, self.optimizer, _ = self.run.prepare(self.model, optimizer, self.beside)
        goes_on = self.run.position.done
        if goes_on and prepared:
            prepared(self)
        for epoch in self.run.epochs(2):
            self.epoch = epoch
            if start:
                start(self)
            for batch in self.run.batches(dataset()):
                train_step(self.run, batch, self.optimizer)
                if epoch and saved:
                    self.run.save()
                    saved(self)
                elif epoch and not goes_on:
                    leave(self.run)
        self.run.close()


def halve(tensor):
    with torch.no_grad():
        tensor.mul_(0.5)


def copy_model(loop):
    loop.beside.load_state_dict(loop.model.layers.state_dict())


def halve_scale(loop):
    loop.model.scale *= 0.5


def double_extra(loop):
    loop.run.extra["weight"] = loop.run.extra.get("weight", 1.0) * 2


CHANGES = {
    "buffers": lambda loop: halve(loop.model.bound),
    "parameters": lambda loop: halve(loop.model.frozen.weight),
    "modules beside the model": copy_model,
    "the attribute 'scale' of the model": halve_scale,
    "the attribute 'scales' of the model": lambda loop: loop.model.scales.append(0.5),
    r"run.extra\['weight'\]": double_extra,
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_the_start_of_an_epoch_has_changed_is_not_changed_once_more(tmp_path, what):
    """A target network took the weights of the stop, a temperature was multiplied again: other bits, silently."""
    with pytest.raises(Left):
        Loop(tmp_path, start=CHANGES[what])
    with pytest.raises(ConfigError, match=f"before run.batches .* has changed {what}.*not run.position.done"):
        Loop(tmp_path, start=CHANGES[what])


def set_anew(loop):
    loop.model.scale, loop.run.extra["time"] = 1 / (1 + loop.epoch), time.monotonic()
    loop.model.bound.fill_(3.0)
    loop.run.evaluate(dataset(5), correct)  # whose forward passes leave another number of rows


def test_what_the_start_of_an_epoch_sets_anew_may_be_set_again(tmp_path):
    with pytest.raises(Left):
        Loop(tmp_path, start=set_anew)
    Loop(tmp_path, start=set_anew)


def evaluate(loop):
    loop.run.evaluate(dataset(5), correct)


@pytest.mark.parametrize(("before", "after"), [("first", "off"), ("off", "first"), ("off", "always")])
def test_a_run_may_resume_with_other_checks(tmp_path, caplog, before, after):
    """Samples that one side had not read were taken for others, and the run was refused within an epoch."""
    with pytest.raises(Left):
        Loop(tmp_path, start=evaluate, checks=before)
    Loop(tmp_path, start=evaluate, checks=after)
    assert "not those from before the stop" not in caplog.text


@pytest.mark.parametrize("what", ["buffers", "parameters", "modules beside the model"])
def test_what_a_resumed_run_has_from_its_checkpoint_is_not_set_before_its_loop(tmp_path, what):
    with pytest.raises(Left):
        Loop(tmp_path)
    with pytest.raises(ConfigError, match=f"After run.prepare the script has changed {what}"):
        Loop(tmp_path, prepared=CHANGES[what])


def test_a_learning_rate_that_a_resumed_script_sets_before_its_loop_is_named(tmp_path, caplog):
    """It was that of the first steps again, where the loop had lowered it."""

    def set_rate(loop):
        loop.optimizer.param_groups[0]["lr"] = 0.3

    with pytest.raises(Left):
        Loop(tmp_path)
    Loop(tmp_path, prepared=set_rate)
    said = [each.getMessage() for each in caplog.records if "Before its loop" in each.getMessage()]
    assert len(said) == 1 and "has set lr of optimizer 0, group 0 anew" in said[0]


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_loop_changes_after_a_save_is_refused(tmp_path, what):
    with pytest.raises(ConfigError, match=r"save.* came before the end of the body .* changed") as caught:
        Loop(tmp_path, saved=CHANGES[what])
    assert what.partition("\\")[0] in str(caught.value)


def test_a_loop_may_evaluate_after_a_save(tmp_path):
    with suppress(Left):
        Loop(tmp_path, saved=lambda loop: loop.run.evaluate(dataset(5), correct))


class Phases:
    """A run of two loops over epochs, of one epoch and of two more, which is left within the second one, or goes on."""

    def __init__(self, folder, between, *, leaves_at=(2, 0)):
        torch.manual_seed(0)
        self.model = Scaled()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        options = {"global_batch": GLOBAL_BATCH, "micro_batches": 8, "directory": folder, "resume": "auto"}
        self.run = lockstep.init(**options)
        _, self.optimizer = self.run.prepare(self.model, torch.optim.SGD(trained, lr=0.1, momentum=0.9))
        self.goes_on, self.leaves_at = bool(self.run.position.step), leaves_at
        self.rates = []
        self.train(1)
        between(self)
        self.train(3)
        self.run.close()

    def train(self, epochs):
        for epoch in self.run.epochs(epochs):
            for batch in self.run.batches(dataset()):
                train_step(self.run, batch, self.optimizer)
                self.rates.append(self.optimizer.param_groups[0]["lr"])
                if not self.goes_on and (epoch, batch.plan.position) == self.leaves_at:
                    leave(self.run)
            if self.leaves_at == (epoch, "killed"):
                self.run.close()
                raise Left
            if not self.goes_on and (epoch, "end") == self.leaves_at:
                leave(self.run)


def halve_rate(loop):
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def count_phase(loop):
    loop.run.extra["phase"] = loop.run.extra.get("phase", 0) + 1


def halve_momentum(loop):
    for state in loop.optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


BETWEEN = {
    "buffers": lambda loop: halve(loop.model.bound),
    "parameters": lambda loop: halve(loop.model.layers[0].weight),
    "the attribute 'scale' of the model": halve_scale,
    "the state of optimizer 0": lambda loop: loop.optimizer.state.clear(),
    "lr of optimizer 0, group 0": halve_rate,
    "run.extra['phase']": count_phase,
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_stands_between_two_loops_over_epochs_is_not_done_once_more_without_a_word(tmp_path, caplog, what):
    """The second phase of a fine-tuning began again: with half of its learning rate, or a new head."""
    with pytest.raises(Left):
        Phases(tmp_path, BETWEEN[what])
    caplog.clear()
    if what in ("buffers", "parameters"):
        with pytest.raises(ConfigError, match=f"changed {what}.*between two loops .* 'if epoch == N and not run"):
            Phases(tmp_path, BETWEEN[what])
    else:
        Phases(tmp_path, BETWEEN[what])
        assert f"Before its loop the script has set {what} anew" in caplog.text


@pytest.mark.parametrize("what", BETWEEN)
def test_what_was_done_before_a_save_between_two_loops_is_not_done_once_more_without_a_word(tmp_path, caplog, what):
    """The checkpoint had half of the learning rate, and the resumed run halved it again."""
    change = halve_momentum if "state" in what else BETWEEN[what]  # clearing it again changes nothing

    def between(loop):
        change(loop)
        loop.run.save(wait=True)

    with pytest.raises(Left):
        Phases(tmp_path, between, leaves_at=(1, "killed"))
    caplog.clear()
    if what in ("buffers", "parameters"):
        with pytest.raises(ConfigError, match=f"changed {what}.*between two loops .* 'if epoch == N and not run"):
            Phases(tmp_path, between)
    else:
        Phases(tmp_path, between, leaves_at=None)
        assert f"Before its loop the script has set {what} anew" in caplog.text


def test_a_longer_run_is_told_that_it_goes_on_from_what_came_after_the_loop(tmp_path, caplog):
    """The last checkpoint of three epochs had averaged weights, with which an extended run went on."""

    def train(epochs):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        for _ in run.epochs(epochs):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            run.save(wait=True)
        optimizer.param_groups[0]["lr"] *= 0.5
        run.save(wait=True)
        run.close()

    train(1)
    assert "after a loop over run.epochs" not in caplog.text
    train(2)
    told = "written after a loop over run.epochs(1), and after it the script had changed lr of optimizer 0, group 0"
    assert told in caplog.text


def test_the_steps_of_a_loop_that_is_left_by_break_are_not_taken_for_a_change_after_the_loop_before(tmp_path, caplog):
    """A resumed run that stopped early, and saved after its loop, had its own training for a change of the script."""
    for patience in (1, 3, 5):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        for epoch in run.epochs(6):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            if epoch == patience:
                break
        run.save(wait=True)
        run.close()
    assert "after a loop over run.epochs" not in caplog.text


def test_what_a_resumed_run_itself_saves_between_two_loops_is_not_taken_for_that_of_its_checkpoint(tmp_path, caplog):
    """Resumed from the end of the first loop, it had its own change named as one that the checkpoint holds."""
    for ends in (True, False):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        for count in (1, 2):
            for _ in run.epochs(count):
                for batch in run.batches(dataset()):
                    train_step(run, batch, optimizer)
                run.save(wait=True)
            if ends:
                break
            optimizer.param_groups[0]["lr"] *= 0.5
            run.save(wait=True)
        run.close()
    assert "after a loop over run.epochs" not in caplog.text


@pytest.mark.parametrize("stops", [1, 2])
def test_what_is_done_after_a_save_between_two_loops_is_done_once(tmp_path, caplog, stops):
    def between(loop):
        loop.run.evaluate(dataset(5), correct)
        loop.run.save(wait=True)
        halve_rate(loop)

    for _ in range(stops):
        with pytest.raises(Left):
            Phases(tmp_path, between, leaves_at=(1, "killed"))
    assert {*Phases(tmp_path, between, leaves_at=None).rates} == {0.05}
    assert "anew" not in caplog.text


@pytest.mark.parametrize("leaves_at", [(0, 1), (1, 2), (2, 0)])
def test_what_sets_the_same_between_two_loops_may_be_done_again(tmp_path, caplog, leaves_at):
    def between(loop):
        loop.optimizer.param_groups[0]["lr"] = 0.02
        loop.model.frozen.requires_grad_(False)

    with pytest.raises(Left):
        Phases(tmp_path, between, leaves_at=leaves_at)
    rates = Phases(tmp_path, between).rates
    assert (rates[0], rates[-1]) == (0.1 if leaves_at[0] == 0 else 0.02, 0.02)
    assert "anew" not in caplog.text


def test_what_stands_between_two_loops_is_done_where_the_first_one_had_ended(tmp_path, caplog):
    with pytest.raises(Left):
        Phases(tmp_path, halve_rate, leaves_at=(0, "end"))
    assert {*Phases(tmp_path, halve_rate).rates} == {0.05}
    assert "anew" not in caplog.text


@pytest.mark.parametrize(("leaves_at", "told"), [((0, 1), 0), ((0, "end"), 0), ((2, 0), 1)])
def test_an_evaluation_between_two_loops_is_told_where_it_is_of_later_parameters(tmp_path, caplog, leaves_at, told):
    """``print("after phase 1", run.evaluate(...))`` gave the number of a step of phase 2, without a word."""
    with pytest.raises(Left):
        Phases(tmp_path, evaluate, leaves_at=leaves_at)
    Phases(tmp_path, evaluate)
    assert caplog.text.count("is of the parameters after 1 step of epoch 3") == told
    assert caplog.text.count("This evaluation") == told


def test_an_evaluation_at_the_start_of_an_epoch_is_told_where_it_is_of_later_parameters(tmp_path, caplog):
    with pytest.raises(Left):
        Loop(tmp_path, start=evaluate)
    assert "This evaluation" not in caplog.text
    Loop(tmp_path, start=evaluate)
    assert caplog.text.count("This evaluation is of the parameters after 1 step of epoch 2") == 1


def rate_first(run, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5
    run.save(wait=True)


def save_first(run, optimizer):
    run.save(wait=True)
    optimizer.param_groups[0]["lr"] *= 0.5


@pytest.mark.parametrize("start", [rate_first, save_first])
def test_a_checkpoint_of_the_start_of_an_epoch_goes_on_there(tmp_path, start):
    """A learning rate that is lowered before the save was lowered once more."""
    rates = []
    for goes_on in (False, True):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        rates.append([])
        is_refused = goes_on and start is rate_first
        with pytest.raises(ConfigError, match=r"written after that: put run\.save") if is_refused else suppress(Left):
            for epoch in run.epochs(3):
                start(run, optimizer)
                rates[-1].append(optimizer.param_groups[0]["lr"])
                for batch in run.batches(dataset()):
                    train_step(run, batch, optimizer)
                if epoch == 1 and not goes_on:
                    raise Left  # as a crash does, before it is saved
        run.close()
    assert rates == [[0.05, 0.025], [0.025, 0.0125] if start is save_first else []]


@pytest.mark.parametrize("place", ["start", "step"])
def test_what_a_generator_draws_before_a_save_at_the_start_of_an_epoch_is_drawn_again(tmp_path, place):
    """The resumed run drew the numbers after them, and took other steps."""
    drawn = []
    for goes_on in (False, True):
        rng = random.Random(3)
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        drawn.append([])
        with suppress(Left):
            for epoch in run.epochs(2):
                drawn[-1].append(rng.random())
                if place == "start":
                    run.save(wait=True)
                drawn[-1].append(rng.random())
                for batch in run.batches(dataset()):
                    if place == "step" and not batch.plan.position:
                        run.save(wait=True)
                    train_step(run, batch, optimizer)
                if epoch == 1 and not goes_on:
                    raise Left
                drawn[-1].append(rng.random())
        run.close()
    assert drawn[1][:2] == drawn[0][3:]


def test_a_run_may_save_after_the_steps_of_an_epoch_that_it_has_left_early(tmp_path):
    """It was refused as if the save had come before the break."""
    steps = []
    for goes_on in (False, True):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        with suppress(Left):
            for epoch in run.epochs(3):
                for batch in run.batches(dataset()):
                    train_step(run, batch, optimizer)
                    steps.append((epoch, batch.plan.position))
                    if batch.plan.position:
                        break
                run.save(wait=True)
                if epoch == 1 and not goes_on:
                    raise Left
        run.close()
    assert steps == [(epoch, position) for epoch in range(3) for position in range(2)]


def test_a_save_between_two_loops_over_the_steps_of_an_epoch_is_refused(tmp_path):
    """A run that went on from there left out the second one, without a word."""
    run, _, optimizer = begin(directory=tmp_path)
    with pytest.raises(ConfigError, match=r"changed the place in the epoch, by another loop over run\.batches"):
        for _ in run.epochs(2):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
                break
            run.save(wait=True)
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)


def test_an_epoch_without_steps_may_save(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    for epoch in run.epochs(3):
        run.save(wait=True)
        for batch in run.batches(dataset()) if epoch != 1 else ():
            train_step(run, batch, optimizer)
        run.save(wait=True)
    run.close()


class Warmup(Callback):
    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0

    def on_step_begin(self, batch):
        self.steps += 1
        self.optimizer.param_groups[0]["lr"] = 0.01 * self.steps


def counting_hook():
    steps = 0

    def hook(optimizer, *_):
        nonlocal steps
        steps += 1
        optimizer.param_groups[0]["lr"] = 0.01 * steps

    return hook


def counting_schedule():
    steps = -2  # it is asked twice when it is made, within a sequence

    def schedule(_, **__):
        nonlocal steps
        steps += 1
        return 1 / (3 + steps)

    return schedule


def in_sequence(optimizer):
    rule = partial(counting_schedule(), more=1)
    return SequentialLR(optimizer, [LambdaLR(optimizer, rule), ConstantLR(optimizer)], [9])


@pytest.mark.parametrize("name", ["Warmup", "hook", "schedule"])
def test_the_count_of_a_callback_or_a_hook_that_begins_anew_is_named(tmp_path, caplog, name):
    """No variable of the loop leads to it: the learning rate was that of the first step again, without a word."""

    def loop():
        make = in_sequence if name == "schedule" else None
        given = {"directory": tmp_path, "resume": "auto", "make_scheduler": make}
        run, _, optimizer, *schedulers = begin(**given)
        if name == "hook":
            optimizer.register_step_pre_hook(counting_hook())
        elif name == "Warmup":
            run.add_callback(Warmup(optimizer))
        goes_on = run.position.step
        for _ in run.epochs(2):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
                for each in schedulers:
                    each.step()
                if not goes_on:
                    leave(run)
        run.close()

    with pytest.raises(Left):
        loop()
    loop()
    assert f"{name} (callback 1).steps (0, was 1)" in caplog.text
