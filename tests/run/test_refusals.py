"""What the handle refuses, and in which sentence; a world of one."""

import json

import pytest
import torch
from tests.run.jobs import GLOBAL_BATCH, begin, dataset, network, train_step
from torch import nn
from torch.nn.parallel import DataParallel

import lockstep
from lockstep.checkpoint import latest
from lockstep.checkpoint.files import RECORD
from lockstep.checkpoint.manifest import MANIFEST, Manifest
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError, NonFiniteError

cross_entropy = nn.functional.cross_entropy


def test_a_step_without_run_backward_is_refused():
    run, model, optimizer = begin()
    for batch in run.batches(dataset()):
        inputs, targets = batch.micro_batches[0].data
        cross_entropy(model(inputs), targets).backward()
        with pytest.raises(ConfigError, match="not summed over the ranks"):
            optimizer.step()
        break


def test_a_step_of_the_optimizer_that_was_not_returned_is_refused():
    run, model = lockstep.init(global_batch=GLOBAL_BATCH), network()
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    run.prepare(model, own)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        with pytest.raises(ConfigError, match="Step the one it returned"):
            own.step()
        break


def test_a_closure_is_refused():
    _, _, optimizer = begin()
    with pytest.raises(ConfigError, match="several times per step"):
        optimizer.step(lambda: 0.0)


def test_saving_between_backward_and_step_is_refused_and_after_zero_grad_it_is_not(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        with pytest.raises(ConfigError, match=r"between run.backward and optimizer.step"):
            run.save()
        optimizer.zero_grad()
        assert run.save(wait=True).is_dir()
        break


def test_saving_needs_a_run_folder():
    run, *_ = begin()
    with pytest.raises(ConfigError, match="directory="):
        run.save()


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
        run.prepare(
            nn.Linear(2, 2), torch.optim.SGD(nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1)).parameters())
        )


def test_prepare_takes_a_plain_model_once():
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match="a SGD"):
        run.prepare(torch.optim.SGD(network().parameters()))
    with pytest.raises(ConfigError, match=r"model\.module"):
        run.prepare(DataParallel(network()))
    with pytest.raises(ConfigError, match="TensorDataset is none of them"):
        run.prepare(network(), dataset())
    run.prepare(network())
    with pytest.raises(ConfigError, match="twice"):
        run.prepare(network())


def test_a_parameter_that_was_frozen_cannot_be_trained_later():
    model = network()
    model[0].weight.requires_grad_(False)
    run, _, optimizer = begin(model)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        model[0].weight.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"'0\.weight' was frozen at run\.prepare"):
            run.backward(batch, cross_entropy)
        break


def test_a_call_before_prepare_names_prepare():
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match=r"run\.prepare"):
        run.fingerprint()


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'micro_batches'"):
        lockstep.init(global_batch=8, microbatches=4)


def test_a_second_backward_before_the_step_is_refused_under_fp16_only():
    run, _, optimizer = begin(precision="fp16")
    batches = run.batches(dataset())
    run.backward(next(batches), cross_entropy)
    with pytest.raises(ConfigError, match="two loss scales"):
        run.backward(next(batches), cross_entropy)
    optimizer.zero_grad()


def test_an_empty_evaluation_set_is_refused():
    run, *_ = begin()
    with pytest.raises(ConfigError, match="empty data set"):
        run.evaluate(torch.utils.data.TensorDataset(torch.zeros(0, 6)), cross_entropy)


def test_a_batch_without_target_is_refused_with_what_to_do():
    run, *_ = begin()
    with pytest.raises(ConfigError, match="forward="):
        for batch in run.batches(torch.utils.data.TensorDataset(torch.zeros(40, 6))):
            run.backward(batch, cross_entropy)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_is_named_and_nothing_is_written(where, tmp_path):
    data = dataset()
    if where == "loss":
        data.tensors[0][7] = float("nan")

    def loss(output, target):
        value = cross_entropy(output, target)
        return value if where == "loss" else value + (output - output.detach()).sum().sqrt()

    run, model, optimizer = begin(directory=tmp_path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(
        NonFiniteError, match=rf"step \d+ is .*{'samples .*7' if where == 'loss' else 'gradient'}"
    ):
        for batch in run.batches(data, shuffle=False):
            train_step(run, batch, optimizer, loss)
            run.save()
    assert not any(tmp_path.iterdir())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def saved(tmp_path, **options):
    run, _, optimizer = begin(directory=tmp_path, **options)
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    run.save()


@pytest.mark.fault("M10")
def test_a_checkpoint_of_another_context_is_refused_unless_forced(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"seed: 0 there, 1 here"):
        begin(directory=tmp_path, resume="auto", seed=1)
    run, *_ = begin(directory=tmp_path, resume="auto", seed=1, force_context=True)
    assert run.position.step == 1


@pytest.mark.fault("K6")
def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match=r"4\.weight"):
        begin(nn.Sequential(*network()[:4]), directory=tmp_path, resume="auto")


def test_a_checkpoint_of_other_schedulers_or_optimizers_is_refused(tmp_path):
    saved(tmp_path)
    with pytest.raises(CheckpointMismatch, match="optimizers"):
        begin(directory=tmp_path, resume="auto", make_optimizer=torch.optim.AdamW)
    with pytest.raises(CheckpointMismatch, match="0 schedulers"):
        begin(
            directory=tmp_path,
            resume="auto",
            make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        )


def test_going_on_within_an_epoch_of_another_data_set_is_refused(tmp_path):
    saved(tmp_path)
    run, *_ = begin(directory=tmp_path, resume="auto")
    with pytest.raises(CheckpointMismatch, match="53 samples, and the data set has 90"):
        next(iter(run.batches(dataset(90))))


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["progress"].pop("extra"),
        lambda record: record["progress"]["position"].update(step=-1),
        lambda record: record["progress"]["position"].update(step="1"),
        lambda record: record["progress"]["position"].update(course=1),
        lambda record: record.update(optimizers={"main": []}),
        lambda record: record["optimizers"]["0"].pop("state"),
    ],
)
@pytest.mark.fault("K3")
def test_a_record_that_is_none_of_a_run_is_refused_however_well_it_is_sealed(tmp_path, change):
    saved(tmp_path)
    path = latest(tmp_path)
    record = json.loads((path / RECORD).read_bytes())
    change(record)
    (path / RECORD).write_text(json.dumps(record))
    (path / MANIFEST).write_bytes(Manifest.of(path, 1).to_bytes())
    with pytest.raises(CheckpointError, match="Use another"):
        begin(directory=tmp_path, resume="auto")


def test_resume_in_an_empty_folder_starts_anew(tmp_path):
    run, *_ = begin(directory=tmp_path, resume="auto")
    assert run.position.step == 0
