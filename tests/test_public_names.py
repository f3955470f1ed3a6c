"""The names, signatures, flags and numbers that users and old files depend on, written out.

A test that fails here says that a program, a job file or a run folder of somebody may no longer work. A new name is
added to its list; a name is taken out only with a deprecation before. Annotations are left out: they may be refined.
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import re
import typing
import warnings
from functools import cache
from pathlib import Path

import pytest

import lockstep
import lockstep.data
import lockstep.errors
import lockstep.models
import lockstep.reduce
import lockstep.verify

# Where this test looks at what is not public itself. These modules may move; the lists below may not change.
from lockstep.cli.command_line import _COMMANDS, _parser
from lockstep.config.components import Component
from lockstep.config.job import JobConfig

SOURCE = Path(lockstep.__file__).parent

NAMES = [
    "CheckpointError",
    "CheckpointMismatch",
    "ConfigError",
    "DataError",
    "LockstepError",
    "NonFiniteError",
    "RankError",
    "ReplicaError",
    "Run",
    "RunOptions",
    "StallError",
    "World",
    "heartbeat",
    "init",
    "launch",
]
INIT = "(*, global_batch=None, micro_batches=8, seed=0, **options)"
LAUNCH = "(function, *args, devices='auto', threads=None, log_directory='', **kwargs)"
RUN = {
    "": "(options, world=None)",
    "backward": "(self, batch, loss=None, *, forward=None, also=None, whole_batch=False)",
    "batches": "(self, data, *, shuffle=True, drop_last=False, workers=None)",
    "clip_gradients": "(self, max_norm)",
    "close": "(self)",
    "epochs": "(self, count)",
    "evaluate": "(self, data, metric, *, model=None, forward=None, workers=None, repeatable=False)",
    "fingerprint": "(self)",
    "is_main": "property",
    "position": "property",
    "predict": "(self, data, keep=None, *, model=None, forward=None, workers=None, everywhere=False)",
    "prepare": "(self, model, *others, values_from_main=False)",
    "print": "(self, *values, **options)",
    "save": "(self, *given, wait=False, directory=None)",
    "skipped_steps": "property",
    "span": "(self, name)",
    "state_dict": "(self)",
    "steps_per_epoch": "(self, data, *, drop_last=False, model=None)",
}
WORLD = {
    "": "(*, rank=0, world_size=1, local_rank=0, local_world_size=1, node=0, nodes=1, launcher='python', "
    "rendezvous='', run_id='', run_directory='', restart=0, is_debugged=False, is_portable=False, "
    "profile='')",
    "from_environment": "classmethod (environment=None)",
    "is_main": "property",
    "is_one_host": "property",
}
RUN_ATTRIBUTES = ["options", "world", "device", "strategy", "extra", "position", "is_main", "is_portable"]
RUN_OPTIONS = {
    "global_batch": "required",
    "micro_batches": 8,
    "seed": 0,
    "precision": "fp32",
    "reduce": "ordered",
    "portable": False,
    "powersgd_rank": 4,
    "loss_scale": None,
    "loss_scale_growth_factor": 2.0,
    "loss_scale_backoff_factor": 0.5,
    "loss_scale_growth_interval": 2000,
    "threads": None,
    "channels_last": False,
    "compile": False,
    "deterministic": True,
    "sync_batch_norm": False,
    "running_buffers": (),
    "strategy": "ddp",
    "mesh": "",
    "dp": {"replicas": 0},
    "layers": {"devices": 0, "split": (), "balance": "bytes"},
    "fsdp": {
        "reshard_after_forward": True,
        "reshard_after_backward": True,
        "cpu_offload": False,
        "mixed_precision": "",
    },
    "parameter_server": {"servers": 1, "mode": "synchronous", "staleness": 4, "snapshot_every": 100},
    "pipeline": {"schedule": "1f1b", "stages_per_rank": 0, "split": (), "balance": "bytes"},
    "tensor": {"plan": (), "shards": 0},
    "directory": None,
    "resume": "",
    "force_context": False,
    "keep": 3,
    "save_in_background": True,
    "fingerprint_every": 100,
    "checks": "first",
    "shared_memory": True,
    "evaluation_batch": None,
    "prefetch": 2,
    "loader_timeout": 120.0,
    "timeout": 600.0,
    "profile": "",
}
ERRORS = {
    "CheckpointError": ("DataError", 3),
    "CheckpointMismatch": ("ConfigError", 2),
    "ConfigError": ("LockstepError", 2),
    "DataError": ("LockstepError", 3),
    "LockstepError": ("Exception", 4),
    "NonFiniteError": ("LockstepError", 6),
    "RankError": ("LockstepError", 4),
    "ReplicaError": ("RankError", 4),
    "StallError": ("LockstepError", 5),
}
EXIT_CODES = {
    "EXIT_DONE": 0,
    "EXIT_CONFIG": 2,
    "EXIT_DATA": 3,
    "EXIT_RANK": 4,
    "EXIT_STALLED": 5,
    "EXIT_NON_FINITE": 6,
    "EXIT_PREEMPTED": 75,
    "EXIT_INTERRUPTED": 130,
}
DATA = [
    "CIFAR10",
    "EVALUATION_EPOCH",
    "IDX",
    "ArrayTransform",
    "ArrowFiles",
    "Batch",
    "BatchDataset",
    "BrokenSample",
    "Bucketed",
    "CSVTable",
    "CenterCrop",
    "Cut",
    "Digits",
    "EvaluationLoader",
    "HuggingFace",
    "ImageArrays",
    "ImageFolder",
    "ImageTransform",
    "MicroBatch",
    "Mixed",
    "Normalize",
    "NumpyArrays",
    "PadCropFlip",
    "PadSequences",
    "PhotoFiles",
    "RandomErasing",
    "RandomResizedCrop",
    "SampleKeys",
    "SkipBroken",
    "Source",
    "Squeeze",
    "StepLoader",
    "Stream",
    "TarShards",
    "TokenFiles",
    "Weighted",
    "adopt",
    "check_batch_size",
    "check_labels",
    "class_weights",
    "known_labels",
    "read_idx",
    "sample_name",
]
MODELS = {
    "ResNet": "(block, depths, *, num_classes=1000, zero_init_residual=False, small_images=False)",
    "WeightsReport": "(path, loaded, skipped, classes)",
    "digits_net": "(*, num_classes=10, width=16, dropout=0.25)",
    "freeze": "(model, patterns, *, freeze_statistics=False)",
    "load_weights": "(model, path, *, strict_head=False)",
    "lstm": "(*, num_classes, vocabulary_size=None, in_features=None, hidden_size=128, num_layers=1, dropout=0.0)",
    "perceptron": "(*, in_features=784, hidden=(256, 128), num_classes=10, dropout=0.0)",
    "resnet18": "(*, num_classes=1000, zero_init_residual=False, small_images=False)",
    "resnet34": "(*, num_classes=1000, zero_init_residual=False, small_images=False)",
    "resnet50": "(*, num_classes=1000, zero_init_residual=False, small_images=False)",
    "transformer": "(*, vocabulary_size, max_length=256, width=128, depth=4, heads=4, dropout=0.1, tied=False, "
    "num_classes=None)",
}
ORDERED_HOOK = "(state, bucket)"
ORDERED_HOOK_STATE = "(group=None)"
RECORDER = {
    "": "(folder, model, *optimizers, first_step=0, loss=None)",
    "batch": "(self, *, samples=None, inputs=None, targets=None, losses=None, loss=None)",
    "step": "(self)",
}
COMMANDS = {
    "new": """data --kind --target --goal --epochs --name --yes""",
    "train": """job --data --devices --strategy --mesh --precision --epochs --threads --resume --restarts
--restart-world --set --per-device-batch --portable --debug-rank --debug-port --nnodes --node-rank
--master --interface --token-file --start-limit --rendezvous --profile --ray --dry-run""",
    "run": """--devices --threads --portable --logs --grace --stall-limit --restarts --restart-world --debug-rank
--debug-port
--nnodes --node-rank --master --interface --token-file --start-limit --rendezvous --profile
-m/--module script arguments""",
    "port": """script --json""",
    "lint": """scripts --json --select --ignore --rules""",
    "slurm": """job --nodes --gpus-per-node --tasks-per-node --cpus-per-task --time --partition --warn --restarts
--sbatch --output --submit --data --strategy --mesh --precision --epochs --threads --set""",
    "kubernetes": """job --kind --name --image --claim --mount --nodes --gpus-per-node --tasks-per-node --cpus-per-task
--memory --secret --user --grace-period --start-limit --restarts --runtime --output --submit
--data --strategy --mesh --precision --epochs --threads --set""",
    "verify": """job --devices --strategies --steps --stop-after --micro-batches --json --script --data --precision
--threads --set""",
    "scale": """job --devices --strategies --steps --warm-up --rounds --predict --interconnect --json --html --svg
--png --data --precision --threads --set""",
    "data": """job --data --devices --strategy --mesh --set --epoch --step --sheet --json --quick""",
    "download": """set --to --mirror""",
    "predict": """run --data --devices --strategy --mesh --out --best""",
    "replay": """run --step --micro-batch --debug --trust --force-context""",
    "audit": """run --checks --seed --head --sign --signer --trust --force-context""",
    "doctor": """--devices --no-exchange --json --nnodes --node-rank --master --interface --token-file --start-limit
--rendezvous""",
    "debug": """--devices --rank --port --folder --attach target arguments""",
    "report": """run --html --recorded-only --trust""",
    "compare": """runs --labels --html --svg --png""",
    "explain": """samples --svg samples --json samples --samples samples --ranks samples --batch samples --micro-batches
samples --shuffle samples --seed samples --epoch samples --drop-last tree --svg tree --json tree --ranks
tree --micro-batches tree --leaves traffic --svg traffic --json traffic --ranks traffic --servers traffic
--micro-batches traffic --parameters pipeline --svg pipeline --json pipeline --stages pipeline
--micro-batches pipeline --schedule pipeline --stages-per-rank timeline --svg timeline --json timeline file""",
    "ps": """--json --check""",
    "stacks": """run""",
    "stop": """run --within --now""",
    "clean": """--dry-run""",
}
JOB_KEYS = """
callbacks.target
checkpoint.background = True
checkpoint.every_epochs = 1
checkpoint.every_steps = 0
checkpoint.force_context = False
checkpoint.keep = 3
checkpoint.resume = ''
code = ()
data.cache = False
data.collate.target
data.on_bad_sample = 'error'
data.prefetch = 2
data.root = ''
data.timeout = 120.0
data.train.target
data.validation.target
data.workers = 2
dp.replicas = 0
fsdp.cpu_offload = False
fsdp.mixed_precision = ''
fsdp.reshard_after_forward = True
fsdp.reshard_after_backward = True
job = 'job'
layers.balance = 'bytes'
layers.devices = 0
layers.split = ()
log.csv = False
log.every = 10
log.json = True
log.mlflow = ''
log.progress = True
log.tensorboard = True
log.wandb = ''
loss.target
metrics.target
model.target
optimizer.target
parameter_server.mode = 'synchronous'
parameter_server.servers = 1
parameter_server.snapshot_every = 100
parameter_server.staleness = 4
parameters.decay = 'all'
parameters.groups.lr = None
parameters.groups.names = 'required'
parameters.groups.weight_decay = None
parameters.layer_decay = None
pipeline.balance = 'bytes'
pipeline.schedule = '1f1b'
pipeline.split = ()
pipeline.stages_per_rank = 0
run.devices = 'auto'
run.directory = 'runs'
run.grace = 25.0
run.name = ''
run.restart_world = 'same'
run.restarts = 3
run.stall_limit = 60.0
run.threads = 1
run.timeout = 600.0
schedule.final_factor = 0.0
schedule.kind = 'constant'
schedule.step_epochs = 30.0
schedule.step_factor = 0.1
schedule.target
schedule.warmup_epochs = 0.0
schedule.warmup_steps = 0
tensor.plan = ()
tensor.shards = 0
training.channels_last = False
training.checkpoint_activations = ()
training.checks = 'first'
training.clip_norm = None
training.compile = False
training.deterministic = True
training.drop_last = False
training.early_stop = 0
training.ema_decay = None
training.epochs = 10
training.evaluate_every = 1
training.evaluate_every_steps = 0
training.evaluation_batch = None
training.fingerprint_every = 50
training.global_batch = 128
training.gradients_every = None
training.loss_scale = None
training.loss_scale_backoff_factor = 0.5
training.loss_scale_growth_factor = 2.0
training.loss_scale_growth_interval = 2000
training.max_steps = None
training.mesh = ''
training.micro_batches = 8
training.portable = False
training.powersgd_rank = 4
training.precision = 'fp32'
training.record_micro_batches = False
training.audit = False
training.reduce = 'ordered'
training.running_buffers = ()
training.seed = 0
training.strategy = 'ddp'
training.sync_batch_norm = False
weights.freeze = ()
weights.freeze_statistics = False
weights.path = ''
"""
SEED_PURPOSES = [
    "batch",
    "bucketed",
    "buckets",
    "epoch",
    "epoch end",
    "erasing",
    "initial",
    "loop",
    "mixed",
    "permutation",
    "powersgd",
    "sample",
    "split",
    "stand-in",
    "stream",
    "together",
    "turn",
    "unit",
    "weighted",
    "weights",
]
ENVIRONMENT_VARIABLES = [
    "LOCKSTEP_DEBUG_RANK",
    "LOCKSTEP_DEVICES",
    "LOCKSTEP_FUSED_REDUCTION",
    "LOCKSTEP_PORTABLE",
    "LOCKSTEP_PROFILE",
    "LOCKSTEP_RENDEZVOUS",
    "LOCKSTEP_RESTART",
    "LOCKSTEP_RUN_DIRECTORY",
    "LOCKSTEP_RUN_ID",
    "LOCKSTEP_TOKEN",
]
TARGETS = [
    "lockstep.models:digits_net",
    "lockstep.models:lstm",
    "lockstep.models:perceptron",
    "lockstep.models:resnet18",
    "lockstep.models:resnet34",
    "lockstep.models:resnet50",
    "lockstep.models:transformer",
    "lockstep.data:CIFAR10",
    "lockstep.data:Digits",
    "lockstep.data:IDX",
    "lockstep.data:ImageFolder",
    "lockstep.data:ImageArrays",
]


def signature(function):
    """Parameters with kinds and defaults, without annotations."""
    given = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in given.parameters.values()]
    text = str(given.replace(parameters=plain, return_annotation=inspect.Signature.empty))
    return re.sub(r"<factory>|<object object at \w+>", "...", text)


def members(cls):
    """Public methods with their signatures; properties and class attributes as what they are."""
    found = {"": signature(cls)}
    for name, member in inspect.getmembers_static(cls):
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = "property"
        elif isinstance(member, (classmethod, staticmethod)):
            found[name] = f"{type(member).__name__} {signature(getattr(cls, name))}"
        elif inspect.isfunction(member):
            found[name] = signature(member)
    return found


def default(field):
    """The default of a field of a dataclass, that of nested options as a dict."""
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is dataclasses.MISSING:
        return "required"
    value = field.default_factory()
    return options(value) if dataclasses.is_dataclass(value) else value


def options(made):
    """The fields of a dataclass with their values."""
    return {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}


def keys(cls, path=()):
    """The keys of a job file, as after ``--set``; a component takes any key."""
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        inner = (kinds[field.name], *typing.get_args(kinds[field.name]))
        name = ".".join((*path, field.name))
        tables = [kind for kind in inner if dataclasses.is_dataclass(kind) and kind is not Component]
        if Component in inner:
            yield f"{name}.target"
        for table in tables:
            yield from keys(table, (*path, field.name))
        if not tables and Component not in inner:
            yield f"{name} = {default(field)!r}"


def flags(parser):
    """The arguments of a command: options with all their spellings, the rest by name; those of its own commands too."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, each in action.choices.items():
                found += [f"{name} {flag}" for flag in flags(each)]
        elif action.option_strings:
            found.append("/".join(action.option_strings))
        else:
            found.append(action.dest)
    return [flag for flag in found if not flag.endswith("--help")]


def flags_of(command):
    (commands,) = [a for a in _parser([command])._actions if isinstance(a, argparse._SubParsersAction)]
    return flags(commands.choices[command])


@cache
def trees():
    return [(path, ast.parse(path.read_text())) for path in sorted(SOURCE.rglob("*.py"))]


def seed_purposes():
    """Every literal purpose that a seed is derived for; ``_begin`` hashes what the keys of many samples share."""
    found = set()
    for _, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > 1:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                place = {"derive_seed": 1, "_begin": 1, "key_loop": 0, "_key": 0}.get(name)
                if place is not None and isinstance(node.args[place], ast.Constant):
                    found.add(node.args[place].value)
    return sorted(found)


def environment_variables():
    texts = [path.read_text() for path, _ in trees()]
    return sorted({name for text in texts for name in re.findall(r"\bLOCKSTEP_[A-Z]+(?:_[A-Z]+)*\b", text)})


def test_the_package_gives_these_names():
    assert sorted(lockstep.__all__) == NAMES
    for name in NAMES:
        assert getattr(lockstep, name) is not None


def test_init_and_launch_take_these_arguments():
    assert signature(lockstep.init) == INIT
    assert signature(lockstep.launch.launch) == LAUNCH
    assert callable(lockstep.launch)


@pytest.mark.parametrize("name", ["Run", "World"])
def test_a_public_class_has_these_members(name):
    listed, found = {"Run": RUN, "World": WORLD}[name], members(getattr(lockstep, name))
    assert {each: found.get(each) for each in listed} == listed


def test_a_run_has_these_attributes_beside_them():
    run = lockstep.init(global_batch=8, threads=1)
    try:
        for name in RUN_ATTRIBUTES:
            assert hasattr(run, name), name
    finally:
        run.close()


def test_the_options_of_a_run_have_these_defaults():
    assert {field.name: default(field) for field in dataclasses.fields(lockstep.RunOptions)} == RUN_OPTIONS


def test_these_errors_exist_with_their_bases_and_exit_codes():
    classes = inspect.getmembers(lockstep.errors, inspect.isclass)
    found = {n: (c.__base__.__name__, c.exit_code) for n, c in classes if issubclass(c, Exception)}
    assert found == ERRORS
    codes = {n: v for n, v in vars(lockstep.errors).items() if n.startswith("EXIT_")}
    assert codes == EXIT_CODES


def test_data_gives_these_names():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # an older spelling may say so
        assert not [name for name in DATA if not hasattr(lockstep.data, name)]


def test_models_are_built_with_these_arguments():
    assert sorted(lockstep.models.__all__) == sorted(MODELS)
    found = {name: signature(getattr(lockstep.models, name)) for name in MODELS}
    assert found == MODELS


def test_the_hook_and_the_recorder_have_these_arguments():
    assert signature(lockstep.reduce.ordered_hook) == ORDERED_HOOK
    assert signature(lockstep.reduce.OrderedHookState) == ORDERED_HOOK_STATE
    assert members(lockstep.verify.Recorder) == RECORDER


def test_every_command_is_in_the_list():
    assert list(_COMMANDS) == list(COMMANDS)


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_command_takes_these_arguments(command):
    assert " ".join(flags_of(command)).split() == COMMANDS[command].split()


def test_a_job_file_has_these_keys_and_defaults():
    assert sorted(keys(JobConfig)) == sorted(JOB_KEYS.strip().splitlines())


def test_seeds_are_derived_for_these_purposes():
    """They are bits: another purpose gives other random numbers."""
    assert seed_purposes() == SEED_PURPOSES


def test_these_environment_variables_are_read():
    assert environment_variables() == ENVIRONMENT_VARIABLES


def test_models_of_job_files_are_found_by_their_path():
    for target in TARGETS:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), target
