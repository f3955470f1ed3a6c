"""Slips and habits of ordinary programs: the bits of one device in every layout, or one sentence with the remedy."""

import contextlib
import functools
import re

import pytest
import torch
from tests.sameness.layouts import LAYOUTS, outcomes
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions

pytestmark = pytest.mark.timeout(180)
X = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(20) % 3
ROWS = TensorDataset(X, Y)


def opened(world, settings, **options):
    recipe = {"global_batch": 12, "micro_batches": 6, "seed": 3, "threads": 1}
    return Run(RunOptions.of(**{**recipe, **options, **settings}), world)


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    world,
    settings,
    body=None,
    data=ROWS,
    loss=None,
    model=None,
    make=momentum,
    before=None,
    epochs=2,
    **options,
):
    """Two epochs of two steps; ``body(run, model, optimizer, batch)`` instead of the usual one."""
    run, model = opened(world, settings, **options), model or layers()
    model, optimizer = run.prepare(model, make(model))
    found = {}
    for _ in run.epochs(epochs):
        for batch in run.batches(data):
            if body is not None:
                if body(run, model, optimizer, batch) == "break":
                    break
            else:
                found[f"loss {batch.plan.step}"] = run.backward(batch, loss or nn.CrossEntropyLoss())
                optimizer.step()
                optimizer.zero_grad()
    return ended(run, found)


def ended(run, found=()):
    state = {name: tensor.clone() for name, tensor in run.state_dict().items()}
    fingerprint = run.fingerprint()
    run.close()
    return {**dict(found), **(state if run.is_main else {}), fingerprint: torch.zeros(1)}


def step(run, model, optimizer, batch):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()


def in_evaluation_mode(world, settings):
    model = layers()
    model.eval()
    return train(world, settings, model=model)


def made_before_double(world, settings):
    model = layers()
    optimizer = momentum(model)
    model.double()
    return train(world, settings, data=TensorDataset(X.double(), Y), model=model, make=lambda _: optimizer)


def some_parameters(world, settings):
    return train(world, settings, make=lambda model: torch.optim.Adam(model[4].parameters()))


def two_groups(world, settings):
    def make(model):
        groups = [{"params": model[:2].parameters()}, {"params": model[4].parameters(), "lr": 0.01}]
        return torch.optim.AdamW(groups, lr=0.1)

    return train(world, settings, make=make)


def one_hot(world, settings):
    return train(world, settings, data=TensorDataset(X, F.one_hot(Y, 3).float()))


def losses_of_rows(world, settings):
    return train(world, settings, loss=nn.CrossEntropyLoss(reduction="none"))


def samples_with_gradients(world, settings):
    return train(world, settings, data=TensorDataset(X.clone().requires_grad_(), Y))


def a_list_of_samples(world, settings):
    return train(world, settings, data=[(X[i].numpy(), int(Y[i])) for i in range(20)])


def two_samples(world, settings):
    return train(world, settings, data=TensorDataset(X[:2], Y[:2]))


def left_early(world, settings):
    def body(run, model, optimizer, batch):
        step(run, model, optimizer, batch)
        return "break"

    return train(world, settings, body)


def returned_early(world, settings):
    run, model = opened(world, settings), layers()
    model, optimizer = run.prepare(model, momentum(model))

    def walk():
        for _ in run.epochs(2):
            for batch in run.batches(ROWS):
                step(run, model, optimizer, batch)
                return

    walk()
    walk()
    return ended(run)


def batches_without_a_step(world, settings):
    def body(run, model, optimizer, batch):
        if batch.plan.step % 2 == 0:
            step(run, model, optimizer, batch)

    return train(world, settings, body)


def every_second(world, settings):
    def body(run, model, optimizer, batch):
        run.backward(batch, nn.CrossEntropyLoss())
        if batch.plan.step % 2:
            optimizer.step()
            optimizer.zero_grad()

    return train(world, settings, body)


def never_zeroed(world, settings):
    def body(run, model, optimizer, batch):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()

    return train(world, settings, body)


def zeroed_before(world, settings):
    def body(run, model, optimizer, batch):
        optimizer.zero_grad()
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()

    return train(world, settings, body)


def zeroed_between(world, settings):
    def body(run, model, optimizer, batch):
        run.backward(batch, nn.CrossEntropyLoss())
        if batch.plan.step == 1:
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return train(world, settings, body)


def stepped_twice(world, settings):
    def body(run, model, optimizer, batch):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()

    return train(world, settings, body)


def modes_between(world, settings):
    def body(run, model, optimizer, batch):
        model.train(batch.plan.step % 2 == 0)
        step(run, model, optimizer, batch)

    return train(world, settings, body)


def evaluated_in_the_loop(world, settings):
    def body(run, model, optimizer, batch):
        run.evaluate(ROWS, lambda output, target: output.argmax(1) == target)
        step(run, model, optimizer, batch)

    return train(world, settings, body)


def batches_in_a_list(world, settings):
    run, model = opened(world, settings), layers()
    model, optimizer = run.prepare(model, momentum(model))
    for batch in list(run.batches(ROWS)):
        step(run, model, optimizer, batch)
    return ended(run)


def one_batch_again_and_again(world, settings):
    run, model = opened(world, settings), layers()
    model, optimizer = run.prepare(model, momentum(model))
    batch = next(run.batches(ROWS))
    for _ in range(3):
        step(run, model, optimizer, batch)
    return ended(run)


def rate_by_hand(world, settings):
    def body(run, model, optimizer, batch):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + batch.plan.step)
        step(run, model, optimizer, batch)

    return train(world, settings, body)


def scheduled_first(world, settings):
    run, model = opened(world, settings), layers()
    own = momentum(model)
    model, optimizer, schedule = run.prepare(model, own, torch.optim.lr_scheduler.StepLR(own, 1, 0.5))
    for _ in run.epochs(2):
        for batch in run.batches(ROWS):
            schedule.step()
            step(run, model, optimizer, batch)
    return ended(run)


def scheduled_after_prepare(world, settings):
    run, model = opened(world, settings), layers()
    model, optimizer = run.prepare(model, momentum(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for batch in run.batches(ROWS):
        step(run, model, optimizer, batch)
        schedule.step()
    return ended(run)


EQUAL = (
    in_evaluation_mode,
    made_before_double,
    some_parameters,
    two_groups,
    one_hot,
    losses_of_rows,
    samples_with_gradients,
    a_list_of_samples,
    two_samples,
    left_early,
    returned_early,
    batches_without_a_step,
    every_second,
    never_zeroed,
    zeroed_before,
    zeroed_between,
    stepped_twice,
    modes_between,
    evaluated_in_the_loop,
    batches_in_a_list,
    one_batch_again_and_again,
    rate_by_hand,
    scheduled_first,
    scheduled_after_prepare,
)


@functools.cache
def alone():
    return outcomes(EQUAL, "single")


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name not in ("single", "tensor")],
)
def test_habits_have_the_bits_of_one_device(layout):
    for program, expected, found in zip(EQUAL, alone(), outcomes(EQUAL, layout)):
        assert not expected.fault and not expected.refusal, (program.__name__, expected)
        assert found == expected, f"{program.__name__}, {layout}: {found}"


def refused(sentence, **arguments):
    """A case of ``train`` that is refused with a sentence."""
    return sentence, arguments


def failing(*_):
    raise ValueError("flaky")


def clipped(norm):
    def body(run, model, optimizer, batch):
        run.backward(batch, nn.CrossEntropyLoss())
        run.clip_gradients(norm)

    return body


def clipped_before(run, model, optimizer, batch):
    run.clip_gradients(1.0)


class Pair(nn.Sequential):
    def forward(self, x):
        return super().forward(x), x


class Detached(nn.Sequential):
    def forward(self, x):
        return super().forward(x).detach()


def frozen():
    return layers().requires_grad_(False)


def loss_without(function):
    return lambda output, target: function(F.cross_entropy(output, target))


REFUSED = {
    "float classes": refused("The target is float32.*target.long", data=TensorDataset(X, Y.float())),
    "int classes": refused("The target is int32.*target.long", data=TensorDataset(X, Y.int())),
    "a column": refused(r"a column too many: target.squeeze\(1\)", data=TensorDataset(X, Y[:, None])),
    "one-hot int": refused(r"target.float\(\), or target.argmax", data=TensorDataset(X, F.one_hot(Y, 3))),
    "labels from 3": refused("has 3 classes, numbered 0 to 2, and the targets", data=TensorDataset(X, Y + 3)),
    "labels as text": refused("target is tuple of 2 str", data=[(X[i], "cat") for i in range(20)]),
    "tuple": refused(r"lambda output, target: cross_entropy\(output\[0\], target\)", model=Pair),
    "binary int": refused(
        r"floating-point: target.float\(\)",
        data=TensorDataset(X, Y > 0),
        loss=lambda output, target: F.binary_cross_entropy_with_logits(output[:, 0], target),
    ),
    "float loss": refused(r"the tensor itself, without item\(\)", loss=loss_without(float)),
    "detached loss": refused("loss has no gradient, though", loss=loss_without(torch.Tensor.detach)),
    "accuracy": refused("use no argmax", loss=lambda output, target: (output.argmax(1) == target).float().mean()),
    "detached output": refused("neither has the output", model=Detached),
    "no return": refused("a line with return", loss=lambda output, target: None),
    "a dict": refused(r"run\.backward\(batch, f, also=", loss=lambda output, target: {"loss": output.sum()}),
    "a class": refused(r"Create an instance: run.backward\(batch, CrossEntropyLoss\(\)\)", loss=nn.CrossEntropyLoss),
    "frozen": refused("No parameter of the model requires a gradient", model=frozen),
    "a path": refused("was given the path 'data/train'", data="data/train"),
    "a dict of sets": refused("a dict with the keys 'train'", data={"train": ROWS}),
    "a tuple of tensors": refused(r"TensorDataset\(inputs, targets\)", data=(X, Y)),
    "no number": refused("global_batch should be an integer and is 12.0", global_batch=12.0),
    "no seed": refused("seed should be an integer and is None", seed=None),
    "no norm": refused("a norm of 0 or more, and was given None", body=clipped(None)),
    "negative norm": refused("a norm of 0 or more, and was given -1.0", body=clipped(-1.0)),
    "clipped before": refused("before run.backward", body=clipped_before),
    "None": refused(r"is None at \[1\].*collate function", data=[(X[i], None) for i in range(20)]),
    "lengths": refused(
        r"is of shape \(\d+,\) at \[0\], and sample \d+ is of shape",
        data=[(torch.ones(i + 1), 1) for i in range(20)],
    ),
}


def refused_ones(world, settings):
    """The message in each case."""
    found = {}
    for name, (_, arguments) in REFUSED.items():
        given = dict(arguments)
        if "model" in given:
            make = given["model"]
            given["model"] = make() if make is frozen else make(*layers())
        try:
            train(world, settings, **given)
        except Exception as error:
            found[f"{name}: {type(error).__name__}: {error}"] = torch.zeros(1)
    return found


@pytest.mark.parametrize("layout", ["single", "ddp"])
def test_mistakes_end_in_a_sentence_on_every_rank(layout):
    (found,) = outcomes((refused_ones,), layout)
    said = list(found.digests)
    assert [text.partition(":")[0] for text in said] == list(REFUSED), found.fault
    for text, (sentence, _) in zip(said, REFUSED.values()):
        assert re.search(f"(Config|Data)Error: .*{sentence}", text), text


def with_note(world, settings, **arguments):
    try:
        train(world, settings, **arguments)
    except Exception as error:
        return " ".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("nothing was raised")


def test_other_errors_of_the_model_and_the_loss_show_what_they_were_given(in_one_process):
    said = with_note(*in_one_process, data=TensorDataset(X.double(), Y))
    assert re.search(r"input is float64 and the model float32.*\(float64 \[2, 6\], int64 \[2\]\)", said), said
    said = with_note(*in_one_process, data=[(X[i], int(Y[i]), "name") for i in range(20)])
    assert "(float32 [2, 6], int64 [2], list of 2 str)" in said or "tuple of 2 str" in said, said
    said = with_note(*in_one_process, loss=failing)
    assert "as loss(output, target), with the output float32 [2, 3] and the target int64 [2]" in said, said


@pytest.fixture
def in_one_process():
    from lockstep.core.world import World

    return World(), {"strategy": "single"}


def caught(world, settings):
    """Goes on after an error in the loss, on every rank alike."""

    def body(run, model, optimizer, batch):
        try:
            run.backward(batch, failing)
        except ValueError:
            return
        optimizer.step()

    return train(world, settings, body)


def test_a_step_after_a_caught_error_is_refused_where_other_ranks_may_wait():
    (found,) = outcomes((caught,), "ddp")
    assert "run.backward of step 0 raised ValueError (flaky), which was caught" in found.refusal, found
    (found,) = outcomes((caught,), "single")
    assert not found.refusal and not found.fault, found


def without_weight(world, settings):
    """No sample counts, as where all targets are masked."""
    return train(world, settings, loss=lambda output, target: (output.sum() * 0, 0))


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "pipeline", "servers"])
def test_a_step_without_weight_is_refused(layout):
    """Under ``fsdp`` all weights became NaN, and the run ended with exit status 0."""
    (found,) = outcomes((without_weight,), layout)
    assert "The loss of step 0 has no mean, since its weights add up to 0" in found.refusal, found


def caught_evaluation(world, settings):
    """The same of an evaluation."""

    def body(run, model, optimizer, batch):
        step(run, model, optimizer, batch)
        with contextlib.suppress(ValueError):
            run.evaluate(ROWS, failing)

    return train(world, settings, body)


def test_a_step_after_a_caught_error_of_an_evaluation_is_refused_where_other_ranks_may_wait():
    (found,) = outcomes((caught_evaluation,), "ddp")
    assert "An evaluation raised ValueError (flaky), which was caught" in found.refusal, found


def other_scheduler(world, settings):
    run, model = opened(world, settings), layers()
    schedule = torch.optim.lr_scheduler.StepLR(momentum(model), 1)
    run.prepare(model, momentum(model), schedule)


def test_a_scheduler_of_another_optimizer_is_refused():
    (found,) = outcomes((other_scheduler,), "single")
    assert re.search(r"Scheduler 0 \(StepLR\) sets the learning rate of another SGD", found.refusal), found
