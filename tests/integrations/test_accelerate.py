"""Scripts written for Accelerate: the same loop, and the bits of ``run.backward``."""

import io
import logging
import os
import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import CheckpointError, ConfigError
from lockstep.integrations.accelerate import Accelerator


def parts(samples=24, drop_last=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    data = TensorDataset(torch.randn(samples, 4), torch.arange(samples) % 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(data, batch_size=12, shuffle=True, drop_last=drop_last)
    return model, optimizer, scheduler, loader


def train(world, samples=24, drop_last=True, clear_first=True):
    model, optimizer, scheduler, loader = parts(samples, drop_last)
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    if clear_first:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    else:  # as trainers do that make their loader first
        loader = accelerator.prepare(loader)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    seen = []
    for _ in range(3):
        model.train()
        for x, y in loader:
            if clear_first:
                optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            if not clear_first:
                optimizer.zero_grad()
        model.eval()
        hits = 0
        with torch.no_grad():
            for x, y in loader:
                found, wanted = accelerator.gather_for_metrics((model(x).argmax(1), y))
                hits += int((found == wanted).sum())
        seen.append(hits)
    return accelerator.run.fingerprint(), seen, scheduler.get_last_lr(), len(loader)


def reference(world, samples):
    model, optimizer, scheduler, loader = parts(samples, drop_last=False)
    run = lockstep.init(global_batch=12, micro_batches=4)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for _ in range(3):
        for batch in run.batches(loader):
            optimizer.zero_grad()
            run.backward(batch, nn.functional.cross_entropy)
            run.clip_gradients(0.5)
            optimizer.step()
            scheduler.step()
    return run.fingerprint()


@pytest.mark.parametrize("samples", [pytest.param(24, marks=pytest.mark.slow), 26])
def test_the_loop_of_accelerate_gives_the_bits_of_run_backward(samples):
    """With 26, the last step has two samples, in one micro-batch: the other processes have none."""
    (expected,) = run_ranks(reference, 1, samples)
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(train, ranks, samples, False)]
    assert {answer[0] for answer in answers} == {expected}
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][3] == -(-samples // 12)


def bounded(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    largest = []
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        if accelerator.sync_gradients:
            largest.append(max(float(each.grad.abs().max()) for each in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.run.fingerprint(), tuple(largest)


def test_gradients_are_bounded_once_they_are_summed():
    answers = {answer for ranks in (1, 2) for answer in run_ranks(bounded, ranks)}
    assert len(answers) == 1
    assert next(iter(answers))[1] == pytest.approx((1e-3, 1e-3))


def test_gradients_may_be_cleared_after_the_step():
    answers = run_ranks(train, 1, 24, True, False) + run_ranks(train, 2, 24, True, False)
    assert {answer[0] for answer in answers} == {run_ranks(train, 1)[0][0]}


def short(world):
    with pytest.raises(ConfigError, match="Use fewer processes"):
        train(world, samples=5, drop_last=False)


def test_a_first_step_that_some_process_has_no_part_of_is_refused_on_all():
    run_ranks(short, 3)


def habits(world):
    model, optimizer, _, loader = parts()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        Accelerator(global_batch=12, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"Leave 'log_with' out.*the tracker's own package"):
        Accelerator(global_batch=12, log_with="all")
    with pytest.raises(ConfigError, match="needs global_batch"):
        Accelerator()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    with pytest.raises(AttributeError, match=r"accelerator\.run"):
        accelerator.register_for_checkpointing(model)
    with pytest.raises(ConfigError, match="2 models"):
        accelerator.prepare(model, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"DataLoaders in any; this one has 0 models"):
        accelerator.prepare(optimizer, loader)
    loader = accelerator.prepare(loader)
    with pytest.raises(ConfigError, match=r"run\.prepare.* first"):
        next(iter(loader))
    model, optimizer = accelerator.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="without backward"):
        for x, _ in loader:
            model(x)


def test_habits_that_cannot_work_end_in_a_sentence():
    run_ranks(habits, 1)


def twice(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match="called twice"):
        for x, _y in loader:
            accelerator.backward(model(x).mean())
            accelerator.backward(model(x).mean())


def without_gradients(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with torch.no_grad():
        return sum(len(model(x)) for x, _ in loader)


def test_a_loop_without_gradients_is_an_evaluation_of_all_samples():
    assert run_ranks(without_gradients, 2) == [24, 24]


def accumulating(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match=r"step and zero_grad\(\) of AdamW.*larger global_batch"):
        for number, (x, _y) in enumerate(loader):
            accelerator.backward(model(x).mean())
            if number > 100:
                optimizer.step()


def body_that(habit, checks="first"):
    """Trains with a body that has one habit; what it keeps is in lists of its own."""
    model, optimizer, scheduler, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=2, checks=checks)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(habit(number, model, optimizer, x, loss, accelerator))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return accelerator.run.fingerprint(), float(accelerator.step_loss)


class CarriesState:
    state = 0.0

    def __call__(self, number, model, optimizer, x, loss, accelerator):
        before, self.state = self.state, model[0](x).mean().detach()
        return loss + before * model[0].weight.sum()


def own_generator(number, model, optimizer, x, loss, accelerator):
    return loss * torch.rand(1, generator=GENERATOR).squeeze()


GENERATOR = torch.Generator()


def sets_rate(number, model, optimizer, x, loss, accelerator):
    for group in optimizer.param_groups:
        group["lr"] = 0.1 / (1 + number)
    return loss


def sets_rate_later(number, model, optimizer, x, loss, accelerator):
    optimizer.param_groups[0]["lr"] = 0.1 if number < 3 else 0.05
    return loss


def depends_on_rank(number, model, optimizer, x, loss, accelerator):
    return loss * (1 + accelerator.process_index)


def keeping(world):
    for habit, found in [
        (CarriesState(), "the loss is not the same"),
        (own_generator, "the loss is not the same"),
        (sets_rate, "'lr' of group 0 of AdamW between two micro-batches"),
    ]:
        with pytest.raises(ConfigError, match=found):
            body_that(habit)
    assert body_that(CarriesState(), checks="off")
    with pytest.raises(ConfigError, match="'lr' of group 0 of AdamW between two micro-batches"):
        body_that(sets_rate_later, checks="off")


def test_what_the_body_keeps_from_one_pass_to_the_next_is_refused():
    run_ranks(keeping, 1)


def of_its_rank(world):
    with pytest.raises(ConfigError, match="other bits on other ranks"):
        body_that(depends_on_rank)


def test_a_loss_that_depends_on_the_rank_is_refused():
    run_ranks(of_its_rank, 2)


def sums_over_ranks(number, model, optimizer, x, loss, accelerator):
    torch.distributed.all_reduce(number := torch.tensor(float(len(x))))
    return loss * number / 12


def times_ranks(number, model, optimizer, x, loss, accelerator):
    return loss * torch.distributed.get_world_size()


def asking(world):
    with pytest.raises(ConfigError, match=r"all_reduce is called in the loop's body \(test_accelerate.py:\d+\)"):
        body_that(sums_over_ranks)


def told(world):
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    body_that(times_ranks)
    return sum("get_world_size()). What is computed" in each for each in said)


def test_a_body_that_asks_for_the_number_of_processes_is_told_and_one_that_exchanges_is_refused():
    """The first trained with another loss on each number of processes, and the second waited forever on three."""
    run_ranks(asking, 2)
    assert run_ranks(told, 2) == [1, 0]


def draws(number, model, optimizer, x, loss, accelerator):
    return loss * float(np.random.rand()) * random.random()


def drawing(world):
    return body_that(draws)


def test_numpy_and_random_are_seeded_for_each_micro_batch():
    """The loss of the last step is the mean over all processes on each of them."""
    assert len(set(run_ranks(drawing, 1) + run_ranks(drawing, 2))) == 1


def no_mean(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y, reduction="sum"))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.run.rehearsals.deviations


def test_a_loss_that_is_no_mean_is_warned_about(caplog):
    (found,) = run_ranks(no_mean, 1)
    assert "is a sum over the samples" in found["of the loop"]


def weighted(output, y):
    loss, size = nn.functional.cross_entropy(output, y), output.square().mean()
    return loss + size * (loss / size).detach()


class Centred(nn.Module):
    """Compares samples in training mode only."""

    def forward(self, x):
        return x - x.mean(0) if self.training else x


def said_of(world, kind):
    """What is said of a loop with hooks that see sums, a loss or a model of such a kind."""
    torch.manual_seed(0)
    norms, size = [0.0], 24 if "large" in kind else 8
    layers = [nn.BatchNorm1d(16)] if "norm" in kind else [Centred()] if "centred" in kind else []
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), *layers, nn.Dropout(0.1), nn.Linear(16, 3))
    if "bounded" in kind:
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    if "kept" in kind and (world.is_main or "all" in kind):
        model[0].bias.register_hook(lambda gradient: norms.__setitem__(0, float(gradient.norm())))
    if "doubled" in kind:
        model[0].weight.register_hook(lambda gradient: 2 * gradient)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    accelerator = Accelerator(global_batch=size, micro_batches=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=size))
    for x, y in loader:
        if "train" in kind:
            model.train()
        loss = weighted if "weighted" in kind else nn.functional.cross_entropy
        accelerator.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return [each for each in said if "The loop's body" not in each]


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("bounded", ["The gradient of '0.weight' does not double where the loss does"]),
        ("kept on all", ["A hook or the backward pass sets"]),
        ("norm", ["BatchNorm '2' normalises each micro-batch by itself, which has 4 samples of the 8"]),
        ("norm train", ["BatchNorm '2' normalises each micro-batch by itself"]),
        ("weighted", ["is a mean over samples by its value, and not by its gradient"]),
        ("centred", ["is not a mean over samples"]),
        ("doubled", []),
        ("large norm train", []),
        ("plain train", []),
    ],
)
def test_a_loop_is_told_what_run_backward_tells(kind, texts):
    """It was told nothing of hooks that see sums, of BatchNorm on few samples, nor of weights by values."""
    (said,) = run_ranks(said_of, 1, kind)
    assert [text in each for text, each in zip(texts, said, strict=True)] == [True] * len(texts), said


def test_a_hook_of_one_rank_makes_no_rank_wait():
    said, others = run_ranks(said_of, 2, "kept")
    assert "A hook or the backward pass sets" in said[0] and others == []


def left(world, reads):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    passes = 0
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        passes += accelerator.sync_gradients if reads else 1
        if passes >= (1 if reads else 8):
            break
    return accelerator.run.fingerprint()


def test_a_loop_that_is_left_by_a_count_of_its_passes_is_refused():
    with pytest.raises(ConfigError, match=r"under 'if accelerator\.sync_gradients:'"):
        run_ranks(left, 1, False)
    assert len({run_ranks(left, world, True)[0] for world in (1, 2)}) == 1


def taken_by_next(world, counts_steps):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches, steps = (batch for _ in range(9) for batch in loader), 0
    while steps < 3:
        x, y = next(batches)
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.wait_for_everyone()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.wait_for_everyone()
        steps += accelerator.sync_gradients if counts_steps else 1
    if counts_steps:
        assert accelerator.scaler is None
        return accelerator.run.fingerprint()
    with pytest.raises(ConfigError, match="in the middle of an optimizer step, of which they have"):
        accelerator.run.fingerprint()
    with pytest.raises(ConfigError, match=r"left before its end, by break or next\(\), and in the middle of an"):
        accelerator.end_training()
    return ""


def test_a_loop_that_takes_its_batches_by_next_counts_steps():
    """The script ended after a count of passes, with other bits on each number of processes, or hung."""
    assert run_ranks(taken_by_next, 1, False) == [""]
    assert run_ranks(taken_by_next, 3, False) == [""] * 3
    assert len({run_ranks(taken_by_next, world, True)[0] for world in (1, 3)}) == 1


HELD = """
import torch
from lockstep.integrations.accelerate import Accelerator

accelerator = Accelerator(global_batch=8, micro_batches=4)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.rand(64, 4), torch.zeros(64, dtype=torch.long))
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
batches, count = (batch for _ in range(9) for batch in loader), 0
while count < 7:
    x, y = next(batches)
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    count += ADDED
print("done")
"""


@pytest.mark.parametrize(
    ("added", "code"), [("1", 2), pytest.param("accelerator.sync_gradients", 0, marks=pytest.mark.slow)]
)
def test_a_script_that_says_nothing_at_its_end_has_an_exit_status_that_does(added, code):
    """It ended with other bits on each number of processes, an error in its output, and exit status 0."""
    script = HELD.replace("ADDED", added)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("done\n", code), done.stderr
    assert ("left before its end, by break or next(), and in the middle" in done.stderr) == bool(code)


def evaluating_inside(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        assert sum(len(model(x)) for x, _ in loader) == 24
        model.train()
    return accelerator.run.fingerprint()


def test_the_body_may_evaluate_after_any_micro_batch():
    assert len(set(run_ranks(evaluating_inside, 1) + run_ranks(evaluating_inside, 2))) == 1


def validating_by_next(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4, checks="off")
    model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, parts()[3])
    batches = (batch for _ in range(9) for batch in held_out)
    with pytest.raises(ConfigError, match=r"opens another loop: take it by next\(iter\(loader\)\), which ends at once"):
        for number, (x, _y) in enumerate(loader):
            accelerator.backward(model(x).mean())
            with torch.no_grad():
                model(next(iter(held_out) if number < 2 else batches)[0])
    assert number == 3


def test_a_batch_for_an_evaluation_that_is_taken_by_next():
    run_ranks(validating_by_next, 1)


def by_its_own_count(world):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4, checks="off")
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match=r"step\(\) of AdamW in 2 of 4 passes.*do not divide the loss"):
        for number, (x, _y) in enumerate(loader, 1):
            accelerator.backward(model(x).mean() / 2)
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()


def test_steps_by_a_count_of_passes_are_refused():
    """The step came with the last micro-batch of each, so nothing but half of the gradient showed it."""
    run_ranks(by_its_own_count, 1)


def test_accumulation_by_the_loop_itself_is_refused():
    run_ranks(accumulating, 1)


def test_two_backward_calls_for_one_micro_batch_are_refused():
    run_ranks(twice, 1)


def clipped(world):
    """Norms of a part that was clipped and of the rest, which was not; the norm that clipping gave; the fingerprint."""
    model, optimizer, scheduler, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if accelerator.sync_gradients:
            rest = nn.utils.get_total_norm([p.grad for p in model[1:].parameters()])
            norm = accelerator.clip_grad_norm_(model[0].parameters(), 1e-3)
            part = nn.utils.get_total_norm([p.grad for p in model[0].parameters()])
            after = nn.utils.get_total_norm([p.grad for p in model[1:].parameters()])
            found.append((float(norm) > float(part), round(float(part), 6), float(rest) == float(after)))
        optimizer.step()
        optimizer.zero_grad()
    return found, accelerator.run.fingerprint()


def test_clipping_a_part_leaves_the_rest():
    """All gradients were clipped together, whatever was given."""
    answers = [answer for ranks in (1, 2) for answer in run_ranks(clipped, ranks)]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == [(True, 1e-3, True)] * 2


def with_average(world, when):
    """Trains with a moving average of the weights; returns its bits, and how often it was updated."""
    model, optimizer, _, loader = parts()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, average = accelerator.prepare(model, optimizer, loader, average)
    for _ in range(2):
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients or when == "always":
                average.update_parameters(model)
    return [each.tolist() for each in average.parameters()], int(average.n_averaged)


def plain_average(world):
    """The same with a loop over ``run.batches``, and the average by hand."""
    model, optimizer, _, loader = parts()
    run = lockstep.init(global_batch=12, micro_batches=4)
    model, optimizer = run.prepare(model, optimizer)
    kept = None
    for _ in range(2):
        for batch in run.batches(loader):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            new = [each.detach().clone() for each in model.parameters()]
            kept = new if kept is None else [old.lerp(each, 0.5) for old, each in zip(kept, new)]
    return [each.tolist() for each in kept], 4


def averaged_in_each_pass(world):
    with pytest.raises(ConfigError, match=r"updated the AveragedModel between two micro-batches"):
        with_average(world, "always")


def test_a_moving_average_is_that_of_the_steps():
    (expected,) = run_ranks(plain_average, 1)
    assert run_ranks(with_average, 1, "steps") + run_ranks(with_average, 2, "steps") == [expected] * 3
    run_ranks(averaged_in_each_pass, 1)


def by_epoch(world, steps_it):
    """A scheduler that the script steps once for each epoch; the learning rates that the epochs had."""
    model, optimizer, _, loader = parts()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if steps_it:
            scheduler.step()
    return rates


def test_a_scheduler_may_be_stepped_once_for_each_epoch():
    """It was refused as one that is stepped by a count of passes."""
    assert run_ranks(by_epoch, 2, True) == [[0.05, 0.025, 0.0125]] * 2


def lengths(world):
    """Of a set that is evaluated in batches of 5: after the evaluation, and of another in it; of the training set."""
    model, optimizer, _, loader = parts()
    others, more = (DataLoader(TensorDataset(torch.randn(count, 4)), batch_size=5) for count in (23, 31))
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model.eval()  # as models of transformers are at first
    model, optimizer, loader, others, more = accelerator.prepare(model, optimizer, loader, others, more)
    first = len(loader)
    model.train()
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    batches, inside = sum(1 for _ in others), len(more)
    model.train()
    return first, batches, len(others), inside, len(loader), accelerator.num_processes


def test_the_length_of_an_evaluated_loader_is_the_number_of_its_batches():
    """A sum over the batches divided by it was no mean: it was the number of optimizer steps, 2."""
    assert run_ranks(lengths, 2) == [(2, 5, 5, 7, 2, 1)] * 2


def in_turn(world, folder):
    """The main process works before it writes; the others find what it has written."""
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    found = []
    for name, context in (
        ("all", accelerator.main_process_first),
        ("host", accelerator.local_main_process_first),
    ):
        with context():
            if accelerator.is_local_main_process:
                value = torch.randn(600, 600)
                for _ in range(50):
                    value = (value @ value).clamp(-1, 1)
                (folder / name).write_text("ready")
            found.append((folder / name).exists())
    accelerator.wait_for_everyone()
    return found


def test_the_main_process_goes_first(tmp_path):
    assert run_ranks(in_turn, 3, tmp_path) == [[True, True]] * 3


def resumed(world, folder, start, save_after, epochs=3, samples=36):
    """Trains as scripts for Accelerate resume: from ``start`` steps on; saves after ``save_after`` steps, if any."""
    model, optimizer, scheduler, loader = parts(samples, drop_last=False)
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    first, skipped, done = 0, 0, start
    if start:
        accelerator.load_state(folder / f"step_{start}")
        first, skipped = divmod(start, len(loader))
    for epoch in range(first, epochs):
        loader.set_epoch(epoch)
        model.train()
        active = accelerator.skip_first_batches(loader, skipped) if start and epoch == first else loader
        for x, y in active:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                if done == save_after:
                    accelerator.save_state(folder / f"step_{done}")
                    return None
    return accelerator.run.fingerprint(), done, scheduler.get_last_lr()


@pytest.mark.parametrize("stop", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_goes_on_from_save_state_on_another_number_of_processes(tmp_path, stop):
    """Stopped within an epoch of three steps, and with its last one."""
    (expected,) = run_ranks(resumed, 1, tmp_path, 0, 0)
    run_ranks(resumed, 2, tmp_path, 0, stop)
    assert run_ranks(resumed, 3, tmp_path, stop, 0) == [expected] * 3
    assert expected[1] == 9


def resumed_at_a_short_step(world, folder):
    with pytest.raises(ConfigError) as refused:
        resumed(world, folder, 2, 0, samples=26)
    return str(refused.value)


def test_a_run_that_goes_on_at_a_step_of_too_few_micro_batches_is_told_so(tmp_path):
    """The loop's body was said to have called neither step nor zero_grad()."""
    run_ranks(resumed, 2, tmp_path, 0, 2, 3, 26)
    for said in run_ranks(resumed_at_a_short_step, 3, tmp_path):
        assert said == (
            "The step at which the run resumes has 2 samples, so 1 micro-batches, for 3 processes. Use fewer "
            "processes, or more micro_batches from the start."
        )
    assert run_ranks(resumed, 1, tmp_path, 2, 0, 3, 26) == run_ranks(resumed, 1, tmp_path, 0, 0, 3, 26)


def saving_anywhere(world, folder):
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        accelerator.load_state(folder)
    with pytest.raises(ConfigError, match="asked to skip 1 batches"):
        accelerator.skip_first_batches(loader, 1)
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        if accelerator.sync_gradients:
            with pytest.raises(ConfigError, match=r"between run\.backward and"):
                accelerator.save_state(folder)
        optimizer.step()
        optimizer.zero_grad()
        if not accelerator.sync_gradients:
            with pytest.raises(ConfigError, match="in the middle of an optimizer step"):
                accelerator.save_state(folder)
    with pytest.raises(ConfigError, match="after steps of training"):
        accelerator.load_state(folder)


def test_save_state_and_load_state_say_where_they_belong(tmp_path):
    run_ranks(saving_anywhere, 1, tmp_path)


def of_last_batch(world):
    """A mean as scripts take it, of each batch's mean repeated, beside that of all; how many rows were gathered."""
    model, optimizer, _, loader = parts()
    samples = torch.arange(30.0).square()
    some = torch.utils.data.SubsetRandomSampler(range(23))
    others, samples = DataLoader(TensorDataset(samples), batch_size=5, sampler=some), samples[:23]
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, others = accelerator.prepare(model, optimizer, loader, others)
    model.eval()
    means, names = [], []
    for (x,) in others:
        means.append(accelerator.gather_for_metrics({"loss": x.mean().repeat(5)})["loss"])
        names += accelerator.gather_for_metrics(["name"] * 5, use_gather_object=True)
    afterwards = accelerator.gather_for_metrics(torch.cat(means))
    return float(torch.cat(means).mean()), float(samples.mean()), len(names), len(afterwards)


def test_a_smaller_last_batch_counts_as_what_it_is():
    """Accelerate cuts what is gathered of it to its rows, on one process, too."""
    for found, expected, names, afterwards in run_ranks(of_last_batch, 2):
        assert found == pytest.approx(expected) and names == afterwards == 23


def logging_on_ranks(world):
    """The lines that a logger of accelerate writes on this process, and the number of torch's threads."""
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # as launchers set it
    from accelerate.logging import get_logger

    accelerator, written = Accelerator(global_batch=12, micro_batches=4), io.StringIO()
    logging.getLogger("a script").addHandler(logging.StreamHandler(written))
    get_logger("a script").warning("of all", main_process_only=False)
    get_logger("a script").warning("of the first")
    return written.getvalue(), accelerator.state.num_processes, torch.get_num_threads()


def test_the_logger_of_accelerate_knows_the_processes():
    """It raised an error that named Accelerate's own Accelerator."""
    pytest.importorskip("accelerate", exc_type=ImportError)
    first, second = run_ranks(logging_on_ranks, 2)
    assert ("of the first" in first[0], "of the first" in second[0]) == (True, False)
    assert first[1:] == second[1:] == (2, 1)


def some_steps(world, clear_first):
    """Two of three steps of each of three epochs."""
    model, optimizer, scheduler, loader = parts(samples=36)
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        done = 0
        for x, y in loader:
            if clear_first:
                optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            scheduler.step()
            if not clear_first:
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            if done == 2:
                break
    return accelerator.run.fingerprint(), accelerator.run.position.step, accelerator.run.position.epoch


def some_steps_by_hand(world):
    model, optimizer, scheduler, loader = parts(samples=36)
    run = lockstep.init(global_batch=12, micro_batches=4)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for _ in run.epochs(3):
        for batch in run.batches(loader):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if batch.plan.position == 1:
                break
    return run.fingerprint(), run.position.step, run.position.epoch


def test_a_loop_that_is_left_ends_the_epoch_and_its_gradients():
    """The next loop was refused, as if the optimizer had been stepped by a count of passes."""
    (expected,) = run_ranks(some_steps_by_hand, 1)
    assert expected[1:] == (6, 3)
    for clear_first in (True, False):
        assert run_ranks(some_steps, 1, clear_first) + run_ranks(some_steps, 3, clear_first) == [expected] * 4


def body_that_adds(add, checks="first"):
    """Trains for two epochs with a body that calls ``add`` in each pass, and returns the warnings of the adapter."""
    warnings = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger("lockstep.integrations.accelerate").addHandler(handler)
    model, optimizer, _, loader = parts()
    accelerator = Accelerator(global_batch=12, micro_batches=2, checks=checks)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            add(loss, x, accelerator)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    return [each.getMessage() for each in warnings]


class Meter:
    total, count = 0.0, 0

    def update(self, value, rows):
        self.total += value
        self.count += rows


def in_a_variable(world):
    total = 0.0

    def add(loss, x, accelerator):
        nonlocal total
        total += loss.item()

    body_that_adds(add)


def in_a_tensor(world):
    total = torch.zeros(())
    body_that_adds(lambda loss, x, accelerator: total.add_(loss.detach()))


def in_a_list(world):
    losses = []
    body_that_adds(lambda loss, x, accelerator: losses.append(loss.detach()))


def in_a_meter(world):
    meters = {"loss": Meter()}
    body_that_adds(lambda loss, x, accelerator: meters["loss"].update(loss.item(), 1))


def rows(world):
    seen = {"rows": 0}
    body_that_adds(lambda loss, x, accelerator: seen.update(rows=seen["rows"] + len(x)))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (in_a_variable, "in_a_variable: total"),
        (in_a_tensor, "in_a_tensor: total"),
        (in_a_list, "in_a_list: losses"),
        (in_a_meter, r"in_a_meter: meters\['loss'\].total"),
        (rows, r"rows: seen\['rows'\]"),
    ],
)
def test_a_sum_over_passes_is_refused(program, name, processes):
    """It was printed as the loss of the epoch: another number on each number of processes, and too large on all."""
    with pytest.raises(ConfigError, match=f"adds to .*{name}.* in each pass.*accelerator.step_loss"):
        run_ranks(program, processes)


def of_steps(world):
    sums = {"total": 0.0, "steps": 0, "passes": 0, "seconds": 0.0, "began": time.perf_counter(), "last": 0.0}

    def add(loss, x, accelerator):
        seconds = sums["seconds"] + time.perf_counter() - sums["began"]
        sums.update(passes=sums["passes"] + 1, seconds=seconds, began=time.perf_counter(), last=loss.item())
        if accelerator.sync_gradients:
            sums["total"] += float(accelerator.step_loss or 0.0)
            sums["steps"] += 1

    warnings = body_that_adds(add)
    return sums["total"], sums["steps"], warnings


def test_sums_over_steps_and_a_count_of_passes_are_not_refused():
    (*one, [of_two]), (*first, [of_one]), (*second, of_the_second) = *run_ranks(of_steps, 1), *run_ranks(of_steps, 2)
    assert one == first == second and one[1] == 4
    assert "2 for each optimizer step" in of_two and "1 for each optimizer step" in of_one
    assert "accelerator.step_loss" in of_one and not of_the_second


def unchecked(world):
    total = torch.zeros(())
    body_that_adds(lambda loss, x, accelerator: total.add_(loss.detach()), checks="off")
    return float(total)


def test_without_checks_a_sum_over_passes_is_that_of_this_process():
    (one,), (first, second) = run_ranks(unchecked, 1), run_ranks(unchecked, 2)
    assert first != second and one == pytest.approx(first + second)
