"""Scripts written for Accelerate: the same loop, and the bits of ``run.backward``."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
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
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
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


@pytest.mark.parametrize("samples", [24, 26])
def test_the_loop_of_accelerate_gives_the_bits_of_run_backward(samples):
    """With 26, the last step has two samples, in one micro-batch: the other processes have none."""
    (expected,) = run_ranks(reference, 1, samples)
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(train, ranks, samples, False)]
    assert {answer[0] for answer in answers} == {expected}
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][3] == -(-samples // 12)


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
    accelerator = Accelerator(global_batch=12, micro_batches=4)
    with pytest.raises(AttributeError, match=r"accelerator\.run"):
        accelerator.save_state("here")
    with pytest.raises(ConfigError, match="2 models"):
        accelerator.prepare(model, nn.Linear(1, 1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
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


def test_accumulation_by_the_loop_itself_is_refused():
    run_ranks(accumulating, 1)


def test_two_backward_calls_for_one_micro_batch_are_refused():
    run_ranks(twice, 1)
