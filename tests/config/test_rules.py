"""Every impossible combination, by the name of its rule."""

import importlib.util
from pathlib import Path

import pytest

from lockstep.config.job_file import load_job, parse_set
from lockstep.config.options import RunOptions
from lockstep.config.rules import JOB_RULES, RULES, AvailableDevices, machine_problems, require_rules
from lockstep.errors import ConfigError

BROKEN = {
    "global_batch is a multiple of micro_batches": (
        ["training.global_batch=130", "training.micro_batches=8"],
        "global_batch is 130, which micro_batches=8 does not divide. Choose a multiple, for example 128, or use "
        "micro_batches=5.",
    ),
    "single uses one device": (["training.strategy=single", "run.devices=2"], "strategy 'single' uses one"),
    "every rank has a micro-batch": (["run.devices=9"], "9 devices cannot share micro_batches=8"),
    "a mesh fits the devices": (
        ["training.strategy=hybrid", "training.mesh=data=2,pipeline=2", "run.devices=cpu:6"],
        "takes 4 processes and 6 were started",
    ),
    "servers leave a worker": (
        ["training.strategy=parameter_server", "parameter_server.servers=3", "run.devices=cpu:3"],
        "servers is 3, which leaves no worker among 3 processes. Use at most 2.",
    ),
    "a reducer that is chosen is used": (
        ["training.strategy=fsdp", "training.reduce=ring"],
        "strategy 'fsdp' has an exchange of its own",
    ),
    "fsdp shards contiguous weights": (
        ["training.strategy=fsdp", "training.channels_last=true"],
        "Use false, or strategy 'ddp'",
    ),
    "what is offloaded comes from a GPU": (
        ["training.strategy=fsdp", "fsdp.cpu_offload=true", "run.devices=cpu:2"],
        "moves parameters from a GPU to the host, and the devices are CPUs. Use false.",
    ),
    "what stays whole after backward does after forward": (
        ["training.strategy=fsdp", "fsdp.reshard_after_backward=false"],
        "Make both false",
    ),
    "stages are gathered once": (
        ["training.strategy=hybrid", "training.mesh=fsdp=2,pipeline=2", "fsdp.reshard_after_forward=false"],
        "has no use for fsdp.reshard_after_forward. Leave that out",
    ),
    "a pipeline is filled": (
        ["training.strategy=hybrid", "training.mesh=data=3,pipeline=3"],
        "micro_batches is 8. A pipeline of 3 stages is not filled by micro_batches=8 over 3 data-parallel replicas, "
        "which leave 2 for some. Use at least micro_batches=9, or fewer stages.",
    ),
    "parts are stepped alone": (
        ["training.strategy=tensor", "optimizer.target=torch.optim:Adafactor"],
        "is 'torch.optim:Adafactor', and strategy 'tensor' steps it on parts",
    ),
    "compiled code is not portable": (
        ["training.portable=true", "training.compile=true"],
        "torch.compile writes code for the CPU that it runs on",
    ),
    "split layers are not compiled": (
        ["training.strategy=tensor", "training.compile=true"],
        "exchange inside of the model, where compile cannot go",
    ),
    "tf32 needs CUDA": (["training.precision=tf32", "run.devices=cpu:2"], "Use fp32 or bf16"),
    "a loss scale is used": (
        ["training.loss_scale_growth_interval=10"],
        "is 'fp32', which scales no loss, and loss_scale_growth_interval is set. Leave that out, or use fp16.",
    ),
    "powersgd keeps gradients of one scale": (
        ["training.reduce=powersgd", "training.precision=fp16"],
        "Use precision bf16 or fp32",
    ),
    "asynchronous workers have no loss scale": (
        [
            "training.strategy=parameter_server",
            "parameter_server.mode=asynchronous",
            "training.precision=fp16",
        ],
        "Use bf16 or fp32, or parameter_server.mode='synchronous'.",
    ),
    "shards are shared out": (
        ["training.strategy=fsdp", "tensor.shards=4"],
        "is 4, and strategy 'fsdp' computes whole layers",
    ),
    "SyncBatchNorm has whole models": (
        ["training.sync_batch_norm=true", "training.compile=true"],
        "where compile cannot go. Use one of the two.",
    ),
    "SyncBatchNorm keeps activations": (
        ["training.sync_batch_norm=true", 'training.checkpoint_activations=["1"]'],
        "is given beside sync_batch_norm",
    ),
    "recorded micro-batches belong to recorded steps": (
        ["training.record_micro_batches=true", "training.gradients_every=0"],
        "no step is recorded",
    ),
    "the warm-up is given once": (
        ["schedule.warmup_steps=5", "schedule.warmup_epochs=1"],
        "Give one of the two",
    ),
    "the warm-up ends before the run": (["schedule.warmup_epochs=4"], "the warm-up would never end"),
    "a schedule counts optimizer steps": (
        ["schedule.target=torch.optim.lr_scheduler:ReduceLROnPlateau"],
        "schedules count optimizer steps",
    ),
    "the optimizer's parameters come from the model": (["optimizer.params=3"], "given by the model"),
    "an evaluation every n steps has data": (
        ["training.evaluate_every_steps=5"],
        "but the job has no [data.validation] to evaluate",
    ),
    "statistics are frozen beside parameters": (
        ["weights.freeze_statistics=true"],
        "weights.freeze is not given",
    ),
    "metrics are of an evaluation": (
        ["metrics.a.target=m:f"],
        "--set metrics.a.target=m:f: metrics are given, but the job has no",
    ),
    "layer_decay is of a known learning rate": (
        ["parameters.layer_decay=0.5", "optimizer.lr=none"],
        "Give optimizer.lr a number",
    ),
    "an average is of weights that processes hold": (
        [
            "training.ema_decay=0.9",
            "training.strategy=parameter_server",
            "parameter_server.mode=asynchronous",
        ],
        "asynchronous workers hold no weights that all agree on",
    ),
    "the package of wandb is there": (["log.wandb=mine"], "pip install wandb"),
    "the package of mlflow is there": (["log.mlflow=mine"], "pip install mlflow"),
    "early stopping has something to judge by": (["training.early_stop=2"], "no [data.validation]"),
    "the data exists": (
        ["data.root=/no/such", "data.train.root={data}"],
        "'/no/such', which does not exist",
    ),
    "runs are no class of photos": (
        ["data.root=/", "data.train.target=lockstep.data:ImageFolder", "data.train.root={data}"],
        "taken for a class. Set it to a folder elsewhere: --set run.directory=/runs",
    ),
    "the weights exist": (["weights.path=/no/such.safetensors"], "which is not a file"),
    "what is resumed exists": (["checkpoint.resume=/no/such"], "which does not exist"),
    "a run never writes over another": (["run.name=taken"], "Choose another name"),
}


@pytest.mark.parametrize("rule", RULES + JOB_RULES, ids=lambda rule: rule.name)
@pytest.mark.fault("S8")
def test_each_rule_refuses_its_example(rule, load, tmp_path):
    if rule.key in ("log.wandb", "log.mlflow") and importlib.util.find_spec(rule.key.partition(".")[2]):
        pytest.skip(f"the package of {rule.key} is installed")
    options, expected = BROKEN[rule.name]
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError) as caught:
        load(*options, f"run.directory={tmp_path}")
    assert expected in str(caught.value)
    assert "mistakes" not in str(caught.value)


def test_no_metric_takes_the_place_of_the_loss(load):
    """The log had the metric as validation_loss, and the best checkpoint was that of its lowest value."""
    with pytest.raises(ConfigError, match="the validation_loss of the log is that of"):
        load("metrics.loss.target=math:hypot", "data.validation.target=torch.utils.data:TensorDataset")


@pytest.mark.fault("S8")
def test_every_example_belongs_to_a_rule():
    assert set(BROKEN) == {rule.name for rule in RULES + JOB_RULES}


@pytest.mark.fault("S7")
def test_several_broken_rules_are_said_together(load):
    with pytest.raises(ConfigError) as caught:
        load("run.devices=9", "training.early_stop=1", "training.global_batch=9")
    assert str(caught.value).startswith("The job has 3 mistakes.")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["training.strategy=single", "run.devices=1"], "one device is single"),
        (["training.strategy=single"], "auto is one device under single"),
        (["run.devices=8"], "as many ranks as micro-batches"),
        (["training.precision=tf32"], "auto may be a CUDA device"),
        (["training.record_micro_batches=true"], "gradients are recorded as often as fingerprints"),
        (["schedule.warmup_epochs=2.5"], "less than three epochs"),
        (["checkpoint.resume=auto"], "there need not be a run yet"),
        (["run.name=new"], "a free name"),
        (["training.strategy=pipeline", "run.devices=8"], "as many stages as micro-batches"),
        (["training.strategy=hybrid", "training.mesh=fsdp=4,pipeline=2"], "both full"),
        (
            ["training.strategy=fsdp", "run.devices=1", "optimizer.target=torch.optim:Adafactor"],
            "it is single",
        ),
        (["training.strategy=ddp", "optimizer.target=torch.optim:Adafactor"], "whole parameters"),
        (["training.strategy=fsdp", "fsdp.cpu_offload=true"], "auto may be a CUDA device"),
    ],
)
def test_what_is_just_possible_is_allowed(load, tmp_path, options, why):
    assert load(*options, f"run.directory={tmp_path}"), why


def test_devices_are_counted_where_the_setting_says_it():
    counts = {3: 3, "3": 3, "0,5": 2, "5,": 1, "cpu:4": 4, "auto": None, "cpu": None}
    assert {value: AvailableDevices.asked_for(value).count for value in counts} == counts


@pytest.mark.fault("S8")
def test_what_the_machine_adds_is_held_against_the_rules(load):
    auto = load()
    assert not machine_problems(auto, 2, "cuda")
    many = machine_problems(auto, 16, "cuda")
    assert "16 devices cannot share micro_batches=8" in many[0].text
    no_gpu = machine_problems(load("training.precision=tf32"), 1, "cpu")
    assert "tf32" in no_gpu[0].text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["training.strategy=layers", "run.devices=cpu:12"], ""),
        (["training.strategy=tensor", "run.devices=cpu:12"], ""),
        (["training.strategy=parameter_server", "run.devices=cpu:9"], ""),
        (
            ["training.strategy=parameter_server", "run.devices=cpu:10"],
            "9 devices cannot share micro_batches=8. Use at most 9",
        ),
        (["training.strategy=hybrid", "training.mesh=data=2,layers=8", "run.devices=cpu:16"], ""),
        (
            ["training.strategy=hybrid", "training.mesh=data=2,layers=2", "run.devices=cpu:3"],
            "Use a multiple of 2",
        ),
        (["training.strategy=hybrid", "training.mesh=data=9,layers=1", "run.devices=cpu:9"], "cannot share"),
        (["training.strategy=hybrid"], "needs one, such as 'data=2,pipeline=2'"),
        (["training.strategy=ddp", "training.mesh=data=2"], "belongs to strategy 'hybrid'"),
        (
            ["training.strategy=hybrid", "training.mesh=data=2,fsdp=2"],
            "cannot lay out the mesh data=2,fsdp=2",
        ),
        (["training.strategy=hybrid", "training.mesh=data=4"], "or strategy 'ddp' without a mesh"),
        (["training.strategy=hybrid", "training.mesh=pipeline=4"], "or strategy 'pipeline' without a mesh"),
        (
            ["training.strategy=hybrid", "training.mesh=fsdp=2,pipeline=2", "training.reduce=ring"],
            "strategy 'hybrid' has an exchange of its own",
        ),
        (
            ["training.strategy=hybrid", "training.mesh=fsdp=2,pipeline=2", "training.channels_last=true"],
            "'hybrid' shards contiguous weights",
        ),
        (
            ["training.strategy=pipeline", "pipeline.schedule=interleaved", "run.devices=3"],
            "Use a multiple of 3, for example micro_batches=9, or schedule '1f1b'",
        ),
    ],
)
def test_only_what_shares_the_micro_batches_is_counted(load, options, expected):
    if not expected:
        load(*options)
        return
    with pytest.raises(ConfigError) as caught:
        load(*options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"micro_batches": 3}, "global_batch is 8, which micro_batches=3 does not divide"),
        (
            {"strategy": "fsdp", "reduce": "ring"},
            "reduce is 'ring', and strategy 'fsdp' has an exchange of its own",
        ),
        (
            {"strategy": "tensor", "compile": True},
            "compile is true, and the layers that strategy 'tensor' splits exchange inside",
        ),
        ({"strategy": "hybrid"}, "mesh is not given"),
        ({"mesh": "data=2"}, "belongs to strategy 'hybrid'"),
        (
            {
                "strategy": "parameter_server",
                "parameter_server": {"mode": "asynchronous"},
                "precision": "fp16",
            },
            "precision is 'fp16', whose loss scale",
        ),
    ],
)
def test_options_of_init_are_held_against_the_same_rules_by_their_keywords(options, expected):
    with pytest.raises(ConfigError) as caught:
        RunOptions.of(global_batch=8, **options)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("options", "machine", "expected"),
    [
        ({"strategy": "single"}, AvailableDevices(2, 2), "world_size is 2, but strategy 'single' uses one"),
        ({}, AvailableDevices(9, 9), "world_size is 9: 9 devices cannot share micro_batches=8"),
        (
            {"strategy": "parameter_server", "parameter_server": {"servers": 2}},
            AvailableDevices(2, 2),
            "parameter_server.servers is 2, which leaves no worker among 2 processes",
        ),
        (
            {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
            AvailableDevices(2, 2, "cpu"),
            "fsdp.cpu_offload is true",
        ),
        (
            {"strategy": "pipeline"},
            AvailableDevices(9, 9),
            "micro_batches is 8. A pipeline of 9 stages is not filled",
        ),
    ],
)
def test_options_of_init_are_held_against_the_world(options, machine, expected):
    given = RunOptions.of(global_batch=8, **options)
    with pytest.raises(ConfigError) as caught:
        require_rules(given, machine)
    assert str(caught.value).startswith(expected)


def test_a_file_that_may_not_be_looked_at_is_named(monkeypatch, tmp_path):
    """A data folder in the home of another user ended in a traceback of PermissionError."""

    def refuses(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    job = load_job("digits", [parse_set(f"checkpoint.resume={tmp_path}")])
    monkeypatch.setattr(Path, "stat", refuses)
    found = [problem.text for problem in machine_problems(job, 2, "cpu")]
    assert f"checkpoint.resume leads to '{tmp_path}', which cannot be read: Permission denied." in found


def test_a_batch_of_one_sample_is_told_how_to_stay_one():
    """As in scripts that train on a sentence at a time; only a batch of 8 was named."""
    with pytest.raises(ConfigError, match=r"example 8, or use micro_batches=1, which one process computes alone.$"):
        RunOptions.of(global_batch=1)
