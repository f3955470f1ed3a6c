"""The files of a Recorder, and its refusals."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

from lockstep.errors import ConfigError
from lockstep.verify import Recorder
from lockstep.verify.plain import Recording, diagnose_plain
from lockstep.verify.plain.checks import vector
from lockstep.verify.plain.recorder import Sketcher, attributes, coarse_type


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(recorder, model, optimizer, steps=(0, 1, 2)):
    for step in steps:
        indices = torch.arange(4) + 4 * step
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        losses = functional.cross_entropy(model(x), indices % 3, reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        recorder.batch(samples=indices, inputs=x, losses=losses, loss=losses.mean())
        optimizer.step()
        recorder.step()


def test_a_step_is_written_with_all_that_was_seen(tmp_path):
    model, optimizer = parts()
    train(Recorder(tmp_path, model, optimizer), model, optimizer)
    (rank,) = Recording.read(tmp_path).ranks
    assert (rank.rank, rank.world_size, rank.seed, len(rank.steps)) == (0, 1, 0, 3)
    step = rank.steps[1]
    (batch,) = step.batches
    assert batch.samples == [4, 5, 6, 7]
    assert len(set(batch.inputs)) == len(batch.losses) == 4
    assert batch.loss == pytest.approx(sum(batch.losses) / 4)
    names = [name for name, _ in model.named_parameters()]
    assert list(step.begin) == list(step.values) == step.trained == names
    assert set(step.used) == set(batch.gradients) == set(names)
    assert step.used["0.weight"].norm == pytest.approx(batch.gradients["0.weight"].norm)
    assert step.begin["0.weight"] == rank.steps[0].values["0.weight"].digest
    assert set(step.buffers) == {"1.running_mean", "1.running_var"}
    assert step.batch_norms == ["1"]
    assert step.settings["lr of optimizer 0, group 0"] == "0.1"
    assert step.updates == 1
    assert [name for name, _, _ in rank.steps[0].calls] == ["0", "1", "2"]
    assert rank.context["optimizers"] == "torch.optim.sgd.SGD default"
    assert rank.context["precision"] == "float32"


def test_recording_changes_nothing(tmp_path):
    model, optimizer = parts()
    train(Recorder(tmp_path, model, optimizer), model, optimizer)
    other, other_optimizer = parts()

    class Nothing:
        batch = step = staticmethod(lambda **_: None)

    train(Nothing, other, other_optimizer)
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values()):
        assert torch.equal(mine, theirs), name


def test_a_run_recorded_twice_has_no_difference(tmp_path):
    for name in ("one", "two"):
        model, optimizer = parts()
        train(Recorder(tmp_path / name, model, optimizer), model, optimizer)
    assert diagnose_plain(Recording.read(tmp_path / "one"), Recording.read(tmp_path / "two")) is None


def test_a_resumed_run_goes_on_with_its_records(tmp_path):
    model, optimizer = parts()
    train(Recorder(tmp_path, model, optimizer), model, optimizer)
    train(Recorder(tmp_path, model, optimizer, first_step=2), model, optimizer, steps=(2, 3))
    (rank,) = Recording.read(tmp_path).ranks
    assert [step.step for step in rank.steps] == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match=r"first_step=9.*holds 4 steps"):
        Recorder(tmp_path, model, optimizer, first_step=9)


def test_passes_without_gradients_are_no_steps(tmp_path):
    model, optimizer = parts()
    recorder = Recorder(tmp_path, model, optimizer)
    with torch.no_grad():
        model(torch.randn(4, 5))
    train(recorder, model, optimizer, steps=(0,))
    assert len(Recording.read(tmp_path).ranks[0].steps[0].batches) == 1


def test_samples_are_known_by_their_inputs_where_the_loop_has_no_indices(tmp_path):
    model, optimizer = parts()
    recorder = Recorder(tmp_path, model, optimizer)
    x = torch.randn(3, 5)
    model(x).sum().backward()
    recorder.batch(inputs=x)
    recorder.step()
    (batch,) = Recording.read(tmp_path).ranks[0].steps[0].batches
    assert batch.samples == batch.inputs
    assert len(set(batch.samples)) == 3


def test_mistakes_are_refused_in_a_sentence(tmp_path):
    model, optimizer = parts()
    with pytest.raises(ConfigError, match="was given no optimizer"):
        Recorder(tmp_path, model)
    recorder = Recorder(tmp_path, model, optimizer)
    with pytest.raises(ConfigError, match="given 1 losses and 4 samples"):
        recorder.batch(samples=range(4), losses=torch.tensor(1.0))
    with pytest.raises(ConfigError, match="holds no records"):
        Recording.read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no steps"):
        Recording.read(tmp_path)
    header = json.loads((tmp_path / "rank-000.jsonl").read_text())
    (tmp_path / "rank-000.jsonl").write_text(json.dumps({**header, "world_size": 4}))
    with pytest.raises(ConfigError, match="holds rank 0 of 4"):
        Recording.read(tmp_path)


def test_a_sketch_of_a_sum_is_the_sum_of_the_sketches():
    sketcher, generator = Sketcher(), torch.Generator().manual_seed(0)
    for size in (3, 16, 17, 1000):
        a, b = torch.randn(2, size, dtype=torch.float64, generator=generator)
        first, second, both = (vector(sketcher.measure("w", each)) for each in (a, b, 2 * a - b))
        assert both == pytest.approx(2 * first - second)
        assert len(both) == min(size, 16)
        assert Sketcher().measure("w", a).sketch == tuple(first)


def test_what_modules_keep_beside_parameters_and_buffers_is_found():
    module = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3))
    module[0].calls, module[0].log = 0, []
    module[0].draws = torch.Generator()
    before = attributes({"": module})
    module[0].calls += 1
    module[0].log.append(0.5)
    torch.randn(2, generator=module[0].draws)
    module(torch.randn(4, 3))
    now = attributes({"": module})
    assert sorted(name for name in now if now[name] != before[name]) == ["0.calls", "0.draws", "0.log"]
    assert list(attributes({"loss": nn.CrossEntropyLoss()})) == [
        "loss.reduction",
        "loss.ignore_index",
        "loss.label_smoothing",
    ]


def test_attributes_that_hold_themselves_and_sparse_tensors_have_a_text():
    """The first forward pass ended in a RecursionError, or an error of torch; a deep list took minutes."""
    module, tree, deep = nn.Identity(), {"value": 1}, [1]
    tree["children"] = [{"parent": tree}]
    for _ in range(40):
        deep = [deep]
    module.tree, module.deep, module.sparse = tree, deep, torch.eye(3).to_sparse()
    before = attributes({"": module})
    tree["value"], module.sparse = 2, torch.eye(3).to_sparse() * 2
    now = attributes({"": module})
    assert sorted(name for name in now if now[name] != before[name]) == ["sparse", "tree"]


def test_a_set_of_texts_has_the_same_text_in_each_process():
    """Its order was taken for a difference between the reference and the processes."""
    script = "import sys; from torch import nn; from lockstep.verify.plain.recorder import attributes\n"
    script += "module = nn.Identity(); module.seen = set('abcdefgh'); print(attributes({'': module})['seen'])"
    texts = set()
    for seed in "123":
        command, environment = [sys.executable, "-c", script], {**os.environ, "PYTHONHASHSEED": seed}
        texts.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_gradient_that_was_rounded_is_told_from_one_that_was_not(kind):
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    assert coarse_type(gradient, 3) == ""
    name = str(kind).removeprefix("torch.")
    assert coarse_type(gradient.to(kind).float(), 3) == name
    assert coarse_type(gradient.to(kind).float() / 3, 3) == name
    assert coarse_type(torch.zeros(4), 3) == coarse_type(gradient.to(kind), 3) == ""


def test_modes_targets_and_state_are_recorded(tmp_path):
    model, optimizer = parts()
    model[1].eval()
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    optimizer.param_groups[0]["params"].pop()
    recorder = Recorder(tmp_path, model, optimizer)
    for _ in range(2):
        model(torch.randn(4, 5)).sum().backward()
        recorder.batch(samples=range(4), targets=torch.tensor([0, 2, 1, 1]))
        optimizer.step()
        recorder.step()
    (rank,) = Recording.read(tmp_path).ranks
    assert rank.modules == ["0", "1", "2"]
    step = rank.steps[1]
    assert step.evaluating == ["1"]
    assert step.unheld == ["2.bias"]
    assert step.batches[0].targets == [0, 2, 1, 1]
    assert [len(row) for row in step.batches[0].outputs] == [3, 3, 3, 3]
    assert step.state["momentum_buffer of 0.weight"].norm > 0
    assert "momentum_buffer of 2.bias" not in step.state


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            lambda folder, model, optimizer: Recorder(3, model, optimizer),
            "folder of Recorder is 3, and no path",
        ),
        (lambda folder, model, optimizer: Recorder("a\0b", model, optimizer), "a character that no path has"),
        (lambda folder, model, optimizer: Recorder(folder, nn.Linear, optimizer), "The model of Recorder is"),
        (
            lambda folder, model, optimizer: Recorder(folder, model, optimizer, loss=3),
            "The loss of Recorder is 3",
        ),
        (lambda folder, model, optimizer: Recorder(folder, model, torch.optim.SGD), "given the optimizer"),
        (lambda folder, model, optimizer: Recorder(folder, model, optimizer, first_step=-1), "first_step=-1"),
        (lambda *parts: Recorder(*parts).batch(samples="abc"), "samples='abc' was given to recorder.batch"),
        (lambda *parts: Recorder(*parts).batch(samples=[0, 1.5]), "Give the index of each sample"),
        (lambda *parts: Recorder(*parts).batch(inputs=[1, 2]), "a tensor with a row for each sample"),
        (lambda *parts: Recorder(*parts).batch(loss=torch.ones(2)), "Give one number"),
    ],
    ids=range(10),
)
def test_what_is_given_by_mistake_is_named(wrong, said, tmp_path):
    """These ended in an AttributeError or a TypeError; of a sample 1.5, sample 1 was recorded."""
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=said):
        wrong(tmp_path / "recorded", model, torch.optim.SGD(model.parameters(), lr=0.1))
