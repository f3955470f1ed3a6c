"""Parts that run.prepare refuses."""

from collections import UserList

import pytest
import torch
from tests.run.jobs import GLOBAL_BATCH, begin, dataset, network, train_step
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

import lockstep
from lockstep.errors import ConfigError


def test_saving_with_a_scheduler_that_was_not_given_is_refused(tmp_path):
    run, model = lockstep.init(global_batch=GLOBAL_BATCH, directory=tmp_path), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    run.prepare(model, optimizer)
    with pytest.raises(ConfigError, match=r"run.prepare\(model, optimizer, scheduler\)"):
        run.save()


def test_saving_with_a_scheduler_of_the_prepared_optimizer_is_refused(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ConfigError, match="scheduler"):
        run.save()


def test_an_optimizer_of_foreign_parameters_is_refused():
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match=r"4 parameters.*ModuleDict"):
        run.prepare(nn.Linear(2, 2), torch.optim.SGD(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).parameters()))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sparse_buffer_is_refused_by_its_name(persistent):
    """It ended in an error of torch, under some strategies only."""
    model = network()
    model[0].register_buffer("graph", torch.eye(3).to_sparse(), persistent=persistent)
    with pytest.raises(ConfigError, match=r"'0.graph' has the layout torch.sparse_coo.*as a plain attribute"):
        lockstep.init(global_batch=GLOBAL_BATCH).prepare(model)


def test_channels_last_leaves_the_weights_of_three_dimensional_convolutions():
    """Such a model ended in an error of torch, which orders tensors of four dimensions alone."""
    model = nn.ModuleList([nn.Conv2d(3, 4, 2), nn.Conv3d(3, 4, 2)])
    model.register_buffer("mask", torch.zeros(2, 3, 4, 5))
    expected = [each.clone() for each in model.state_dict().values()]
    model = lockstep.init(global_batch=GLOBAL_BATCH, channels_last=True).prepare(model)
    ordered = {name: not each.is_contiguous() for name, each in model.state_dict().items() if each.dim() > 3}
    assert ordered == {"mask": True, "0.weight": True, "1.weight": False}
    assert all(map(torch.equal, model.state_dict().values(), expected))


def test_prepare_takes_a_plain_model_once():
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match="is of type SGD, which is no model"):
        run.prepare(torch.optim.SGD(network().parameters()))
    with pytest.raises(ConfigError, match=r"model\.module"):
        run.prepare(DataParallel(network()))
    with pytest.raises(ConfigError, match="TensorDataset is none of them"):
        run.prepare(network(), dataset())
    run.prepare(network())
    with pytest.raises(ConfigError, match="twice"):
        run.prepare(network())


@pytest.fixture
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    if distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_what_torch_exchanges_itself_is_refused(group):
    """A part in DistributedDataParallel hung, checkpoints of ZeRO were not resumed, DTensors raised deep down."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    models = nn.ModuleDict({"net": DistributedDataParallel(network())})
    sharded = ZeroRedundancyOptimizer(models.parameters(), torch.optim.Adam)
    shards = distribute_module(network(), init_device_mesh("cpu", (1,)))
    distributed.destroy_process_group()
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match="DistributedDataParallel in its part 'net', which would sum"):
        run.prepare(models)
    with pytest.raises(ConfigError, match=r"ZeroRedundancyOptimizer\) exchanges values itself.*strategy='fsdp'"):
        run.prepare(models["net"].module, sharded)
    with pytest.raises(ConfigError, match=r"'0.weight' is a DTensor\. Leave out fully_shard"):
        run.prepare(shards)


@pytest.mark.parametrize("strategy", ["single", "ddp", "parameter_server"])
def test_an_optimizer_of_an_earlier_run_is_refused(strategy):
    """Its steps ended in the error of a forgotten run.backward, as when a cell of a notebook is run again."""
    first, model, optimizer = begin(strategy=strategy)
    first.close()
    run = lockstep.init(global_batch=GLOBAL_BATCH, strategy=strategy)
    with pytest.raises(ConfigError, match=r"the SGD that run\.prepare of an earlier run returned"):
        run.prepare(model, optimizer)
    _, prepared = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match=r"called twice.*run\.close\(\), and begin again"):
        run.prepare(model, prepared)


def test_statistics_over_the_processes_are_refused():
    """A model of a run with sync_batch_norm ended in other buffers in the next run without."""

    def build():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))

    model = build()
    with lockstep.init(global_batch=GLOBAL_BATCH, sync_batch_norm=True) as first:
        first.prepare(model)
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    for given in (model, nn.SyncBatchNorm.convert_sync_batchnorm(build())):
        with pytest.raises(ConfigError, match=r"'1' is a SyncBatchNorm.*lockstep.init\(sync_batch_norm=True\)"):
            run.prepare(given)
    lockstep.init(global_batch=GLOBAL_BATCH, sync_batch_norm=True).prepare(model)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_a_model_that_an_earlier_run_has_compiled_is_refused_where_this_one_does_not_compile():
    """It stayed compiled, and ended in other bits than the same run of a new model."""
    model = network()
    with lockstep.init(global_batch=GLOBAL_BATCH, compile=True) as first:
        first.prepare(model)
    with pytest.raises(ConfigError, match="'The model' was compiled by an earlier run, and this one has compile=False"):
        lockstep.init(global_batch=GLOBAL_BATCH).prepare(model)
    lockstep.init(global_batch=GLOBAL_BATCH, compile=True).prepare(model)


def test_gradients_from_before_are_refused():
    """Under tensor they were lost for the layers that it splits, and fsdp took them for a state of the model."""
    model = network()
    model(torch.ones(2, 6)).sum().backward()
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match=r"'0.weight' has a gradient already.*model.zero_grad\(\) before run.prepare"):
        run.prepare(model)
    model.zero_grad()
    run.prepare(model)


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_a_model_whose_run_ended_within_a_step_can_be_trained_by_the_next(error):
    """Its dropout went on with keys of the first run, and the second was refused for bits of unknown cause."""

    def fail(output, target):
        raise error

    def trained(model):
        run, _, optimizer = begin(model)
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
        return run.fingerprint()

    model = network()
    run, _, optimizer = begin(model)
    with pytest.raises(error):
        train_step(run, next(iter(run.batches(dataset()))), optimizer, fail)
    model.load_state_dict(network().state_dict())
    assert trained(model) == trained(network())


class Functional:
    """As an optimizer of TorchOpt."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        raise AssertionError

    def zero_grad(self):
        raise AssertionError


@pytest.mark.parametrize(
    ("state", "said"), [((), "is a tuple"), ({"hypers": UserList(), "state": []}, "holds a UserList")]
)
def test_an_optimizer_of_another_library_is_refused_by_its_name(state, said):
    """That of fastai keeps its settings in a list of its own, which the first checkpoint could not hold."""
    with pytest.raises(ConfigError, match=rf"given a tests\.\S+\.Functional, whose state_dict\(\) {said}\. It"):
        lockstep.init(global_batch=GLOBAL_BATCH).prepare(network(), Functional(state))


# torch's own, on the compiler's import
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_what_the_compiler_chooses_by_speed_is_refused():
    """Two runs of the same script on an H200 ended in two fingerprints."""
    said = "was compiled with max_autotune, as mode='max-autotune' does"
    model = network()
    model[0] = torch.compile(model[0], mode="max-autotune")
    with pytest.raises(ConfigError, match=f"^'0' {said}"):
        begin(model)
    begin(model, deterministic=False)
    run, _, optimizer = begin()
    with pytest.raises(ConfigError, match=f"^The loss function {said}"):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer, torch.compile(nn.functional.cross_entropy, mode="max-autotune"))


class Schedule:
    """As ``ScheduledOptim`` of scripts with transformers."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, 0


def test_an_object_that_steps_an_optimizer_is_made_of_the_prepared_one():
    model = network()
    optimizer = torch.optim.SGD(model.parameters())
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match="and make the Schedule of the one that it returns"):
        run.prepare(model, optimizer, Schedule(optimizer))
    with pytest.raises(
        ConfigError, match=r"a generator is none of them. Make it of the DataLoader afterwards: batches ="
    ):
        run.prepare(model, optimizer, (batch for batch in ()))
