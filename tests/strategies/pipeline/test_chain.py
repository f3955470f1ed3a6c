"""Models are read as chains: what is opened, what stays whole, and that the links compute what the model does."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from lockstep.models import digits_net, lstm, resnet18, transformer
from lockstep.strategies.pipeline.chain import chain, reading, what_it_reads


def names(model):
    return [link.name for link in chain(model)]


@pytest.mark.parametrize(
    "model, x, count",
    [
        (resnet18(small_images=True, num_classes=5), torch.randn(2, 3, 16, 16), 15),
        (transformer(vocabulary_size=9, depth=3, width=8, heads=2), torch.arange(6).view(2, 3), 7),
        (digits_net(width=2), torch.randn(3, 64), 15),
        (lstm(num_classes=3, in_features=4, hidden_size=5), torch.randn(2, 6, 4), 3),
    ],
    ids=["resnet", "transformer", "digits", "lstm"],
)
def test_the_links_one_after_the_other_are_the_model(model, x, count):
    links = chain(model.eval())
    assert len(links) == count
    value = x
    for link in links:
        value = link.module(value)
    assert torch.equal(value, model(x))
    held = {f"{link.name}.{name}" for link in links for name in link.module.state_dict()}
    assert held == set(model.state_dict())


class Straight(nn.Module):
    """Calls its children one after the other."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


def test_what_a_forward_does_between_its_children_is_a_link():
    model = Straight(lambda x: F.relu(x).flatten(1))
    assert names(model) == ["first", "relu()", "flatten()", "second"]
    x, value = torch.randn(3, 4), None
    for link in chain(model):
        value = link.module(x if value is None else value)
    assert torch.equal(value, model(x))


def shortcut(x):
    return x + 1 * x


@pytest.mark.parametrize(
    "between",
    [
        F.dropout,
        lambda x: x + torch.rand(4),
        lambda x: x * (random.random() < 2),
        shortcut,
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.to(torch.float64).float(),
        lambda x: F.relu(x) if isinstance(x, torch.Tensor) else x,
        lambda x: F.relu(x) if torch.is_tensor(x) else x,
        lambda x: F.relu(x) if hasattr(x, "shape") else x,
        lambda x: x if x.dtype is torch.float64 else F.relu(x),
        lambda x: F.relu(x) if torch.is_grad_enabled() else x,
        lambda x: F.relu(x) if torch.is_autocast_enabled("cpu") else x,
        lambda x: F.softmax(x, 1 if torch.is_grad_enabled() else 0),
    ],
    ids=[
        *("dropout", "torch random", "python random", "arithmetic", "branch", "unknown method"),
        *("isinstance", "is_tensor", "hasattr", "dtype", "gradients", "autocast", "an argument"),
    ],
)
def test_a_forward_that_does_more_stays_whole(between):
    model = nn.Sequential(Straight(between), nn.ReLU())
    before = random.getstate(), torch.get_rng_state()
    assert names(model) == ["0", "1"]
    assert before[0] == random.getstate() and torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize(
    "look",
    [
        lambda own: own > 0,
        lambda own: own.item(),
        lambda own: own.tolist(),
        lambda own: own.numpy(),
        lambda own: np.asarray(own).any(),
        lambda own: torch.equal(own, torch.ones(())),
        lambda own: F.relu(own).int().item(),
    ],
    ids=["bool", "item", "tolist", "numpy", "asarray", "equal", "computed"],
)
def test_a_forward_that_looks_at_the_value_of_a_tensor_stays_whole(look):
    gate = torch.zeros(())
    model = nn.Sequential(Straight(lambda x: F.relu(x) if look(gate) else x), nn.ReLU())
    assert names(model) == ["0", "1"]
    model = nn.Sequential(Straight(lambda x: F.relu(x) if look(weight[0].detach()) else x), nn.ReLU())
    weight = model[0].first.bias
    assert names(model) == ["0", "1"]


def test_a_forward_that_asks_a_tensor_for_its_shape_is_opened():
    weight = torch.zeros(3, 4)

    def between(x):
        assert weight.shape == weight.size() and len(weight) == 3 and weight.dim() == 2
        return x.view(-1, weight.shape[1])

    assert names(Straight(between)) == ["first", "view()", "second"]


class Auxiliary(Straight):
    """Does something else in training."""

    def forward(self, x):
        return self.first(x) if self.training else super().forward(x)


class Owner(Straight):
    """Has a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Idle(Straight):
    """Has a child that its forward does not call."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Calling(Straight):
    """Has a call of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Patched(Straight):
    """Has another forward than its class, as tools set one on the object."""

    def __init__(self):
        super().__init__()
        self.forward = lambda x: 2 * Straight.forward(self, x)


class Swapping(Straight):
    """Calls a child with other weights than its own."""

    def forward(self, x):
        halves = {name: 0.5 * p for name, p in self.first.named_parameters()}
        return self.second(torch.func.functional_call(self.first, halves, (x,)))


class Setting(Straight):
    """Sets an attribute of a child before it calls it."""

    def forward(self, x):
        self.second.scale = 2.0
        return super().forward(x)


@pytest.mark.parametrize("kind", [Auxiliary, Owner, Idle, Calling, Patched, Swapping, Setting])
def test_a_module_that_a_chain_would_not_be_true_to_stays_whole(kind):
    model = nn.Sequential(kind(), nn.ReLU())
    assert names(model) == ["0", "1"]
    assert not hasattr(model[0].second, "scale"), "reading it leaves no trace"


@contextlib.contextmanager
def seeded(get, put, seed):
    """A context with another seed, such as of ``torch.random.fork_rng``, or another number of threads."""
    before = get()
    seed(7)
    try:
        yield
    finally:
        put(before)


class Within(Straight):
    """Calls a child inside of a context manager."""

    def __init__(self, context):
        super().__init__()
        self.context = context

    def forward(self, x):
        with self.context():
            x = self.first(x)
        return self.second(x)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        lambda: torch.autocast("cpu"),
        torch.autograd.graph.save_on_cpu,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        parametrize.cached,
        lambda: seeded(torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
        lambda: seeded(np.random.get_state, np.random.set_state, np.random.seed),
        lambda: seeded(random.getstate, random.setstate, random.seed),
        lambda: seeded(torch.get_num_threads, torch.set_num_threads, torch.set_num_threads),
    ],
    ids=[
        "no_grad",
        "autocast",
        "saved tensors",
        "attention",
        "parametrizations",
        "torch",
        "NumPy",
        "random",
        "threads",
    ],
)
def test_a_forward_that_calls_a_child_in_a_context_stays_whole(context):
    """Layers ran without the seed; of parametrized weights the gradients were others, where a child is called twice."""
    assert names(nn.Sequential(Within(context), nn.ReLU())) == ["0", "1"]
    assert names(nn.Sequential(Within(contextlib.nullcontext), nn.ReLU())) == ["0.first", "0.second", "1"]


class Dropping(Straight):
    """Calls a Dropout, whose draws are keyed by the module around it unless that is a Sequential."""

    def __init__(self, drop):
        super().__init__()
        self.between = drop


def test_a_dropout_that_has_no_key_of_its_own_stays_with_the_module_around_it():
    assert names(nn.Sequential(Dropping(nn.Dropout(0.1)), nn.ReLU())) == ["0", "1"]
    for drop in (nn.Dropout(0.0), nn.Sequential(nn.Dropout(0.1))):
        opened = names(nn.Sequential(Dropping(drop), nn.ReLU()))
        assert len(opened) == 4 and opened[1].startswith("0.between"), opened


def test_a_module_whose_calls_somebody_watches_stays_whole():
    model = nn.Sequential(Straight(), nn.ReLU())
    model[0].register_forward_hook(lambda *_: None)
    assert names(model) == ["0", "1"]


def test_the_mode_of_a_model_stays():
    model = nn.Sequential(Straight(), nn.ReLU())
    model[0].eval()
    chain(model)
    assert model.training and not model[0].training


class Keeps(nn.Module):
    """A chain whose forward counts, and keeps what it saw."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.calls, self.seen = nn.Linear(2, 2), nn.Linear(2, 2), 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(x)
        self.features = self.first(x)
        return self.last(self.features)


def test_what_a_forward_sets_is_set_while_it_is_read():
    model = Keeps()
    with reading(model, training=True) as links:
        assert len(links) == 2
        assert (model.calls, len(model.seen), isinstance(model.features, torch.Tensor)) == (1, 1, False)
    assert not hasattr(model, "features")


class Settings:
    is_deep = True


class ByClass(Straight):
    """Looks at an attribute of its class, at an object that it holds, and at one of its file."""

    is_deep, settings = True, Settings()

    def forward(self, x):
        is_deep = self.is_deep and self.settings.is_deep and IN_FILE.is_deep
        return self.second(self.first(x)) if is_deep else self.second(x)


IN_FILE = Settings()


class Asked(nn.Linear):
    """A child that is asked for something of its own."""

    is_deep = True

    def should_go_on(self):
        return self.is_deep


class Asking(Straight):
    """Asks a child."""

    def __init__(self):
        super().__init__()
        self.first = Asked(4, 4)

    def forward(self, x):
        return self.second(self.first(x)) if self.first.should_go_on() else self.second(x)


def test_what_a_forward_may_ask_its_children_for_is_looked_at():
    model = Asking()
    before = what_it_reads(model)
    model.first.is_deep = False
    assert what_it_reads(model) != before


@pytest.mark.parametrize("owner", [ByClass, ByClass.settings, IN_FILE])
def test_what_a_forward_may_look_at_is_more_than_its_own_attributes(owner, monkeypatch):
    model = ByClass()
    before = what_it_reads(model)
    assert what_it_reads(model) == before
    monkeypatch.setattr(owner, "is_deep", False)
    assert what_it_reads(model) != before


def test_reading_a_forward_leaves_no_trace():
    model = Keeps()
    assert [link.name for link in chain(model)] == ["first", "last"]
    assert (model.calls, model.seen, hasattr(model, "features")) == (0, [], False)


def test_a_forward_that_draws_from_numpy_stays_whole():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            return self.last(self.first(x) if np.random.rand() < 2 else x)

    state = np.random.get_state()[2]
    assert [link.name for link in chain(Skips())] == [""]
    assert np.random.get_state()[2] == state
