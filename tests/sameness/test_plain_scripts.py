"""Plain PyTorch loops against their ports: every loss, norm, rate and weight is the same, apart from rounding.

Each case is a script as one writes it for one device, and its port by docs/moving.md. Both begin with the same weights
and read the samples in the same order. All is in float64, so that rounding is far below any difference in meaning. The
data do not fill the last step.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import lockstep

BATCH, EPOCHS = 16, 3


def samples(number=42):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(number, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 3, generator=generator, dtype=torch.float64)).argmax(1))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)).double()


class Script:
    """A training as one writes it for one device; ``step`` is the body of its loop, ``end`` comes after an epoch."""

    def __init__(self, model=None, data=None, **settings):
        self.model, self.data, self.numbers = model or network(), data or samples(), []
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
        self.schedule = lr_scheduler.LambdaLR(
            self.optimizer, lambda n: (n + 1) / 3 if n < 3 else 0.5 + 0.5 * math.cos(n / 9)
        )
        self.average = AveragedModel(self.model, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)
        vars(self).update(settings)
        self.loader = DataLoader(self.data, batch_size=BATCH)

    def log(self, *values):
        self.numbers += [float(value.detach() if isinstance(value, torch.Tensor) else value) for value in values]

    def evaluate(self, model):
        model.eval()
        with torch.no_grad():
            total = sum(F.cross_entropy(model(x), y).item() * len(x) for x, y in self.loader)
        model.train()
        return total / len(self.data)


def classify(script):
    total = 0.0
    for x, y in script.loader:
        script.optimizer.zero_grad()
        loss = F.cross_entropy(script.model(x), y, label_smoothing=0.1)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(script.model.parameters(), 0.3)
        script.optimizer.step()
        script.average.update_parameters(script.model)
        script.log(loss, norm, script.schedule.get_last_lr()[0])
        script.schedule.step()
        total += loss.item() * len(x)
    script.log(total / len(script.data), script.evaluate(script.model), script.evaluate(script.average))


def classify_ported(script, run):
    total = 0.0
    for batch in run.batches(script.loader):
        script.optimizer.zero_grad()
        loss = run.backward(batch, lambda output, y: F.cross_entropy(output, y, label_smoothing=0.1))
        norm = run.clip_gradients(0.3)
        script.optimizer.step()
        script.average.update_parameters(script.model)
        script.log(loss, norm, script.schedule.get_last_lr()[0])
        script.schedule.step()
        total += loss.item() * len(batch)
    script.log(total / len(script.data), run.evaluate(script.loader, F.cross_entropy))
    script.log(run.evaluate(script.loader, F.cross_entropy, model=script.average))


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 7.0]).double(), label_smoothing=0.1)


def weighted(script):
    for x, y in script.loader:
        script.optimizer.zero_grad()
        loss = WEIGHTED(script.model(x), y.where(y > 0, -100))
        loss.backward()
        nn.utils.clip_grad_value_(script.model.parameters(), 0.02)
        script.optimizer.step()
        script.log(loss)


def weighted_ported(script, run):
    ignoring = TensorDataset(script.data.tensors[0], script.data.tensors[1].where(script.data.tensors[1] > 0, -100))
    for batch in run.batches(ignoring, shuffle=False):
        script.optimizer.zero_grad()
        loss = run.backward(batch, WEIGHTED)
        nn.utils.clip_grad_value_(script.model.parameters(), 0.02)
        script.optimizer.step()
        script.log(loss)


def summed(script):
    for x, y in script.loader:
        script.optimizer.zero_grad()
        loss = F.cross_entropy(script.model(x), y, reduction="sum") / 100
        loss.backward()
        script.optimizer.step()
        script.log(loss)


def summed_ported(script, run):
    for batch in run.batches(script.loader):

        def loss_of_step(output, y):
            return F.cross_entropy(output, y, reduction="sum") / 100 * len(batch), len(y)  # noqa: B023  # called here

        script.optimizer.zero_grad()
        loss = run.backward(batch, loss_of_step)
        script.optimizer.step()
        script.log(loss)


def accumulated(script):
    """Two batches make a step; what an epoch leaves over is part of the first step of the next one."""
    for number, (x, y) in enumerate(script.loader):
        loss = F.cross_entropy(script.model(x), y) / 2
        loss.backward()
        script.log(loss)
        if number % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()


def accumulated_ported(script, run):
    for number, batch in enumerate(run.batches(script.loader)):
        loss = run.backward(batch, lambda output, y: F.cross_entropy(output, y) / 2)
        script.log(loss)
        if number % 2:
            script.optimizer.step()
            script.optimizer.zero_grad()


def contrast(output, _):
    similar = F.normalize(output, dim=1) @ F.normalize(output.flip(1), dim=1).T
    return F.cross_entropy(5 * similar, torch.arange(len(similar)))


def contrasted(script):
    for x, _ in script.loader:
        script.optimizer.zero_grad()
        loss = contrast(script.model(x), None)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(script.model.parameters(), 0.5)
        script.optimizer.step()
        script.log(loss, norm)


def contrasted_ported(script, run):
    for batch in run.batches(script.loader):
        script.optimizer.zero_grad()
        loss = run.backward(batch, contrast, whole_batch=True)
        norm = run.clip_gradients(0.5)
        script.optimizer.step()
        script.log(loss, norm)


def sharpness_aware(script):
    for x, y in script.loader:
        F.cross_entropy(script.model(x), y).backward()
        moved = [0.05 * p.grad for p in script.model.parameters()]
        with torch.no_grad():
            torch._foreach_add_([*script.model.parameters()], moved)
        script.optimizer.zero_grad()
        loss = F.cross_entropy(script.model(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_([*script.model.parameters()], moved)
        script.optimizer.step()
        script.optimizer.zero_grad()
        script.log(loss)


def sharpness_aware_ported(script, run):
    for batch in run.batches(script.loader):
        run.backward(batch, F.cross_entropy)
        moved = [0.05 * p.grad for p in script.model.parameters()]
        with torch.no_grad():
            torch._foreach_add_([*script.model.parameters()], moved)
        script.optimizer.zero_grad()
        loss = run.backward(batch, F.cross_entropy)
        with torch.no_grad():
            torch._foreach_sub_([*script.model.parameters()], moved)
        script.optimizer.step()
        script.optimizer.zero_grad()
        script.log(loss)


def information(script):
    """The Fisher information of the weights and the weights now, by backward passes without a step."""
    found = [torch.zeros_like(p) for p in script.model.parameters()]
    for x in script.data.tensors[0][:5]:
        script.model.zero_grad()
        script.model(x).log_softmax(0).max().backward()
        for total, p in zip(found, script.model.parameters()):
            total += p.grad**2 / 5
    script.optimizer.zero_grad()
    return [(total, p.detach().clone()) for total, p in zip(found, script.model.parameters())]


def distance(script, held):
    return sum((weight * (p - old) ** 2).sum() for (weight, old), p in zip(held, script.model.parameters()))


def consolidated(script):
    held = information(script)
    for x, y in script.loader:
        script.optimizer.zero_grad()
        loss = F.cross_entropy(script.model(x), y) + 3 * distance(script, held)
        loss.backward()
        script.optimizer.step()
        script.log(loss)


def consolidated_ported(script, run):
    held = information(script)
    for batch in run.batches(script.loader):
        script.optimizer.zero_grad()
        loss = run.backward(batch, lambda output, y: F.cross_entropy(output, y) + 3 * distance(script, held))
        script.optimizer.step()
        script.log(loss)


def normalised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(), nn.utils.spectral_norm(nn.Linear(8, 3))
    ).double()


CASES = {
    "classification": (classify, classify_ported, network),
    "class weights": (weighted, weighted_ported, network),
    "sums": (summed, summed_ported, network),
    "accumulation": (accumulated, accumulated_ported, network),
    "contrastive": (contrasted, contrasted_ported, network),
    "EWC": (consolidated, consolidated_ported, network),
    "SAM": (sharpness_aware, sharpness_aware_ported, network),
    "spectral norm": (classify, classify_ported, normalised),
}


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_port_has_the_numbers_of_its_script(case, micro_batches):
    plain, ported, model = CASES[case]
    script = Script(model())
    for _ in range(EPOCHS):
        plain(script)
    port, run = Script(model()), lockstep.init(global_batch=BATCH, micro_batches=micro_batches)
    port.model, port.optimizer, port.schedule, port.average = run.prepare(
        port.model, port.optimizer, port.schedule, port.average
    )
    for _ in run.epochs(EPOCHS):
        ported(port, run)
    torch.testing.assert_close(torch.tensor(port.numbers), torch.tensor(script.numbers), rtol=1e-9, atol=1e-12)
    found = run.state_dict()
    for name, value in script.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_lbfgs_has_the_losses_of_its_script(micro_batches):
    script, data = network(), samples(40)
    port = copy.deepcopy(script)
    expected, found = [], []
    optimizer = torch.optim.LBFGS(script.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(script(data.tensors[0]), data.tensors[1])
        loss.backward()
        return loss

    expected = [optimizer.step(closure).item() for _ in range(4)]
    run = lockstep.init(global_batch=40, micro_batches=micro_batches)
    port, steps = run.prepare(port, torch.optim.LBFGS(port.parameters(), max_iter=4, line_search_fn="strong_wolfe"))
    for _ in run.epochs(4):
        (batch,) = run.batches(data)

        def ported(batch=batch):
            steps.zero_grad()
            return run.backward(batch, F.cross_entropy)

        found.append(steps.step(ported).item())
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_tensors_without_a_module_have_the_losses_of_their_script(micro_batches):
    (x, y), expected, found = samples(40).tensors, [], []

    def tensors():
        torch.manual_seed(0)
        return [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in [(6, 3), (3,)]]

    def descend(*trained):
        with torch.no_grad():
            for each in trained:
                each -= 0.01 * each.grad
                each.grad.zero_()

    w, b = tensors()
    for _ in range(4):
        loss = F.cross_entropy(x @ w + b, y, reduction="sum")
        loss.backward()
        descend(w, b)
        expected.append(loss.item())
    run = lockstep.init(global_batch=40, micro_batches=micro_batches)
    [w, b] = run.prepare(nn.ParameterList(tensors()))
    for _ in run.epochs(4):
        (batch,) = run.batches(TensorDataset(x, y))

        def summed(output, data):
            return F.cross_entropy(output, data[1], reduction="sum") * 40, len(output)

        found.append(run.backward(batch, summed, forward=lambda data, w=w, b=b: data[0] @ w + b).item())
        descend(w, b)
    assert found == pytest.approx(expected, rel=1e-9)
