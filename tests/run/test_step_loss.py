import re

import pytest
import torch
from tests.run.jobs import begin, dataset, train_step
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import ConfigError
from lockstep.run.step import sum_and_weight, with_exact_mean


def whole_and_parts(loss, output, target):
    """The loss over everything at once, and put together from micro-batches of 3."""
    function = with_exact_mean(loss)
    total = weight = torch.zeros(())
    for first in range(0, len(output), 3):
        part = function(output[first : first + 3], target[first : first + 3])
        part_sum, part_weight = sum_and_weight(part, len(output[first : first + 3]))
        total, weight = total + part_sum, weight + part_weight
    return loss(output, target), total / weight


def random_batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10, 4, generator=generator), torch.randint(0, 4, (10,), generator=generator)


def test_class_weights_give_the_mean_of_the_whole_batch():
    whole, parts = whole_and_parts(nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0, 2.0])), *random_batch())
    torch.testing.assert_close(whole, parts)


class Noted(torch.Tensor):
    """As a tensor of MONAI: refuses what would mix its notes."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func.__name__ not in ("stack", "cat", "copy_", "__getitem__"), func
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("make", [lambda x: x.mean(), lambda x: x, lambda x: (x.sum(), (x != 0).sum())])
def test_a_loss_of_a_class_of_tensors_is_taken_as_a_plain_one(make):
    """A step ended in an error of that class, in a function of Lockstep's."""
    x = torch.ones(3, requires_grad=True)
    total, weight = sum_and_weight(make(x.as_subclass(Noted)), 3)
    assert type(total) is type(weight) is torch.Tensor and (total / weight).item() == 1
    total.backward()
    assert x.grad.tolist() == [1, 1, 1]


def test_ignored_targets_do_not_count():
    output, target = random_batch()
    target[[0, 4, 5]] = -100
    whole, parts = whole_and_parts(nn.CrossEntropyLoss(label_smoothing=0.1), output, target)
    torch.testing.assert_close(whole, parts)


def test_a_micro_batch_whose_targets_are_all_ignored_adds_nothing():
    output, target = random_batch()
    output.requires_grad_()
    target[3:6] = -100
    whole, parts = whole_and_parts(nn.CrossEntropyLoss(), output, target)
    torch.testing.assert_close(whole, parts)
    parts.backward()
    assert output.grad is not None and output.grad.isfinite().all()


def test_a_loss_that_returns_no_gradient_where_nothing_counts_has_the_gradient_of_one_that_does():
    def trained(loss):
        run, _, optimizer = begin(strategy="single")
        for batch in run.batches(TensorDataset(dataset().tensors[0], torch.arange(53) // 3 % 4), shuffle=False):
            train_step(run, batch, optimizer, loss)
        found = run.fingerprint()
        run.close()
        return found

    def counted(output, target):
        some = target < 3
        return nn.functional.cross_entropy(output[some], target[some], reduction="sum"), some.sum()

    def early(output, target):
        return counted(output, target) if (target < 3).any() else (torch.zeros(()), 0)

    assert trained(early) == trained(counted)


def test_class_probabilities_are_averaged_over_samples():
    output, _ = random_batch()
    whole, parts = whole_and_parts(nn.CrossEntropyLoss(), output, output.softmax(1))
    torch.testing.assert_close(whole, parts)


@pytest.mark.parametrize("given", [{}, {"label_smoothing": 0.1}, {"weight": torch.tensor([1.0, 2.0, 3.0])}])
def test_class_probabilities_of_pixels_are_averaged_over_pixels(given):
    """The loss was that of a sample: as many times too large as a sample has pixels, and the gradient too."""
    output = torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    whole, parts = whole_and_parts(nn.CrossEntropyLoss(**given), output, (2 * output).softmax(1))
    torch.testing.assert_close(whole, parts)


def test_a_mean_over_a_ragged_tail_counts_its_samples():
    output, target = random_batch()
    whole, parts = whole_and_parts(nn.functional.cross_entropy, output, target)
    torch.testing.assert_close(whole, parts)


def test_one_value_per_token_counts_tokens():
    total, weight = sum_and_weight(torch.ones(2, 5), 2)
    assert (float(total), float(weight)) == (10.0, 10.0)


@pytest.mark.parametrize(("dtype", "each"), [(torch.bfloat16, 1.0), (torch.float16, 300.0)])
def test_weights_of_16_bits_are_added_up_in_more(dtype, each):
    """The mask of 301 tokens weighed 300 in bf16, and larger weights were infinite in fp16."""
    mask = torch.full((301,), each, dtype=dtype)
    total, weight = sum_and_weight((2 * mask, mask), 7)
    assert (float(total), float(weight)) == (2 * 301 * each, 301 * each)
    loss = nn.CrossEntropyLoss(weight=torch.full((3,), each, dtype=dtype))
    _, weight = with_exact_mean(loss)(torch.zeros(301, 3, dtype=dtype), torch.zeros(301, dtype=torch.int64))
    assert float(weight) == 301 * each


def test_a_metric_that_is_one_small_whole_number_does_not_overflow():
    total, weight = sum_and_weight(torch.tensor(100, dtype=torch.uint8), 7)
    assert (float(total), float(weight)) == (700.0, 7.0)


def test_a_loss_or_metric_may_write_its_numbers_into_the_same_tensors_again():
    """They are added up when all micro-batches are done, and were then all like the last one of this process."""
    total, weight = torch.zeros(()), torch.zeros(())
    found = [sum_and_weight((total.fill_(n), weight.fill_(2 * n)), 3) for n in (1.0, 2.0)]
    assert found == [(1.0, 2.0), (2.0, 4.0)]


def test_a_weight_that_depends_on_parameters_is_refused():
    """Its gradient was left out without a word, in a mean with learned weights, or for a loss that returns two."""
    values = torch.ones(3, requires_grad=True)
    with pytest.raises(ConfigError, match=r"its second number depends on parameters.*weight.detach\(\)"):
        sum_and_weight((values.sum(), values.sum()), 3)
    assert sum_and_weight((values.sum(), values.sum().detach()), 3)[1] == 3


def test_a_loss_that_sums_is_refused():
    with pytest.raises(ConfigError, match="reduction='mean'"):
        with_exact_mean(nn.MSELoss(reduction="sum"))


class Penalised(nn.CrossEntropyLoss):
    """Adds a mean to torch's mean, and counts its calls."""

    calls = 0

    def forward(self, output, target):
        self.calls += 1
        return super().forward(output, target) + output.square().mean()


def test_a_derived_loss_with_a_forward_of_its_own_is_called_as_it_is():
    loss, output, target = Penalised(), torch.randn(6, 3), torch.arange(6) % 3
    total, weight = sum_and_weight(with_exact_mean(loss)(output, target), 6)
    assert float(total / weight) == pytest.approx(float(Penalised()(output, target)))
    with_exact_mean(loss)(output, target)
    assert loss.calls == 2


@pytest.mark.parametrize(("micro_batches", "other_step", "told"), [(4, None, True), (2, None, False), (4, 3, False)])
def test_losses_of_exactly_zero_are_told_once(caplog, micro_batches, other_step, told):
    """Triplets of an anchor, one of its class and one of another, of which two samples have none."""
    run, _, optimizer = begin(global_batch=8, micro_batches=micro_batches)
    steps = [0]

    def triplets(output, target):
        rows = range(len(output))
        found = [
            (output[a] - output[p]).norm() - (output[a] - output[n]).norm() + 5.0
            for a in rows
            for p in rows
            for n in rows
            if a != p and target[a] == target[p] != target[n]
        ]
        return sum(found, output.sum() * 0.0) / max(1, len(found)) + (steps[0] == other_step)

    while steps[0] < 12:
        for batch in run.batches(dataset()):
            run.backward(batch, triplets)
            optimizer.step()
            optimizer.zero_grad()
            steps[0] += 1
    said = f"The loss of the first 8 steps is exactly 0, so nothing is trained.* micro-batch of {8 // micro_batches}"
    assert len(re.findall(said, caplog.text)) == told, caplog.text
