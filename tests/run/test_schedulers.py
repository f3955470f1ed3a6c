"""Schedulers through a stop at every step; a world of one, since no rank enters a schedule."""

import warnings

import pytest
import torch
from tests.run.jobs import begin, dataset, train_step, whole_state
from torch.optim import lr_scheduler

from lockstep.errors import ConfigError

EPOCHS, STEPS = 2, 3


def sequential(optimizer):
    first = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    then = lr_scheduler.MultiStepLR(optimizer, [1, 3])
    return lr_scheduler.SequentialLR(optimizer, [first, then], milestones=[2])


class Warmup:
    """A rate that follows from what the object has counted, beside what no checkpoint could hold."""

    def __init__(self):
        self.calls, self.table, self.bounds, self.noise = 0, {1: 0.5}, (0.1, 0.9), torch.ones(2)

    def __call__(self, _):
        self.calls += 1
        self.table[1] *= 0.9
        return max(self.bounds[0], self.table[1] / self.calls**0.5)


class Recalling:
    """A schedule of nobody's base class, with a state that has lists of tensors where there was nothing at first."""

    def __init__(self, optimizer):
        self.optimizer, self.kept, self.named = optimizer, None, {}

    def step(self):
        self.kept = [torch.tensor(0.9) * (self.kept[0] if self.kept else 1)]
        self.named["all"] = {"last": [self.kept[0] / 2]}
        self.optimizer.param_groups[0]["lr"] = float(self.kept[0] - self.named["all"]["last"][0])

    def state_dict(self):
        return {"kept": self.kept, "named": self.named}

    def load_state_dict(self, state):
        assert all(isinstance(each, torch.Tensor) for each in (*state["kept"], *state["named"]["all"]["last"]))
        self.kept, self.named = state["kept"], state["named"]


SCHEDULERS = {
    "own": Recalling,
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "LambdaLR of an object": lambda optimizer: lr_scheduler.LambdaLR(optimizer, Warmup()),
    "MultiplicativeLR of an object": lambda optimizer: lr_scheduler.MultiplicativeLR(optimizer, Warmup()),
    "CyclicLR of an object": lambda optimizer: lr_scheduler.CyclicLR(
        optimizer, 0.01, 0.2, step_size_up=2, scale_fn=Warmup()
    ),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * STEPS),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=EPOCHS * STEPS + 1),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


def train(name, directory, stop=None, resume="", number=float):
    run, model, optimizer, scheduler = begin(
        directory=directory,
        resume=resume,
        make_optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=number(lr), momentum=0.9, foreach=False),
        make_scheduler=SCHEDULERS[name],
        keep=None,
    )
    rates = []
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(dataset()):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            loss = train_step(run, batch, optimizer)
            scheduler.step(*([round(float(loss), 1)] if name == "ReduceLROnPlateau" else []))
            if batch.plan.step + 1 == stop:
                return run.save(), rates
    return whole_state(run, model, optimizer, scheduler), rates


@pytest.mark.parametrize("stops", [(2, 3), pytest.param((1, 4, 5, 6), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_schedule_goes_on_as_if_it_had_not_stopped(name, stops, tmp_path):
    with warnings.catch_warnings():
        # SequentialLR's own
        warnings.filterwarnings("ignore", message="The epoch parameter", category=UserWarning)
        whole, rates = train(name, tmp_path / "whole")
        assert len(set(rates)) > 1
        for stop in stops:
            path, first = train(name, tmp_path / "cut", stop)
            end, rest = train(name, tmp_path / "cut", resume=str(path))
            assert first + rest == rates
            assert end == whole


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "OneCycleLR", "MultiStepLR"])
def test_a_learning_rate_may_be_a_tensor(name, tmp_path):
    whole, rates = train(name, tmp_path / "whole", number=torch.tensor)
    path, first = train(name, tmp_path / "cut", 2, number=torch.tensor)
    end, rest = train(name, tmp_path / "cut", resume=str(path), number=torch.tensor)
    assert first + rest == rates
    assert end == whole


def test_a_schedule_may_step_once_per_epoch(tmp_path):
    def by_epoch(resume, epochs):
        run, model, optimizer, scheduler = begin(
            directory=tmp_path, resume=resume, make_scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5)
        )
        for _ in run.epochs(epochs):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            scheduler.step()
            run.save()
        return whole_state(run, model, optimizer, scheduler)

    by_epoch("", 1)
    assert by_epoch("auto", 3) == by_epoch("", 3)


def test_a_schedule_whose_first_step_overflowed_is_not_told_of_a_wrong_order():
    """torch's warning says that the loop steps the schedule before the optimizer; the step was skipped."""
    run, _, optimizer, scheduler = begin(
        precision="fp16", loss_scale=2.0**40, make_scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5)
    )
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert run.skipped_steps == 1


@pytest.mark.parametrize("stop", [STEPS, 2 * STEPS])
def test_a_schedule_may_be_stepped_first_in_a_run_that_goes_on_at_the_end_of_an_epoch(stop, tmp_path):
    """torch warned of a scheduler before its optimizer."""
    for last in (stop, None):
        run, _, optimizer, scheduler = begin(
            directory=tmp_path,
            resume="auto",
            make_scheduler=lambda optimizer: lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        )
        for _ in run.epochs(EPOCHS):
            for batch in run.batches(dataset(STEPS * 24)):
                train_step(run, batch, optimizer)
                if batch.plan.step + 1 == last:
                    run.save(wait=True)
                    break
            if run.position.step == last:
                break
            scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        run.close()
    assert rate == 0.1 * 0.5**EPOCHS


class Remembering(torch.optim.lr_scheduler.LRScheduler):
    """Keeps what no checkpoint holds."""

    def __init__(self, optimizer):
        self.seen = set()
        super().__init__(optimizer)

    def get_lr(self):
        return self.base_lrs


def test_what_a_checkpoint_cannot_hold_of_a_scheduler_is_named(tmp_path):
    run, *_ = begin(make_scheduler=Remembering, directory=tmp_path)
    with pytest.raises(ConfigError, match=r"^'schedulers\.0\.seen' is a set, which a checkpoint cannot hold"):
        run.save(wait=True)
