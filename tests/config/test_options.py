"""The mesh that a strategy lays out."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from lockstep.config.job import JobConfig
from lockstep.config.strategy_options import OPTIONS, STRATEGIES, mesh_of
from lockstep.errors import ConfigError
from lockstep.run import RunOptions


@pytest.mark.parametrize("cls", [RunOptions, JobConfig])
def test_options_of_strategies_are_fields_of_their_names(cls):
    fields = {field.name: field.default_factory for field in dataclasses.fields(cls)}
    assert {name: fields.get(name) for name in OPTIONS} == OPTIONS


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "hybrid"])
def test_a_strategy_lays_out_the_whole_world(strategy):
    assert mesh_of(strategy, "", 1).ranks == 1
    with pytest.raises(ConfigError, match="belongs to strategy 'hybrid'"):
        mesh_of(strategy, "data=2", 2)


def test_an_unknown_strategy_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"'fspd' is not known\. Did you mean 'fsdp'"):
        mesh_of("fspd", "", 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("device", "no option 'device'. Devices belong to the command, lockstep run --devices 2"),
        ("batch_size", "no option 'batch_size'. Give global_batch,"),
        ("mixed_precision", "no option 'mixed_precision'. Give precision='bf16' or 'fp16'."),
        ("save_every", "no option 'save_every'. Call run.save() in the loop."),
        ("output_dir", "no option 'output_dir'. Give directory='...'."),
        ("num_epochs", "no option 'num_epochs'. Give their number to run.epochs(...)."),
        ("max_grad_norm", "no option 'max_grad_norm'. Call run.clip_gradients(1.0)."),
        ("lr", "no option 'lr'. Give it to the optimizer."),
        ("num_workers", "no option 'num_workers'. Give run.batches a DataLoader that has it."),
        ("sed", "no option 'sed'. Did you mean 'seed'?"),
    ],
)
def test_an_option_of_another_library_is_answered_with_what_is_here(name, said):
    """Who gave device= was asked whether reduce= was meant."""
    with pytest.raises(ConfigError) as caught:
        RunOptions.of(global_batch=8, **{name: "x"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compile": "False"}, "compile should be true or false and is 'False'."),
        ({"deterministic": None}, "deterministic should be true or false and is None."),
        ({"global_batch": True}, "global_batch should be an integer and is True."),
        ({"loss_scale": "1024"}, "loss_scale should be a number and is '1024'."),
        ({"resume": True}, "resume should be a string and is True. Give resume='auto' to go on from the newest"),
        ({"strategy": None}, "strategy should be a string and is None. Leave it out for the default."),
        ({"fsdp": {"cpu_offload": "False"}}, "fsdp.cpu_offload should be true or false and is 'False'."),
        ({"pipeline": {"split": "layer2"}}, "pipeline.split should be a list of strings and is 'layer2'."),
        ({"compile": "no", "timeout": "60"}, "'no'. timeout should be a number and is '60'."),
    ],
)
def test_a_value_of_another_type_is_refused(options, said):
    """compile="False" compiled, as Python takes the text as true; a timeout that is a text ended in a TypeError."""
    with pytest.raises(ConfigError) as caught:
        RunOptions.of(**{"global_batch": 8, **options})
    assert said in str(caught.value)


def test_numbers_of_numpy_and_whole_numbers_for_others_are_taken():
    options = RunOptions.of(global_batch=np.int64(8), timeout=np.float32(60), loader_timeout=9, keep=None)
    assert (options.global_batch, options.timeout, options.loader_timeout, options.keep) == (8, 60, 9, None)


def test_an_option_that_argparse_leaves_at_none_and_a_path_are_taken():
    """resume=args.resume without --resume was refused; a Path is what pathlib gives for a checkpoint."""
    options = RunOptions.of(global_batch=8, directory="a", resume=None, profile=None)
    assert (options.resume, options.profile) == ("", "")
    assert RunOptions.of(global_batch=8, resume=Path("a") / "step-00000003").resume == "a/step-00000003"
