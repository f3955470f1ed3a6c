"""The strategy that options name, in a world of one."""

from types import SimpleNamespace

import pytest
import torch

from lockstep.config.options import RunOptions
from lockstep.core.mesh import Mesh
from lockstep.errors import ConfigError
from lockstep.strategies import open_strategy
from lockstep.strategies.open_strategy import _devices_of_process, _opener

CPU = torch.device("cpu")


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "parameter_server", "pipeline", "tensor"])
def test_alone_every_strategy_that_lays_out_ranks_is_single(strategy):
    assert open_strategy(RunOptions.of(strategy=strategy, global_batch=8), None, CPU).name == "single"


@pytest.mark.parametrize("strategy", ["dp", "layers"])
def test_strategies_of_one_process_take_several_devices(strategy):
    opened = open_strategy(RunOptions.of(strategy=strategy, global_batch=8), None, CPU)
    assert (opened.name, opened.devices) == (strategy, (CPU, CPU))
    opened.release()


def test_devices_of_a_process_are_counted_from_its_first(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    first, alone = torch.device("cuda", 2), SimpleNamespace(rank=0)
    assert [device.index for device in _devices_of_process(first, 0, alone)] == [2, 3]
    with pytest.raises(ConfigError, match=r"3 devices starting at cuda:2 .* sees 4 GPUs"):
        _devices_of_process(first, 3, alone)


@pytest.mark.parametrize(
    ("mesh", "opened"),
    {
        "data=2,pipeline=1": "ddp",
        "data=1,pipeline=2": "pipeline",
        "data=2,pipeline=2": "pipeline",
        "fsdp=2,pipeline=1": "fsdp",
        "fsdp=2,pipeline=2": "pipeline",
        "data=2,tensor=1": "ddp",
        "data=1,tensor=2": "tensor",
        "data=2,layers=1": "layers",
        "data=1,pipeline=1": "single",
    }.items(),
)
def test_the_axes_of_a_mesh_that_have_several_ranks_decide(mesh, opened):
    options = RunOptions.of(strategy="hybrid", mesh=mesh, global_batch=8)
    assert _opener(options, Mesh.parse(mesh)).__name__ == f"_open_{opened}"
