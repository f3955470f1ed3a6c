"""Refusals of the handle, with their words."""

import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from tests.run.jobs import GLOBAL_BATCH, begin, correct, dataset, network, train_step
from torch import nn

import lockstep
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError, NonFiniteError
from lockstep.runtime.control import Stopped, StopReason

cross_entropy = nn.functional.cross_entropy


def saved(tmp_path, **options):
    run, _, optimizer = begin(directory=tmp_path, **options)
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    run.save()


def test_saving_between_backward_and_step_is_refused_and_after_zero_grad_it_is_not(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        with pytest.raises(ConfigError, match=r"between run.backward and optimizer.step"):
            run.save()
        optimizer.zero_grad()
        assert run.save(wait=True).is_dir()
        break


def test_a_script_that_is_stopped_or_resumed_says_so(tmp_path, caplog, monkeypatch):
    """It began in the middle of its epochs without a word, since only jobs set up logging."""
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda self: False)
    run, _, optimizer = begin(directory=tmp_path)
    with pytest.raises(Stopped):
        for batch in run.batches(dataset()):
            run._session.heartbeat.control.request_stop(StopReason.INTERRUPTED)
            train_step(run, batch, optimizer)
    assert f"Saved in {tmp_path}/step-00000001. Continue with" in caplog.text
    run.close()
    caplog.clear()
    begin(directory=tmp_path, resume="auto")
    assert f"Resumed from {tmp_path}/step-00000001: epoch 1, step 1." in caplog.text


def test_a_stop_at_the_last_step_waits_for_what_reads_the_steps(tmp_path):
    """A resumed run that went on after that step had no ``loss`` to print, and the sum of the losses was 0."""
    data, shown = dataset(), []

    def train(stop_at):
        run, _, optimizer = begin(directory=tmp_path / str(stop_at), resume="auto")
        for epoch in run.epochs(3):
            total = 0.0
            for batch in run.batches(data):
                if run.position.step + 1 == stop_at:
                    run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)
                loss = train_step(run, batch, optimizer)
                total += loss.item()
            shown.append((epoch, loss.item(), total, run.evaluate(data, correct)))
        return run.fingerprint()

    whole = train(0)
    expected = shown[:]
    del shown[:]
    with pytest.raises(Stopped):
        train(6)
    assert len(shown) == 2
    assert train(6) == whole
    assert shown == expected
    del shown[:]
    assert train(9) == whole, "nothing is left to stop"
    assert shown == expected


def test_a_stop_at_the_last_step_is_at_once_where_nothing_reads_the_steps(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    with pytest.raises(Stopped):
        for _ in run.epochs(3):
            for batch in run.batches(dataset()):
                if run.position.step == 2:
                    run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)
                loss = train_step(run, batch, optimizer)
                assert loss
            raise AssertionError("the stop waited")


def test_a_run_that_is_resumed_after_an_epoch_says_so(tmp_path, caplog, monkeypatch):
    """A finished run of 3 epochs went on from "epoch 4"."""
    monkeypatch.setattr("logging.Logger.hasHandlers", lambda self: False)
    run, _, optimizer = begin(directory=tmp_path)
    for _ in run.epochs(1):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    run.save()
    steps = run.position.step
    run.close()
    caplog.clear()
    begin(directory=tmp_path, resume="auto")
    assert f"step-0000000{steps}: after epoch 1, step {steps}." in caplog.text


def test_what_a_script_draws_after_its_last_epoch_is_the_same_when_a_finished_run_is_resumed(tmp_path):
    drawn = []
    for _ in range(2):
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        for _ in run.epochs(1):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            run.save()
        drawn.append((float(torch.rand(())), random.random()))
        run.close()
    assert drawn[0] == drawn[1]


def test_saving_needs_a_run_folder():
    run, *_ = begin()
    with pytest.raises(ConfigError, match="directory="):
        run.save()


def test_a_call_before_prepare_names_prepare():
    run = lockstep.init(global_batch=GLOBAL_BATCH)
    with pytest.raises(ConfigError, match=r"run\.prepare"):
        run.fingerprint()


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'micro_batches'"):
        lockstep.init(global_batch=8, microbatches=4)


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
    with pytest.raises(NonFiniteError, match=rf"step \d+ is .*{'samples .*7' if where == 'loss' else 'gradient'}"):
        for batch in run.batches(data, shuffle=False):
            train_step(run, batch, optimizer, loss)
            run.save()
    assert not any(tmp_path.iterdir())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_going_on_within_an_epoch_of_another_data_set_is_refused(tmp_path):
    saved(tmp_path)
    run, *_ = begin(directory=tmp_path, resume="auto")
    with pytest.raises(CheckpointMismatch, match="53 samples, and this data set has 90"):
        next(iter(run.batches(dataset(90))))


def test_resume_in_an_empty_folder_starts_anew(tmp_path):
    run, *_ = begin(directory=tmp_path, resume="auto")
    assert run.position.step == 0


RUNS_THE_MODEL = "run.backward runs the model itself"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda run, batch: run.backward(torch.zeros((), requires_grad=True)), RUNS_THE_MODEL),
        (lambda run, batch: run.backward((torch.rand(2, 4), torch.rand(2)), cross_entropy), RUNS_THE_MODEL),
        (lambda run, batch: run.backward(batch), "the loss, is missing"),
        (lambda run, batch: run.backward(batch, torch.zeros(())), "the loss, is a Tensor"),
        (
            lambda run, batch: torch.no_grad()(run.backward)(batch, cross_entropy),
            "gradients are switched off",
        ),
        (lambda run, batch: [*batch], "cannot be unpacked"),
        (lambda run, batch: batch[0], "has no entry 0"),
        (lambda run, batch: batch["image"], "has no entry 'image'"),
        (lambda run, batch: torch.nn.Linear(2, 2)(batch), "was given to linear, which takes tensors"),
        (lambda run, batch: run.save("best.pt"), r"run\.save\('best\.pt'\): give a folder, directory="),
        (
            lambda run, batch: run.backward(batch, lambda output, _: output.sum() * 1j),
            "returned a complex number",
        ),
        (lambda run, batch: run.save(directory=3), "directory of run.save is 3, and no path"),
        (lambda run, batch: run.save(directory="a\0b"), "a character that no path has"),
        (lambda run, batch: run.backward(batch, cross_entropy, forward=3), "forward=3 was given, a int"),
        (lambda run, batch: run.backward(batch, cross_entropy, also=3), "also=3 was given"),
        (lambda run, batch: run.clip_gradients(torch.ones(2)), "takes a norm of 0 or more"),
        (lambda run, batch: run.evaluate(dataset(), cross_entropy, model=3), "model=3 was given, a int"),
        (lambda run, batch: run.evaluate(dataset(), cross_entropy, workers="2"), "workers='2' was given"),
        (lambda run, batch: run.predict(dataset(), 3), "keep=3 was given, a int"),
        (lambda run, batch: run.steps_per_epoch(dataset(), model=3), "model=3 was given, a int"),
        (lambda run, batch: run.load_state_dict("best.pt"), "a str instead of tensors by name"),
        (
            lambda run, batch: run.batches(dataset(), shuffle="no"),
            "shuffle='no' was given. Give True or False",
        ),
        (lambda run, batch: run.batches(dataset(), workers=1.5), "workers=1.5 was given"),
        (lambda run, batch: run.batches(type(dataset())), "the class TensorDataset. Create a data set"),
        (
            lambda run, batch: next(run.epochs("3")),
            "takes the number of epochs, 0 or more, and was given '3'",
        ),
        (lambda run, batch: next(run.epochs(-1)), "takes the number of epochs"),
    ],
    ids=range(26),
)
def test_a_habit_of_other_loops_is_refused_with_the_line_to_write(wrong, said):
    run, *_ = begin()
    batch = next(iter(run.batches(dataset())))
    with pytest.raises(ConfigError, match=said):
        wrong(run, batch)


def test_a_batch_has_no_tensors_and_says_where_they_are():
    run, *_ = begin()
    batch = next(iter(run.batches(dataset())))
    assert not hasattr(batch, "to")
    with pytest.raises(AttributeError, match=r"\[part.data for part in batch.micro_batches\]"):
        getattr(batch, "data")  # noqa: B009  # it has none


def test_global_batch_is_asked_for():
    with pytest.raises(ConfigError, match=r"DataLoader\(dataset, batch_size=32\)"):
        lockstep.init()


def test_a_schedule_that_is_made_before_prepare_is_told_to_give_the_model():
    """It was told to call run.prepare first, which takes the schedule."""
    run = lockstep.init(global_batch=24)
    with pytest.raises(ConfigError, match=r"run.steps_per_epoch\(loader, model=model\)"):
        run.steps_per_epoch(dataset())
    run.close()


def test_the_steps_of_an_epoch_are_counted_without_those_that_a_resumed_run_has_done(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    steps = run.batches(dataset())
    whole = len(steps)
    assert whole == run.steps_per_epoch(dataset()) and len(list(steps)) == whole
    for done, batch in enumerate(run.batches(dataset()), 1):
        train_step(run, batch, optimizer)
        if done == 2:
            run.save(wait=True)
            break
    run.close()
    resumed, *_ = begin(directory=tmp_path, resume="auto")
    rest = resumed.batches(dataset())
    assert len(rest) == whole - 2 == len(list(rest))


def test_a_checkpoint_may_be_written_to_another_folder(tmp_path):
    run, _, optimizer = begin()
    for batch in run.batches(dataset()):
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    path = run.save(wait=True, directory=tmp_path / "elsewhere")
    again, _, _ = begin(directory=tmp_path / "elsewhere", resume="auto")
    assert path.parent == tmp_path / "elsewhere" and again.fingerprint() == run.fingerprint()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_evaluation_computes_its_loss_as_training_does(precision):
    """A loss with class weights was refused by torch, and one without was rounded to the digits of 16 bits."""
    run, model, _ = begin(precision=precision)
    data, weight = dataset(), torch.tensor([1.0, 2.0, 0.3])
    inputs, target = (torch.stack(each) for each in zip(*(data[index] for index in range(len(data)))))
    with (
        torch.no_grad(),
        torch.autocast("cpu", getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])),
    ):
        output = model.eval()(inputs)
    assert output.dtype != torch.float32
    for loss in (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=weight)):
        expected = float(loss(output.float(), target))
        assert run.evaluate(data, loss) == pytest.approx(expected, rel=1e-6)
    distance = run.evaluate(data, lambda output, target: output[:, 0].detach())  # of 16 bits
    assert distance == pytest.approx(float(output[:, 0].double().mean()), rel=1e-6)


def test_a_loss_that_is_nan_names_the_samples_that_were_drawn():
    """It named their places in the epoch, which are the numbers of other samples."""
    inputs = torch.arange(40.0)[:, None].expand(-1, 6)
    data = torch.utils.data.TensorDataset(inputs, torch.zeros(40).long())
    sampler = torch.utils.data.WeightedRandomSampler(torch.arange(40.0), 24)
    run, *_ = begin(nn.Linear(6, 3))
    batch = next(iter(run.batches(torch.utils.data.DataLoader(data, sampler=sampler))))
    drawn = [int(row[0]) for part in batch.micro_batches for row in part.data[0]]
    assert [number for k in range(batch.plan.leaves) for number in batch.plan.numbers(k)] == drawn
    assert drawn != [index for part in batch.plan.indices for index in part.tolist()]
    with pytest.raises(NonFiniteError, match=f"in micro-batch 0 .samples {drawn[0]}, {drawn[1]}, {drawn[2]}"):
        run.backward(batch, lambda output, target: cross_entropy(output, target) * torch.nan)


def test_a_run_prints_with_the_options_of_print(capsys):
    """run.print(text, flush=True), as scripts print, ended in a TypeError."""
    run, *_ = begin()
    run.print("a", 1, sep=" | ", end="\n\n", flush=True)
    assert capsys.readouterr().out == "a | 1\n\n"


class Overlap(nn.Module):
    """The IoU of each class, or their mean and the least, as a metric of torchmetrics."""

    def __init__(self, named=False):
        super().__init__()
        self.named = named

    def reset(self):
        self.counts = torch.zeros(2, 3)

    def update(self, output, target):
        found, there = (nn.functional.one_hot(each, 3).bool() for each in (output.argmax(1), target))
        self.counts += torch.stack([(found & there).sum(0), (found | there).sum(0)])

    def compute(self):
        iou = self.counts[0] / self.counts[1]
        return {"mean": iou.mean(), "worst": iou.min()} if self.named else iou


def test_a_metric_of_several_numbers_gives_each_by_its_name():
    """It was refused: compute() gave no single number."""
    run, *_ = begin()
    found, named = run.evaluate(dataset(), {"iou": Overlap()}), Overlap(named=True)
    assert list(found) == ["iou_0", "iou_1", "iou_2"]
    output, target = run.predict(dataset()).argmax(1), torch.tensor([int(y) for _, y in dataset()])
    for number, value in enumerate(found.values()):
        here, there = output == number, target == number
        assert value == pytest.approx(((here & there).sum() / (here | there).sum()).item())
    values = {"mean": pytest.approx(sum(found.values()) / 3), "worst": min(found.values())}
    assert run.evaluate(dataset(), named) == values
    assert run.evaluate(dataset(), {"iou": named}) == {f"iou_{key}": value for key, value in values.items()}
    with pytest.raises(ConfigError, match=r"Two metrics of run\.evaluate give a number called 'iou_1'"):
        run.evaluate(dataset(), {"iou": Overlap(), "iou_1": correct})
    named.compute = lambda: torch.zeros(2, 2)
    with pytest.raises(ConfigError, match=r"gave a tensor of shape \[2, 2\], which is neither a number nor a dict or"):
        run.evaluate(dataset(), named)
    named.compute = lambda: {"f1": 0.5, "matrix": torch.zeros(2, 2)}
    with pytest.raises(ConfigError, match=r"gave a tensor of shape \[2, 2\] as 'matrix', where one number is taken"):
        run.evaluate(dataset(), named)


def test_a_run_folder_that_cannot_be_written_is_told_of_at_the_start(tmp_path, caplog):
    """It was refused by the first save, after the first epoch."""
    (tmp_path / "file").touch()
    begin(directory=tmp_path / "file" / "run")
    assert f"run.save() will fail: the run folder is {tmp_path}/file/run, and {tmp_path}/file is not a" in caplog.text
    caplog.clear()
    begin(directory=tmp_path / "new" / "run")
    assert "run.save()" not in caplog.text


def test_a_run_goes_on_from_a_run_folder(tmp_path):
    """The folder was called an incomplete checkpoint; lockstep train --resume took it."""
    saved(tmp_path / "old")
    again, *_ = begin(directory=tmp_path / "new", resume=tmp_path / "old")
    assert again.position.step == 1
    again.close()
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .*empty. Give .* or a run folder"):
        begin(resume=str(tmp_path / "empty"))


def test_a_run_folder_that_checkpoints_could_not_be_read_from_is_refused(tmp_path):
    """They were written there, and no resumed run could read them."""
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff")
    with pytest.raises(ConfigError, match="is not in UTF-8, and safetensors reads no file there"):
        begin(directory=odd)
    run, *_ = begin()
    with pytest.raises(ConfigError, match="is not in UTF-8"):
        run.save(directory=odd)


@pytest.mark.parametrize(("metric", "said"), [("accuracy", "'metric' of run.evaluate is a str"), ({"a": 1}, "'a'")])
def test_what_is_no_metric_is_named(metric, said):
    run, *_ = begin()
    with pytest.raises(ConfigError, match=f"The metric {said}.*Give a function of .output, target."):
        run.evaluate(dataset(), metric)


def test_data_and_metric_in_the_other_order_are_told():
    run, *_ = begin()
    with pytest.raises(ConfigError, match=r"is a TensorDataset.* The data come first: run.evaluate\(data, metric\)"):
        run.evaluate(lambda output, target: output, dataset())


def test_a_class_is_no_part_of_a_run_and_a_dict_no_options():
    run = lockstep.init(global_batch=8)
    with pytest.raises(ConfigError, match=r"was given the class SGD\. Create an instance"):
        run.prepare(nn.Linear(2, 2), torch.optim.SGD)
    with pytest.raises(ConfigError, match=r"Call lockstep.init\(...\)"):
        lockstep.Run({"global_batch": 8})


def test_loops_over_epochs_within_each_other_are_refused_and_a_second_that_has_none_left_is_told(caplog):
    """Both count the same epochs, so the outer one trained once; a second loop of fewer epochs trained nothing."""
    run, _, optimizer = begin()
    for _ in run.epochs(2):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    assert not [each for each in caplog.records if "BatchNorm" not in each.getMessage()]
    assert list(run.epochs(1)) == []
    assert "run.epochs(1) has nothing to do" in caplog.text and "2 epochs" in caplog.text
    with pytest.raises(ConfigError, match=r"Two loops over run\.epochs run at once"):
        for _ in run.epochs(4):
            list(run.epochs(4))


def test_extra_that_is_no_dict_is_refused_when_it_is_saved(tmp_path):
    """It was written, and the run could not be resumed."""
    run, *_ = begin(directory=tmp_path)
    run.extra = [1, 2]
    with pytest.raises(ConfigError, match=r"run\.extra is a list\. Leave it a dict"):
        run.save()


def test_extra_that_has_another_name_in_the_script_is_given_back_too(tmp_path):
    """The name had the dict of before the resume, and what was put there was in no checkpoint."""
    run, _, optimizer = begin(directory=tmp_path)
    run.extra["seen"] = 8
    train_step(run, next(iter(run.batches(dataset()))), optimizer)
    run.save()
    again = lockstep.init(global_batch=GLOBAL_BATCH, micro_batches=8, directory=tmp_path, resume="auto")
    notes = again.extra
    notes |= {"seen": 0, "later": 0}
    model = network()
    again.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert notes is again.extra and notes == {"seen": 8}


def test_a_dtype_that_no_checkpoint_holds_is_refused_at_prepare(tmp_path):
    """It was refused by the first save, after the first epoch."""
    model = nn.Linear(2, 2, dtype=torch.complex128)
    with pytest.raises(ConfigError, match=r"cannot hold torch\.complex128, the dtype of weight, bias"):
        lockstep.init(global_batch=8, directory=tmp_path).prepare(model)
    lockstep.init(global_batch=8).prepare(model)


def test_numbers_of_numpy_and_paths_of_the_home_folder_are_options(tmp_path, monkeypatch):
    """A seed of NumPy's ended in a TypeError, and a folder was made that is called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run = lockstep.init(global_batch=np.int64(8), seed=np.int64(3), timeout=np.float32(5), directory="~/runs")
    assert (run.options.seed, run.options.timeout, run.options.directory) == (3, 5.0, tmp_path / "runs")
    assert type(run.options.seed) is int and type(run.options.timeout) is float
    with pytest.raises(ConfigError, match="directory='' was given"):
        lockstep.init(global_batch=8, directory="")


@pytest.mark.parametrize(
    ("kind", "stepped", "said"),
    [
        (partial(torch.optim.SGD, momentum=0.9), True, "SGD had taken steps before run.prepare"),
        (torch.optim.Adam, True, "Adam had taken steps"),
        (torch.optim.Adagrad, True, "Adagrad had taken steps"),
        (torch.optim.Adagrad, False, ""),
        (torch.optim.Adam, False, ""),
    ],
)
def test_a_run_that_the_script_continues_by_itself_is_told_that_it_begins_anew(caplog, kind, stepped, said):
    """As after ``optimizer.load_state_dict(...)``: the first epochs' order came again, and nothing said so."""
    model = network()
    optimizer = kind(model.parameters(), lr=0.1)
    if stepped:
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    run = lockstep.init(global_batch=24, micro_batches=8)
    run.prepare(model, optimizer)
    run.close()
    assert [said in record.getMessage() for record in caplog.records] == [True] * stepped


def test_the_run_folder_is_seen_from_where_the_run_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, _, optimizer = begin(directory="runs/one")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
    assert run.save(wait=True).parent == tmp_path / "runs/one"
    run.close()
