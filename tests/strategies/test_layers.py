"""Layers on several devices of one process: where a model is cut, that no cut changes a bit, and what is refused."""

import logging
from functools import cache

import pytest
import torch
from tests.ranks import run_ranks
from tests.strategies.in_process import differing, open_run, rows, train
from tests.strategies.pipeline.test_partition import Clock, Costly
from torch import nn

from lockstep.config.strategy_options import LayersOptions, PipelineOptions
from lockstep.errors import ConfigError
from lockstep.job.assemble import balance
from lockstep.models import freeze, resnet18, transformer
from lockstep.run import Run, RunOptions
from lockstep.strategies.layers import ModelParallel

pytestmark = pytest.mark.timeout(120)
CPU, META = torch.device("cpu"), torch.device("meta")
LAYERS = 8


def chain_of_layers():
    """Eight links: BatchNorm, dropout, a block with a shortcut, and most of the parameters at the end."""
    return nn.Sequential(
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        Shortcut(),
        nn.Dropout(0.2),
        nn.Linear(6, 6),
        nn.ReLU(inplace=True),
        nn.Linear(6, 3),
    )


class Shortcut(nn.Module):
    """Stays whole."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2))

    def forward(self, x):
        return x + self.inner(x)


def under(devices, **options):
    return {"strategy": "layers", "layers": {"devices": devices, **options}}


@cache
def alone(make):
    return train(make)


@pytest.mark.parametrize(
    "cut", [pytest.param(cut, marks=[pytest.mark.slow] * (cut % 3 != 1)) for cut in range(1, LAYERS)]
)
def test_no_cut_changes_a_bit(cut):
    """12 steps; the last of an epoch is ragged."""
    found = train(chain_of_layers, **under(2, split=[str(cut)]))
    assert differing(alone(chain_of_layers), found) == []


@pytest.mark.parametrize("devices", [1, 3, LAYERS])
def test_no_number_of_devices_changes_a_bit(devices):
    assert differing(alone(chain_of_layers), train(chain_of_layers, **under(devices))) == []


def partly_frozen():
    """The first device has nothing to train, and a BatchNorm whose statistics stay."""
    return freeze_layers(chain_of_layers(), ["0", "1", "3"])


def tied_in_the_middle():
    model = chain_of_layers()
    model[5].weight = model[3].inner[0].weight
    return model


def freeze_layers(model, patterns):
    freeze(model, patterns, freeze_statistics=True)
    return model


def test_frozen_layers_on_a_device_of_their_own_and_tied_ones_on_one_device_change_no_bit():
    frozen = train(partly_frozen, **under(2, split=["4"]))
    assert differing(alone(partly_frozen), frozen) == []
    assert differing(alone(tied_in_the_middle), train(tied_in_the_middle, **under(3, split=["1", "6"]))) == []
    assert differing(alone(tied_in_the_middle), train(tied_in_the_middle, **under(4))) == []


def test_a_forward_and_a_loss_of_ones_own_may_use_the_whole_model():
    def forward(model):
        return lambda data: 2 * model(data[0])

    def loss(output, data):
        return nn.functional.cross_entropy(output, data[1])

    expected = train(chain_of_layers, forward=forward, loss=loss)
    assert differing(expected, train(chain_of_layers, forward=forward, loss=loss, **under(3))) == []


def test_each_device_gets_its_layers_and_what_enters_them():
    """The second device holds no values, which shows what lies there on a machine with one device."""
    strategy = ModelParallel([CPU, META, META], 8, LayersOptions(split=("3", "6")))
    model = strategy.setup_model(chain_of_layers())
    held = {name: tensor.device for name, tensor in model.named_parameters()}
    assert {name for name, device in held.items() if device == CPU} == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    }
    rows_on_cpu = torch.zeros(2, 6)
    assert model[2](rows_on_cpu).device == CPU, "the end of the first device"
    assert model[3](rows_on_cpu).device == META and model[6](rows_on_cpu).device == META, "where others begin"
    with pytest.raises(RuntimeError, match=r"meta"):
        model[5](rows_on_cpu)  # within a device nothing is moved
    with pytest.raises(NotImplementedError, match=r"Cannot copy out of meta tensor"):
        model(rows_on_cpu)  # the output comes back to the first device


def test_the_log_says_where_devices_begin(caplog):
    caplog.set_level(logging.INFO, "lockstep.strategies.layers")
    ModelParallel([CPU] * 3, 8, LayersOptions(split=("3", "5"))).setup_model(chain_of_layers())
    assert caplog.messages == ["Layers begin with: 0 on cpu, 3 on cpu, 5 on cpu."]


class Functions(nn.Module):
    """Two layers, and functions between them."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def test_a_device_may_have_functions_alone():
    """A model of two layers on three devices ended in StopIteration."""
    model = ModelParallel([CPU] * 3, 8, LayersOptions()).setup_model(Functions())
    rows = torch.ones(2, 6)
    assert torch.equal(model(rows), model.last(torch.tanh(model.first(rows))))


@pytest.mark.parametrize(
    "devices, split, said",
    [
        (9, (), r"strategy 'layers' needs 9 stages, and the model is a chain of 8 modules: 0, 1, 2"),
        (3, ("3",), r"layers.split names 1 modules, and 3 stages need 2"),
        (
            2,
            ("33",),
            r"names '33', and the model cannot be cut there. Did you mean '3'\? It can be cut before: 1, 2",
        ),
        (2, ("3.inner",), r"layers.split names '3.inner', and the model cannot be cut there"),
        (3, ("5", "3"), r"layers.split=\['5', '3'\] is not in the order of the model"),
        (
            2,
            ("0",),
            r"leaves a stage empty. Name modules in their order, none twice and not the first: 1, 2, 3",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_so_is_refused(devices, split, said):
    with pytest.raises(ConfigError, match=said):
        train(chain_of_layers, **under(devices, split=split))


def test_a_weight_that_would_lie_on_two_devices_is_refused_with_a_split_that_works():
    with pytest.raises(
        ConfigError, match=r"'5.weight' is also used in '3', and layers.split.*Split at \['(\d)'\]"
    ) as said:
        train(tied_in_the_middle, **under(2, split=["4"]))
    working = said.value.args[0].partition("['")[2][0]
    assert differing(alone(tied_in_the_middle), train(tied_in_the_middle, **under(2, split=[working]))) == []
    language_model = transformer(vocabulary_size=9, depth=1, width=8, heads=2, tied=True)
    with pytest.raises(ConfigError, match=r"'head.weight' is also used in 'embed.table'.*Untie it .*, or use"):
        ModelParallel([CPU] * 2, 8, LayersOptions()).setup_model(language_model)


def costly():
    """Links that take 1, 1, 1, 7, 2 and 2 seconds by a clock that only they move, and draw while they do."""
    return nn.Sequential(*[Costly(CLOCK, cost, width=6) for cost in (1, 1, 1, 7, 2, 2)])


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr("lockstep.strategies.pipeline.partition.time", CLOCK)


@pytest.mark.slow
def test_the_time_of_a_forward_pass_decides_where_it_is_asked_to_and_changes_no_bit(clock, caplog):
    caplog.set_level(logging.INFO, "lockstep.strategies")
    assert differing(alone(costly), train(costly, before_prepare=balance, **under(2, balance="time"))) == []
    found = [each.getMessage() for each in caplog.records if each.name.startswith("lockstep.strategies")]
    assert found == [
        "Cut by measured time: layers.split = ['4']; forward passes of 1e+04, 4e+03 ms.",
        "Layers begin with: 0 on cpu, 4 on cpu.",
    ]


def test_measuring_leaves_values_modes_and_random_numbers_as_they_were(clock):
    model, run = costly(), open_run(**under(3, balance="time"))
    model[2].eval()
    before, numbers = (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        torch.get_rng_state(),
    )
    balance(run, model, rows())
    assert list(run.strategy.partition.points) == ["3", "4"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert [part.training for part in model] == [number != 2 for number in range(6)]
    run.close()


def test_nothing_is_measured_where_it_was_not_asked_for(clock):
    for options in ({}, under(1, balance="time"), under(2), under(2, split=["4"])):
        run, now = open_run(**options), CLOCK.now
        balance(run, costly(), rows())
        assert CLOCK.now == now
        run.close()


class Named(torch.utils.data.Dataset):
    """Samples that go to the model by keyword."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"input": torch.zeros(6), "target": 0}


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(ConfigError, match=r"layers.balance='time' is measured by lockstep train. .*measured_split"):
        train(chain_of_layers, **under(2, balance="time"))
    with pytest.raises(ConfigError, match=r"strategy 'layers' needs 9 stages, and the model is a chain of 8"):
        train(chain_of_layers, before_prepare=balance, **under(9, balance="time"))
    with pytest.raises(ConfigError, match=r"takes its batches by keyword. Let samples be pairs"):
        train(chain_of_layers, Named(), before_prepare=balance, **under(2, balance="time"))


@pytest.mark.parametrize("options, table", [(LayersOptions, "layers"), (PipelineOptions, "pipeline")])
def test_a_split_is_either_given_or_found(options, table):
    with pytest.raises(ConfigError, match=rf"{table}.balance='time' finds where .*, and {table}.split=\['2'\] says it"):
        options(balance="time", split=("2",))
    with pytest.raises(ConfigError, match=r"balance 'tiem' is not known. Did you mean 'time'"):
        options(balance="tiem")


def in_two_processes(world):
    """The times on rank 0's clock that this rank was told, under pipeline and layers, and the messages on mistakes."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = []
    for options in (
        {"strategy": "pipeline", "pipeline": {"balance": "time", "schedule": "interleaved"}},
        {"strategy": "hybrid", "mesh": "data=2,layers=3", "layers": {"balance": "time"}},
        {"strategy": "hybrid", "mesh": "data=2,layers=9", "layers": {"balance": "time"}},
        {"strategy": "layers"},
    ):
        try:
            run = Run(RunOptions.of(global_batch=16, micro_batches=8, threads=1, **options), world)
            balance(run, chain_of_layers(), rows())
            found.append(list(run.strategy.partition.points))
            run.strategy.release()
        except ConfigError as error:
            found.append(str(error))
    return found


def test_all_ranks_take_what_the_first_one_measured():
    first, second = run_ranks(in_two_processes, 2)
    assert first == second
    assert [len(points) for points in first[:2]] == [3, 2]
    assert "needs 9 stages, and the model is a chain of 8 modules" in first[2]
    assert (
        "uses all its devices from one process, but 2 processes were started. Start one, or use strategy 'hybrid'"
        in first[3]
    )


@pytest.mark.gpus(2)
def test_two_gpus_give_the_bits_of_one():
    from tests.strategies.jobs import photos

    def make():
        return resnet18(num_classes=5)

    assert differing(train(make, photos(40), epochs=1), train(make, photos(40), epochs=1, **under(2))) == []
