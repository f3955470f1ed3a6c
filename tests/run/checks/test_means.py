"""Means over samples are told apart from sums, other means, and numbers of the whole batch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, normalize, pad
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import lockstep
from lockstep.run.checks.means import Deviation, checked, deviation, judge_metrics, reasons
from lockstep.run.step import with_exact_mean

NONE, SUM, WEIGHTED, FUNCTION, OTHER, ONE_ENTRY, UNKNOWN, UNCLEAR, PAIR, NO_SUM, GRADIENT, *_ = Deviation


def rows(count=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 4, generator=generator), torch.randint(0, 4, (count,), generator=generator)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def hits(output, target):
    return (output.argmax(1) == target).sum()


def f1(output, target):
    found, there = output.argmax(1) == 1, target == 1
    return 2 * (found & there).sum() / (found.sum() + there.sum())


def top(output, target):
    """As scripts for ImageNet write it: a tensor of shape [1]."""
    _, found = output.topk(2, 1)
    correct = found.t().eq(target.view(1, -1).expand(2, -1))
    return correct.reshape(-1).float().sum(0, keepdim=True).mul_(100 / len(target))


def never(output, target):
    return torch.zeros(1)


def contrastive(output, target):
    similar = normalize(output) @ normalize(output).T / 0.1
    return cross_entropy(similar, torch.arange(len(output)))


def of_boxes(output, target):
    """As detectors write it: the first column of a box is the number of its sample."""
    has_one = torch.zeros(len(output))
    has_one[target[target < len(output)]] = 1
    return binary_cross_entropy_with_logits(output[:, 0], has_one)


def noisy(output, target):
    return cross_entropy(output + torch.randn_like(output), target)


def fixed_size(output, target):
    return mse_loss(output.view(64, 4), pad(target[:, None].float(), (0, 3)))


def squeezed(output, target):
    """As scripts for two classes write it; one row loses its dimension."""
    return binary_cross_entropy_with_logits(output[:, :1].squeeze(), (target > 1).float())


def masked(output, target):
    weights = (target != 0).float()
    return (cross_entropy(output, target, reduction="none") * weights).sum() / weights.sum()


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (accuracy, NONE),
        (cross_entropy, NONE),
        (lambda output, target: cross_entropy(output, target, reduction="none"), NONE),
        (lambda output, target: (cross_entropy(output, target, reduction="sum"), len(target)), NONE),
        (lambda output, target: accuracy(output, target) - 0.5, NONE),
        (with_exact_mean(nn.CrossEntropyLoss(weight=torch.rand(4), ignore_index=2)), NONE),
        (noisy, NONE),
        (of_boxes, Deviation.UNTESTED),
        (top, ONE_ENTRY),
        (never, ONE_ENTRY),
        (lambda output, target: top(output, target).squeeze(), NONE),
        (fixed_size, UNKNOWN),
        (hits, SUM),
        (lambda output, target: cross_entropy(output, target, reduction="sum"), SUM),
        (masked, WEIGHTED),
        (lambda output, target: cross_entropy(output, target, ignore_index=0), WEIGHTED),
        (lambda output, target: cross_entropy(output, target).exp(), FUNCTION),
        (lambda output, target: mse_loss(output[:, 0], target.float()).sqrt(), FUNCTION),
        (lambda output, target: cross_entropy(1e3 + output, target, ignore_index=0) + 48, WEIGHTED),
        (f1, WEIGHTED),
        (contrastive, OTHER),
        (squeezed, NONE),
        (lambda output, target: output.max(), OTHER),
        (lambda output, target: f1(output, target) * 0, UNCLEAR),
        (lambda output, target: (cross_entropy(output, target), accuracy(output, target)), NO_SUM),
        (lambda output, target: (cross_entropy(output, target), len(target)), NO_SUM),
        (lambda output, target: (cross_entropy(output, target, ignore_index=0), (target != 0).sum()), NO_SUM),
        (lambda output, target: (contrastive(output, target) * len(target), len(target)), PAIR),
        (lambda output, target: output.mean() / 0, UNCLEAR),
    ],
    ids=range(29),
)
def test_what_a_function_is_a_mean_of(function, found):
    assert deviation(function, *rows(), 64) is found


def test_a_number_that_may_be_negative_is_no_root_of_a_mean():
    """The squares of -0.0735 and 0.0907 are nearly equal."""
    output = torch.tensor([[-0.0735], [0.0907], [0.05]])
    assert deviation(lambda output, target: output.max(), output, torch.zeros(3), 3) is OTHER


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounding_is_no_deviation(dtype):
    output, target = rows(512)
    assert deviation(cross_entropy, output.to(dtype), target, 512) is NONE
    assert deviation(lambda output, target: output.float().mean(), output.to(dtype), target, 512) is NONE
    for rest in (1.0, 0.1):
        assert deviation(lambda output, target, rest=rest: (output > rest).to(dtype).mean(), *rows(512), 512) is NONE
    assert deviation(lambda output, target: (output > 0).to(dtype).sum(), *rows(512), 512) is SUM


def with_penalty(output, target, reduction="mean"):
    loss = cross_entropy(output, target, reduction=reduction)
    (gradient,) = torch.autograd.grad(loss, output, create_graph=True)
    return cross_entropy(output, target) + gradient.square().sum(1).mean()


def test_a_loss_that_computes_gradients_of_the_output_is_told_apart_too():
    assert deviation(with_penalty, *rows(), 64) is OTHER
    assert deviation(lambda output, target: with_penalty(output, target, "sum"), *rows(), 64) is NONE
    assert deviation(lambda output, target: with_penalty(output.mul_(2), target, "sum"), *rows(), 64) is NONE


def test_rows_that_cannot_be_told_apart_are_no_reason_to_complain():
    output, target = rows()
    assert deviation(hits, output[:1], target[:1], 1) is NONE
    assert deviation(lambda output, target: output["loss"], {"loss": output.sum()}, target, 64) is NONE
    assert deviation(accuracy, output, target, 16) is NONE, "16 images of four crops each"
    assert deviation(hits, output, target, 16) is SUM, "a whole number is a count"


def test_a_loss_that_fails_for_fewer_rows_is_not_called_a_mean(caplog):
    output, target = rows(4)
    assert deviation(squeezed, output, target, 4) is NONE, "one row alone fails"
    assert deviation(squeezed, output[:3], target[:3], 3) is NONE
    of_four = torch.arange(4)
    fails = lambda output, target: cross_entropy(output @ output.T, of_four)  # noqa: E731
    assert deviation(fails, output, target, 4) is UNKNOWN
    found = reasons({"of_four": fails}, [(output, target, 4)])
    judge_metrics([(found, {})], warns=True)  # a metric is not refused for that
    assert [each.getMessage() for each in caplog.records] == [f"The metric 'of_four' {UNKNOWN.reason}"]


class Gaps(Dataset):
    """Two of its samples are missing."""

    def __init__(self, missing):
        self.missing = missing

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return None if index in self.missing else (torch.arange(6.0) * index, index % 3)


@pytest.mark.parametrize(
    ("loss", "missing", "said"),
    [
        (cross_entropy, (17, 30), 1),
        (cross_entropy, (), 0),
        (lambda output, target: cross_entropy(output, target, reduction="none"), (17, 30), 0),
    ],
)
def test_a_mean_over_fewer_rows_than_samples_is_told_once(caplog, loss, missing, said):
    """A collate function left them out, in a later step than those that are rehearsed, and nothing said so."""

    def collate(samples):
        return default_collate([sample for sample in samples if sample is not None])

    run = lockstep.init(global_batch=4, micro_batches=2)
    model = nn.Linear(6, 3)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    data = DataLoader(Gaps(missing), batch_size=2, collate_fn=collate)
    for batch in run.batches(data):
        run.backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    run.evaluate(data, loss)
    run.close()
    told = [each.getMessage() for each in caplog.records if "The micro-batch of the" in each.getMessage()]
    assert len(told) == said
    if said:
        assert "samples 16, 17 has 1 row, as where a collate function leaves samples out" in told[0]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (cross_entropy, 1),
        (lambda output, target: 0.5 * cross_entropy(output, target), 1),
        (nn.CrossEntropyLoss(), 0),
        (lambda output, target: cross_entropy(output, target, reduction="none").mean(), 0),
    ],
)
def test_a_mean_without_ignored_targets_is_told_once_they_come(caplog, loss, said):
    run = lockstep.init(global_batch=4, micro_batches=2)
    model = nn.Linear(6, 3)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    targets = torch.arange(40) % 3
    targets[17] = -100
    for batch in run.batches(TensorDataset(torch.ones(40, 6), targets), shuffle=False):
        run.backward(batch, loss)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    told = [each.getMessage() for each in caplog.records if "The micro-batch of the" in each.getMessage()]
    assert len(told) == said
    assert not said or "samples 16, 17 has targets of -100, which are left out; the one mean" in told[0]
    assert not any("reduction='none'" in each for each in told)  # which counts the ignored ones as 0


def weighted_by_values(output, target):
    loss, size = cross_entropy(output, target), output.square().mean()
    return loss + size * (loss / size).detach()


def focal(output, target):
    """Weights that are detached, each of its own sample."""
    losses = cross_entropy(output, target, reduction="none")
    return ((1 - (-losses).exp()).square().detach() * losses).mean()


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (weighted_by_values, GRADIENT),
        (lambda output, target: cross_entropy(output, target) / cross_entropy(output, target).detach(), GRADIENT),
        (cross_entropy, NONE),
        (focal, NONE),
        (lambda output, target: output.softmax(1).sum(1).mean(), UNCLEAR),
        (lambda output, target: mse_loss(output + (output.round() - output).detach(), output.detach() ** 2), NONE),
        (with_exact_mean(nn.CrossEntropyLoss(weight=torch.rand(4), ignore_index=2)), NONE),
        (lambda output, target: cross_entropy(output.mul_(2), target, reduction="none"), NONE),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_terms_that_follow_from_their_values_are_told_by_the_gradient(loss, found, dtype):
    """The value was that of a mean, and nothing said that each micro-batch had weights of its own."""
    output, target = rows(12)
    output *= torch.linspace(1, 3, 12)[:, None]
    assert checked(loss, output.to(dtype), target, 12, trains=True) is found
    assert checked(loss, output.to(dtype), target, 12) is not GRADIENT, "a metric has none"


def test_dicts_and_named_outputs_are_cut_too():
    output, target = rows()
    given = {"logits": output}, {"label": target, "name": ["a"] * 64}
    assert deviation(lambda o, t: accuracy(o["logits"], t["label"]), *given, 64) is NONE
    assert deviation(lambda o, t: hits(o["logits"], t["label"]), *given, 64) is SUM


def test_a_function_that_writes_into_what_it_is_given_leaves_rows_as_they_were():
    """A metric with output.sigmoid_() was given outputs that it had been through several times."""
    output, target = rows()
    before = output.clone(), target.clone()
    assert deviation(lambda o, t: accuracy(o.add_(1), t.add_(1)), output, target, 64) is NONE
    assert torch.equal(output, before[0]) and torch.equal(target, before[1])


def test_warnings_of_torch_about_single_rows_are_not_the_users(recwarn):
    def spread(output, target):
        return cross_entropy(output, target) + output.std(0).mean()

    output, target = rows(2)
    assert reasons({"spread": spread}, [(output, target, 2)])["spread"]
    assert not recwarn.list


def test_a_mean_over_what_only_one_part_has_is_not_called_a_sum():
    """As the mean over boxes, where one of two images has any: the advice was to return the number of samples."""

    def over_boxes(output, target):
        return output[target == 1].sum() / (target == 1).sum().clamp_min(1)

    output, target = torch.tensor([[1.0, 3.0], [0.0, 0.0]]), torch.tensor([[1, 1], [0, 0]])
    assert deviation(over_boxes, output, target, 2) is OTHER
    assert deviation(lambda output, target: output.sum(), output + 1, target, 2) is SUM


def test_a_loss_of_the_whole_batch_is_not_said_to_be_averaged(caplog):
    """It was, where the data had no entry for each sample, and was advised to return a pair."""
    run = lockstep.init(global_batch=8, micro_batches=4)
    model = nn.Linear(1, 1)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    loader = DataLoader(
        [torch.arange(1, 3 + n % 5) for n in range(32)],
        8,
        collate_fn=lambda items: torch.cat([each[:2] for each in items]).float(),
    )
    for batch in run.batches(loader):
        run.backward(
            batch, lambda output, _: output.square().mean(), forward=lambda x: model(x.view(-1, 2, 1)), whole_batch=True
        )
        optimizer.step()
    run.close()
    assert "without an entry for each sample" not in caplog.text


def test_a_loss_that_calls_a_layer_with_spectral_norm_keeps_nothing(caplog):
    """The critic of a GAN, whose buffers each micro-batch begins with anew."""
    run = lockstep.init(global_batch=16, micro_batches=2)
    critic = nn.utils.spectral_norm(nn.Linear(6, 4))
    run.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    for batch in run.batches(TensorDataset(torch.randn(16, 6))):
        run.backward(
            batch, lambda fake, data: critic(data[0]).relu().mean() - critic(fake).mean(), forward=lambda data: -data[0]
        )
    run.close()
    assert "The loss" not in caplog.text


@pytest.mark.parametrize("is_mean", [True, False])
def test_a_loss_that_computes_gradients_itself_is_judged_with_the_model(is_mean, caplog):
    """A weight by the norms of gradients, as of a VQGAN, was not told; a penalty for each sample is right."""
    run = lockstep.init(global_batch=32, micro_batches=2)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    _, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def forward(data):
        x = data[0].clone().requires_grad_()
        return model(x), x

    def loss(output, data):
        y, x = output
        if is_mean:
            (slopes,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return (slopes.norm(dim=1) - 1).square().mean()
        first, second = y[:, 0].square().mean(), y[:, 1].abs().mean()
        one, other = (torch.autograd.grad(each, model.weight, retain_graph=True)[0] for each in (first, second))
        return first + second * one.norm() / other.norm()

    for batch in run.batches(TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)):
        run.backward(batch, loss, forward=forward)
        optimizer.step()
    run.close()
    assert ("is not a mean over samples" in caplog.text) == (not is_mean)
    assert is_mean == (not caplog.text)


class Smoothed:
    """A metric that returns its moving average, or counts its calls beside it."""

    def __init__(self, keeps):
        self.keeps, self.value, self.calls = keeps, None, 0

    def __call__(self, output, target):
        value = (output.argmax(1) == target).double().mean()
        self.value = value if self.value is None or not self.keeps else 0.9 * self.value + 0.1 * value
        self.calls += 1
        return self.value


def test_a_metric_whose_value_depends_on_earlier_calls_is_refused():
    """Its mean depended on the number of processes, and a warning of run.evaluate said that it was right."""
    torch.manual_seed(0)
    output, target = torch.randn(16, 3), torch.arange(16) % 3
    keeping, counting = Smoothed(True), Smoothed(False)
    assert checked(keeping, output, target, 16) is Deviation.STATEFUL
    assert checked(counting, output, target, 16) in (NONE, UNCLEAR)
    assert keeping.value is counting.value is None and keeping.calls == counting.calls == 0, "it is put back"
    assert checked(lambda output, target: output.mean() * torch.rand(()), output, target, 16) is NONE
