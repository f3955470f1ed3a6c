import pytest

from lockstep.config.strategy_options import (
    LayersOptions,
    PipelineOptions,
    TensorOptions,
    devices_per_process,
    mesh_of,
    shares_rows_out,
    steps_parts,
)
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("strategy", "mesh", "text"),
    [("ddp", "", "data=4"), ("fsdp", "", "fsdp=4"), ("hybrid", "data=2,pipeline=2", "data=2,pipeline=2")],
)
def test_a_strategy_lays_out_its_world(strategy, mesh, text):
    assert str(mesh_of(strategy, mesh, 4)) == text


@pytest.mark.parametrize(
    ("strategy", "mesh", "reason"),
    [
        ("dpp", "", "mean 'dp'"),
        ("hybrid", "", "needs a mesh"),
        ("ddp", "data=4", "belongs to strategy 'hybrid'"),
    ],
)
def test_a_mesh_that_does_not_belong_is_refused(strategy, mesh, reason):
    with pytest.raises(ConfigError, match=reason):
        mesh_of(strategy, mesh, 4)


def test_processes_that_hold_layers_use_several_devices():
    assert devices_per_process("") == devices_per_process("data=2,pipeline=2") == 1
    assert devices_per_process("data=2,layers=3") == 3


def test_parts_are_stepped_where_parameters_are_shared_out():
    assert shares_rows_out("fsdp", "") and not shares_rows_out("hybrid", "data=2,pipeline=2")
    assert steps_parts("hybrid", "data=2,tensor=2") and not steps_parts("ddp", "")


def test_a_model_is_cut_in_one_way():
    for options in (LayersOptions, PipelineOptions):
        with pytest.raises(ConfigError, match="Give one of the two"):
            options(split=("fc",), balance="time")


def test_the_nearest_number_of_micro_batches_is_named():
    PipelineOptions().check_micro_batches(8, 2, 4)
    with pytest.raises(ConfigError, match="at least micro_batches=8"):
        PipelineOptions().check_micro_batches(6, 2, 4)
    with pytest.raises(ConfigError, match="for example micro_batches=8"):
        PipelineOptions(schedule="interleaved").check_micro_batches(6, 2, 4)


def test_an_unknown_kind_of_split_is_named():
    with pytest.raises(ConfigError, match="'column'"):
        TensorOptions(plan=("*.fc=columns",))
