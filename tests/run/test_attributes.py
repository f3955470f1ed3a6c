"""Attributes that optimizers and modules keep beside ``state_dict()``, over a checkpoint."""

import array
import json
import multiprocessing
import os
import re
from collections import UserDict, deque, namedtuple
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace
from unittest.mock import ANY

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.run.jobs import begin, dataset, network, train_step
from torch import nn
from torch.nn import functional as F

from lockstep.checkpoint.record import canonical, decode, encode
from lockstep.core.fingerprint import digest_tensor
from lockstep.core.values import slots_of
from lockstep.errors import CheckpointMismatch, ConfigError
from lockstep.numerics.initial_values import InitialValues
from lockstep.run.attributes import Attributes
from lockstep.run.checks.agreement import made_otherwise, made_with
from lockstep.run.prepare import Parts

CPU = torch.device("cpu")


class Phase(Enum):
    WARM, COLD = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    scale: float
    table: torch.Tensor


class Memory:
    """An object of the user's, which two modules share."""

    def __init__(self):
        self.scale, self.table, self.entry = 1.0, torch.ones(3), Entry(1.0, torch.ones(2))
        self.limits = {"steps": 5, "done": 0}


Pair = namedtuple("Pair", "first second")


class Holding(nn.Module):
    """Keeps values of every kind beside its ``state_dict()``."""

    def __init__(self, memory):
        super().__init__()
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.inner = nn.Linear(2, 2)
        self.numbers = {"i": 3, "f": 0.1, "b": True, "long": -(10**5000)}
        self.texts = ["a", None, b"b", (1, ("x",))]
        self.rates = deque([1.0], maxlen=2)
        self.arrays, self.scalar = {"a": np.ones(3, np.float32), 2: np.arange(4)}, np.float64(0.5)
        self.tensors = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0)]
        self.large, self.by_pair = torch.ones(100, 100).t(), {(1, "a"): torch.ones(1)}
        self.mean, self.deviation = torch.ones(2, 3).unbind()
        self.phase, self.seen, self.fixed = Phase.WARM, {1, "a"}, frozenset({3})
        self.pair, self.generators = Pair(1, torch.ones(1)), [torch.Generator().manual_seed(1)]
        self.teacher = [nn.Linear(2, 2)]
        self.layers, self.weight = [self.inner], self.inner.weight.data[0]
        self.octets, self.typed = bytearray(b"ab"), array.array("d", [1.0])
        self.shared, self.named = multiprocessing.Value("d", 1.0), UserDict(a=1.0)
        self.prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
        self.memory = memory

    def change(self):
        with torch.no_grad():
            self.hidden.fill_(float("nan"))
            self.numbers.update(i=4, f=float("-inf"), b=None, long=10**5000, new=[torch.full((2,), 7.0)])
            self.texts.extend(["more", [1.5]])
            self.rates.append(0.5)
            self.arrays["a"] *= 3
            self.arrays["f"] = np.array([1 + 2j])
            self.scalar = np.float64(2.5)
            self.tensors[0].mul_(2)
            self.tensors[1] = torch.full((3,), 1.5, dtype=torch.bfloat16)
            self.large[1, 2] = 5
            self.mean[0], self.deviation = 2.0, torch.full((3,), 3.0)
            self.by_pair[2, "b"] = torch.full((1,), 2.0)
            self.phase, self.fixed = Phase.COLD, frozenset({4})
            self.seen.add(5)
            self.pair = Pair(2, torch.full((1,), 3.0))
            torch.randn(1, generator=self.generators[0])
            self.teacher[0].weight.fill_(0.25)
            self.memory.scale, self.memory.entry = self.memory.scale * 2, Entry(4.0, torch.full((2,), 4.0))
            self.memory.table.add_(1)
            self.memory.limits["done"] += 1
            self.octets.append(3)
            self.typed.extend([2.0, 3.0])
            self.shared.value, self.named["b"] = 4.0, 2.0
            self.prior.loc.fill_(3.0)


def shown(value):
    """A value as text that tells kinds, shapes and numbers."""
    if isinstance(value, torch.Generator):
        return digest_tensor(value.get_state())
    if isinstance(value, nn.Module):
        return shown(dict(value.state_dict()))
    if isinstance(value, dict):
        return {repr(key): shown(each) for key, each in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [shown(each) for each in value]
    if isinstance(value, Memory | UserDict | torch.distributions.Normal):
        return shown(vars(value))
    if hasattr(value, "get_obj"):
        return value.value
    if isinstance(value, Entry):
        return value.scale, shown(value.table)
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{value!r} {value.dtype} {tuple(value.shape)}"
    return (type(value), sorted(map(repr, value))) if isinstance(value, set | frozenset) else value


def shown_of(model):
    own = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    return shown({**own, "hidden": model.hidden})


def same_after(model):
    """The objects that ``change`` leaves in their places."""
    arrays, memory = model.arrays["a"], model.memory
    return [
        model.tensors,
        model.tensors[0],
        model.large,
        memory,
        memory.table,
        model.rates,
        model.octets,
        model.typed,
        model.shared,
        model.named,
        model.prior,
        model.prior.loc,
        arrays,
        model.numbers,
    ]


def parts_of(*modules):
    return Parts.of(nn.ModuleList(modules), [], InitialValues(0))


def test_values_of_every_kind_go_through_a_checkpoint(tmp_path):
    """In place where there is a like object, so that others who refer to it have the values, too."""
    torch.manual_seed(1)
    memory = Memory()
    models = Holding(memory), Holding(memory)
    attributes = Attributes(parts_of(*models))
    strategy, tensors = SimpleNamespace(replicated=True), {}
    assert attributes.capture(strategy, {}) == {}
    models[1].change()
    record = attributes.capture(strategy, tensors)
    assert {name.partition("|")[2] for name in tensors} == {"module 1|large"}
    path = tmp_path / "tensors"
    safetensors.torch.save_file({name: each.contiguous() for name, each in tensors.items()}, path)

    torch.manual_seed(1)
    memory = Memory()
    again = Holding(memory), Holding(memory)
    held, entry = same_after(again[1]), memory.entry
    record = decode(json.loads(canonical(encode(record, "record"))))
    assert Attributes(parts_of(*again)).restore(record, safetensors.torch.load_file(path), CPU) == []
    assert [shown_of(each) for each in again] == [shown_of(each) for each in models]
    assert all(one is other for one, other in zip(same_after(again[1]), held))
    assert (entry.scale, again[1].phase) == (1.0, Phase.COLD), "an object in whose place there is another"
    assert again[0].memory is again[1].memory is memory
    assert again[1].rates.maxlen == 2
    assert again[1].layers == [again[1].inner]


class Bag(list):
    """A list with an attribute, which goes through no checkpoint with its entries."""


class Odd(nn.Module):
    """Reads what no checkpoint holds."""

    scale = 1.0

    def __init__(self):
        super().__init__()
        self.key, self.act, self.switch = object(), F.relu, nn.Identity()
        self.by_object, self.rows = {self.key: 1.0}, [1.0] * 10
        self.times, self.turn = factors()
        self.bag = Bag([1.0])
        self.bag.level = 1.0
        self.share, self.settings, self.table = (
            Fraction(1),
            [MappingProxyType({"a": 1.0})],
            torch.eye(1).to_sparse(),
        )
        self.masked, self.record = np.ma.array([1.0, 1.0]), np.ones(1, [("a", "f8")])
        self.steps, self.ramp = iter([1.0, 2.0, 3.0]), (number for number in (1.0, 2.0))

    def forward(self, x):
        x = self.act(x) * self.by_object[self.key] * self.rows[0] * type(self).scale * GLOBALS["scale"]
        x = x * float(self.share) * self.settings[0]["a"] * self.table.to_dense()[0, 0] * SCALE.get()
        x = x * float(self.masked.filled(2.0).mean()) * float(self.record["a"][0])
        x = x * self.bag.level * float(os.environ.get("SCALE_OF_A_TEST", "1.0"))
        return self.switch(self.times(x))


def factors():
    factor = 1.0

    def times(x):
        return x * factor

    def turn():
        nonlocal factor
        factor = 2.0

    return times, turn


GLOBALS = {"scale": 1.0, "calls": 0}
SCALE = ContextVar("scale", default=1.0)


def change_rows(model):
    model.rows.extend([0.0] * 100_001)
    model.rows[0] = 2.0


ODD = {
    "a dict by objects": (
        lambda model: model.by_object.update({model.key: 2.0}),
        "'by_object' of 5[... 0] (1.0, was 2.0)",
    ),
    "a function": (
        lambda model: setattr(model, "act", F.gelu),
        "'act' of 5 (torch.nn.functional.relu, was torch._C._nn",
    ),
    "a long list": (change_rows, "'rows' of 5 (10 entries, was 100011 entries of digest "),
    "an attribute of a list": (
        lambda model: setattr(model.bag, "level", 2.0),
        "the attribute 'level' of the attribute 'bag' of 5 (1.0, was 2.0)",
    ),
    "a class": (
        lambda model: setattr(Odd, "scale", 2.0),
        "the class attribute 'scale' of Odd (1.0, was 2.0)",
    ),
    "a global": (
        lambda model: GLOBALS.update(scale=2.0),
        "GLOBALS['scale'], which the loop changes",
    ),
    "a variable": (
        lambda model: model.turn(),
        "the variable 'factor' of the attribute 'times' of 5 (1.0, was 2.0)",
    ),
    "a layer": (
        lambda model: setattr(model, "switch", nn.Tanh()),
        "the class of 5.switch (Identity, was Tanh)",
    ),
    "a fraction": (
        lambda model: setattr(model, "share", Fraction(2)),
        "'share' of 5 (Fraction(1, 1), was Fraction(2, 1))",
    ),
    "an entry of a list": (
        lambda model: model.settings.__setitem__(0, MappingProxyType({"a": 2.0})),
        "'settings' of 5[0]['a'] (1.0, was 2.0)",
    ),
    "a sparse tensor": (
        lambda model: setattr(model, "table", (2 * torch.eye(1)).to_sparse()),
        "'table' of 5 (a sparse",
    ),
    "a mask": (
        lambda model: model.masked.__setitem__(0, np.ma.masked),
        "'masked' of 5 (an array [2] of digest",
    ),
    "a record": (lambda model: model.record.__setitem__("a", 2.0), "'record' of 5 (an array [1] of digest"),
    "an iterator": (
        lambda model: next(model.steps),
        "'steps' of 5 (list_iterator at (list of 3, 0), was list_iterator",
    ),
    "a generator": (lambda model: next(model.ramp), "'ramp' of 5 (generator at line "),
    "a context variable": (lambda model: SCALE.set(2.0), "the global variable 'SCALE' (1.0, was 2.0)"),
    "the environment": (
        lambda model: os.environ.update(SCALE_OF_A_TEST="2.0"),
        "the environment variable 'SCALE_OF_A_TEST' (1.0, was 2.0)",
    ),
    "a hook": (lambda model: model.register_forward_hook(halved), "the hooks of 5 ([], was ['halved'])"),
}


def halved(module, inputs, output):
    return output / 2


def train_in_two_parts(folder, change, *, stop=2, **options):
    """A run of one epoch that is stopped after a step, and goes on: what a loop changes meanwhile."""
    for last in (stop, 99):
        Odd.scale, GLOBALS["scale"] = 1.0, 1.0
        SCALE.set(1.0)
        os.environ["SCALE_OF_A_TEST"] = "1.0"
        model = nn.Sequential(*network(), Odd())
        run, model, optimizer = begin(model, directory=folder, resume="auto", **options)
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if run.position.step == 0:
                change(model[-1])
            if run.position.step + 1 == last:
                run.save(wait=True)
                break
        run.close()
    Odd.scale, GLOBALS["scale"] = 1.0, 1.0


class Private:
    __slots__ = ("__scale", "table")

    def __init__(self):
        self.__scale, self.table = 1.0, torch.ones(2)


def test_slots_have_the_names_by_which_a_class_knows_them():
    assert slots_of(Private()) == {"_Private__scale": 1.0, "table": ANY}


def test_a_method_of_torch_may_be_an_attribute(tmp_path):
    """It is written in C, and has no module."""
    model = network()
    model[2].act = torch.Tensor.relu
    begin(model, directory=tmp_path, resume="auto")[0].close()


class Irreps(tuple):
    """As those of e3nn, which have no length of their own."""

    def __len__(self):
        raise NotImplementedError


def test_a_tuple_without_a_length_goes_through_a_checkpoint(tmp_path):
    irreps, held = Irreps([Irreps([8, 0])]), []
    for last_step in (1, 2):
        model = network()
        model[2].irreps, model[2].last = irreps, Irreps([1, 2])
        run, model, optimizer = begin(model, directory=tmp_path, resume="auto")
        for _ in run.epochs(1):
            for batch in run.batches(dataset()):
                assert tuple(tuple.__iter__(irreps[0])) == (8, 0)  # a variable of the loop, too
                train_step(run, batch, optimizer)
                held.append(tuple(tuple.__iter__(model[2].last)))
                model[2].last = Irreps([batch.plan.step, 2])
                if batch.plan.step == last_step:
                    run.save(wait=True)
                    break
        run.close()
    assert held == [(1, 2), (0, 2), (1, 2)]


@pytest.mark.parametrize("name", ODD)
def test_what_the_loop_changes_and_no_checkpoint_holds_is_not_resumed(name, tmp_path):
    change, said = ODD[name]
    with pytest.raises(ConfigError, match=re.escape(said)):
        train_in_two_parts(tmp_path, change)


def test_what_was_lost_is_not_forgotten_by_a_checkpoint_before_the_next_step(tmp_path):
    def begun():
        Odd.scale = 1.0
        run, _, optimizer = begin(nn.Sequential(*network(), Odd()), directory=tmp_path, resume="auto")
        return run, run.batches(dataset()), optimizer

    run, batches, optimizer = begun()
    train_step(run, next(iter(batches)), optimizer)
    Odd.scale = 2.0
    run.save(wait=True)
    run, batches, optimizer = begun()
    run.save(wait=True)
    run, batches, optimizer = begun()
    with pytest.raises(ConfigError, match=r"attribute 'scale' of Odd \(1\.0, was 2\.0\)"):
        train_step(run, next(iter(batches)), optimizer)
    Odd.scale = 1.0


def test_what_calls_change_by_themselves_does_not_stop_a_resume(tmp_path, caplog):
    """A count that nobody computes with, and a cache."""

    def count(module, inputs):
        GLOBALS["calls"] += 1

    made = []
    for last in (2, 99):
        model = network()
        model[0].register_forward_pre_hook(count)
        run, model, optimizer = begin(model, directory=tmp_path, resume="auto")
        GLOBALS["calls"] = 0
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if run.position.step + 1 == last:
                run.save(wait=True)
                break
        made.append(run.position.step)
        run.close()
    assert made == [2, 3]
    assert "The model or the loss reads" not in caplog.text


def test_values_that_do_not_fit_the_model_that_resumes_are_refused(tmp_path):
    def change(model):
        model.switch.kept = Memory()

    with pytest.raises(CheckpointMismatch, match=r"values of the attribute 'kept' of 5\.switch do not fit"):
        train_in_two_parts(tmp_path, change, stop=1)


class Plan:
    """An object of the user's, with values of which no attribute of the module tells."""

    def __init__(self, seed, start):
        self.start, self.rows, self.is_resumed = start, seed, seed > 1
        self.mixed = torch.full((2,), float(seed))


class Settled(nn.Module):
    def __init__(self, *, rows=2, seed=1, wide=False, drawn=1, planned=1, start=0.5):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.table = rows, torch.randn(4, generator=generator)
        self.register_buffer("hidden", torch.randn(4, generator=generator), persistent=False)
        self.act = nn.GELU() if wide else nn.ReLU()
        self.folder, self.changed = f"/tmp/{seed}", torch.randn(2)
        self.drawn = {"weights": [np.random.default_rng(drawn).random(3)]}
        self.plan, self._cache = Plan(planned, start), np.full(2, drawn)

    def forward(self, x):
        self.changed += 1
        return self.act(x)


def resumed_with(folder, *, p=0.2, settled=None, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(p), Settled(**settled or {}), nn.Linear(8, 3))
    run, _, optimizer = begin(model, directory=folder, resume="auto", micro_batches=1, **options)
    steps = iter(run.batches(dataset()))
    if run.position.step == 0:
        train_step(run, next(steps), optimizer)
        run.save(wait=True)
    run.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"p": 0.3}, r"conditions.*\n  the attribute 'p' of 1: 0\.2 there, 0\.3 here"),
        ({"settled": {"wide": True}}, "the class of 2.act: ReLU there, GELU here"),
        ({"settled": {"seed": 2}}, "the attribute 'hidden' of 2: .*\n.*the attribute 'table' of 2: .*"),
        (
            {"settled": {"drawn": 2}},
            r"the attribute 'drawn' of 2: values of digest \w+ there, values of digest \w+ here",
        ),
        ({"settled": {"planned": 2}}, "the attribute 'plan' of 2: values of digest"),
    ],
)
def test_a_model_that_is_made_otherwise_in_the_resumed_run_is_refused(settings, said, tmp_path):
    """The values that a checkpoint holds would go on in other bits, without a word."""
    resumed_with(tmp_path)
    resumed_with(tmp_path)
    with pytest.raises(CheckpointMismatch, match=said):
        resumed_with(tmp_path, **settings)
    resumed_with(tmp_path, **settings, force_context=True)


def test_numbers_of_the_users_own_modules_that_are_others_in_the_resumed_run_are_named(tmp_path, caplog):
    resumed_with(tmp_path)
    resumed_with(tmp_path)
    assert "made with other values" not in caplog.text
    resumed_with(tmp_path, settled={"rows": 3})
    assert "the attribute 'rows' of 2: 2 there, 3 here. This run goes on with those here" in caplog.text
    resumed_with(tmp_path, settled={"start": 0.25})
    assert "checkpoint's run: the attribute 'plan' of 2: values of digest" in caplog.text


def test_a_checkpoint_that_has_no_digests_of_arrays_is_resumed():
    """An earlier version noted of an array in an attribute that it was one."""
    torch.manual_seed(0)
    model = Settled()
    torch.manual_seed(0)
    other = Settled(drawn=2)
    assert made_with(model)[:2] == made_with(other)[:2]
    assert made_otherwise(made_with(model)[:2], made_with(other), set(), warns=True) == []
    assert [each[:24] for each in made_otherwise(made_with(model), made_with(other), set(), warns=True)] == [
        "the attribute 'drawn' of"
    ]


def test_fields_and_entries_that_the_run_has_not_changed_stay_as_the_script_makes_them():
    """A trainer that the model refers to has more epochs in the resumed run."""
    model, again = (Holding(Memory()) for _ in range(2))
    attributes = Attributes(parts_of(model))
    model.memory.scale, model.memory.limits["done"] = 3.0, 1
    record = attributes.capture(SimpleNamespace(replicated=True), {})
    again.memory.limits["steps"] = 9
    again.memory.table = table = torch.zeros(3)
    assert Attributes(parts_of(again)).restore(record, {}, CPU) == []
    assert again.memory.limits == {"steps": 9, "done": 1}
    assert (again.memory.scale, again.memory.table) == (3.0, table)


class Scaled(nn.Linear):
    scale = 1.0

    def forward(self, data):
        return super().forward(data) * self.scale


def decayed(folder, epochs, sets):
    """Trains up to so many epochs, each with a smaller factor, which the script sets after ``run.prepare``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.2), Scaled(6, 3))
    run, model, optimizer = begin(net, directory=folder, resume="auto")
    if sets or not run.position.step:
        model[1].scale, model[1].note = 1.0, "fixed"
    for _ in run.epochs(epochs):
        model.train()
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
        model.eval()
        model[1].scale *= 0.9
        run.save()
    found = run.fingerprint()
    run.close()
    return found


def test_an_attribute_that_the_script_sets_anew_before_its_loop_is_told(tmp_path, caplog):
    """The resumed run ended in other bits, with exit status 0."""
    whole = decayed(tmp_path / "whole", 3, True)
    decayed(tmp_path / "parts", 1, True)
    assert decayed(tmp_path / "parts", 2, False) != whole and "anew" not in caplog.text
    assert decayed(tmp_path / "parts", 3, False) == whole and "anew" not in caplog.text
    decayed(tmp_path / "again", 1, True)
    assert decayed(tmp_path / "again", 3, True) != whole
    assert "the script has set the attribute 'scale' of 1 anew" in caplog.text
    assert "'if not run.position.step:'" in caplog.text


class Scaling(torch.optim.SGD):
    """Keeps a momentum on each parameter, which also has a rate of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if not hasattr(parameter, "momentum"):
                parameter.momentum, parameter.steps = torch.zeros_like(parameter), 0
            parameter.momentum.mul_(0.9).add_(parameter.grad)
            parameter.steps += 1
            parameter.grad = parameter.momentum * (parameter.lr_scale / parameter.steps)
        return super().step(closure)


def scaled(folder, epochs, stop=None):
    """Trains up to so many epochs, the last of them to step ``stop``; each step lowers the rates of parameters."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Linear(40, 3))
    for parameter in net.parameters():
        parameter.lr_scale = 1.0
    run, model, optimizer = begin(net, Scaling, directory=folder, resume="auto")
    for epoch in run.epochs(epochs):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            for parameter in model.parameters():
                parameter.lr_scale *= 0.9
            if (epoch, run.position.done) == (epochs - 1, stop):
                run.save()
                break
        else:
            run.save()
    found = run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize("stop", [1, None])
def test_what_the_loop_and_the_optimizer_set_on_parameters_goes_through_a_checkpoint(stop, tmp_path, caplog):
    """Momenta were lost without a word; rates were those of the beginning, with a warning about the loss."""
    whole = scaled(tmp_path / "whole", 3)
    scaled(tmp_path / "parts", 1 if stop is None else 2, stop)
    assert scaled(tmp_path / "parts", 3) == whole
    assert "parameter" not in caplog.text


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("basis", torch.eye(6))
        self.small, self.large = torch.eye(6), torch.eye(80)
        self.table, self.tables = np.eye(6), [np.eye(80)]
        self.layer = nn.Linear(6, 6)

    def turn(self):
        """Matrices of torch.linalg lie in memory column by column."""
        self.basis, self.small, self.large = (torch.linalg.qr(torch.randn(n, n))[0] for n in (6, 6, 80))
        self.layer.weight.data = torch.linalg.qr(self.layer.weight.data)[0]
        self.table, self.tables = self.small.double().numpy(), [self.large.double().numpy()]

    def forward(self, x):
        return self.layer(x @ self.basis @ self.small)


def test_how_tensors_lie_in_memory_goes_through_a_checkpoint(tmp_path):
    tensors = []
    for is_new in (True, False):
        rotating = Rotating()
        model = nn.Sequential(rotating, *network())
        run, _, optimizer = begin(model, directory=tmp_path, resume="auto")
        if is_new:
            rotating.turn()
            train_step(run, next(iter(run.batches(dataset()))), optimizer)
            run.save(wait=True)
        arrays = map(torch.from_numpy, (rotating.table, *rotating.tables))
        tensors.append([rotating.basis, rotating.small, rotating.large, rotating.layer.weight, *arrays])
        run.close()
    for one, other in zip(*tensors, strict=True):
        assert one.stride() == other.stride() and torch.equal(one, other)
    assert tensors[1][0].stride() == (1, 6)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_may_be_an_attribute():
    """The look at it raised torch's "Internal error: NestedTensorImpl doesn't support sizes"."""
    model = nn.Linear(2, 2)
    model.rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert Attributes(parts_of(model)).capture(SimpleNamespace(replicated=True), {}) == {}
