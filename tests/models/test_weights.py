import os
import socket
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn

from lockstep.errors import CheckpointError, CheckpointMismatch
from lockstep.models import load_weights, lstm, perceptron, resnet18, resnet34, resnet50, transformer
from lockstep.models.weights import metadata_of

pytestmark = pytest.mark.usefixtures("one_thread")


def save(path, weights):
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


def equal(left, right, skip=()):
    right = right.state_dict()
    return all(torch.equal(value, right[name]) for name, value in left.state_dict().items() if name not in skip)


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_weights_of_the_same_model_are_loaded_whole(name, tmp_path):
    source, target = resnet18(num_classes=5), resnet18(num_classes=5)
    report = load_weights(target, save(tmp_path / name, source.state_dict()))
    assert equal(target, source)
    assert (report.loaded, report.skipped) == (len(source.state_dict()), ())
    assert report.describe() == f"122 tensors loaded from {name}; nothing was skipped."


def test_torchvisions_weights_give_torchvisions_outputs(torchvision, tmp_path):
    source = torchvision.models.resnet18().eval()
    target = resnet18().eval()
    load_weights(target, save(tmp_path / "resnet18.pth", source.state_dict()))
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(target(images), source(images))


def test_weights_for_other_classes_are_loaded_except_the_head_and_that_is_said(tmp_path):
    source, target = resnet18(num_classes=1000), resnet18(num_classes=5)
    head = target.fc.weight.detach().clone()
    report = load_weights(target, save(tmp_path / "resnet18.pth", source.state_dict()))
    assert equal(target, source, skip=("fc.weight", "fc.bias"))
    assert torch.equal(target.fc.weight, head)
    assert report.skipped == ("fc.weight", "fc.bias")
    assert report.describe() == (
        "120 tensors loaded from resnet18.pth; skipped: fc.weight, fc.bias "
        "(made for 1000 classes, the model has 5), which keep their initial values."
    )


def test_heads_of_other_libraries_are_found(torchvision, timm, tmp_path):
    small, tiny = torchvision.models.mobilenet_v3_small, "vit_tiny_patch16_224"
    pairs = [
        (small(num_classes=7), small(num_classes=3), "classifier.3."),
        (timm.create_model(tiny, num_classes=7), timm.create_model(tiny, num_classes=3), "head."),
    ]
    for source, target, head in pairs:
        report = load_weights(target, save(tmp_path / "weights.pth", source.state_dict()))
        assert report.skipped == (f"{head}weight", f"{head}bias")
        assert equal(target, source, skip=report.skipped)


def test_a_head_for_other_classes_is_refused_where_asked(tmp_path):
    path = save(tmp_path / "weights.pth", resnet18(num_classes=7).state_dict())
    with pytest.raises(CheckpointMismatch, match=r"fc.weight \[7, 512\] instead of \[5, 512\]"):
        load_weights(resnet18(num_classes=5), path, strict_head=True)


@pytest.mark.parametrize(
    "make_source, make_target",
    [
        *(
            pytest.param(partial(build, num_classes=2), partial(resnet18, num_classes=2), marks=pytest.mark.slow)
            for build in (resnet34, resnet50)
        ),
        (partial(resnet18, num_classes=2, small_images=True), partial(resnet18, num_classes=2)),
        (partial(perceptron, hidden=(256, 64)), partial(perceptron, hidden=(256, 128))),
        (
            partial(transformer, vocabulary_size=9, width=8, heads=2),
            partial(transformer, vocabulary_size=11, width=8, heads=2),
        ),
        (
            lambda: nn.Sequential(nn.Linear(3, 3)),
            lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)),
        ),
        (
            partial(lstm, num_classes=2, vocabulary_size=9, hidden_size=8),
            partial(lstm, num_classes=2, vocabulary_size=7, hidden_size=8),
        ),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_loaded(make_source, make_target, tmp_path):
    source, target = make_source(), make_target()
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointMismatch, match="the weights of another model") as raised:
        load_weights(target, save(tmp_path / "weights.pth", source.state_dict()))
    assert raised.value.exit_code == 2
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


@pytest.mark.parametrize("wrapper", ["state_dict", "model_state_dict", "model"])
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_what_training_scripts_add_is_taken_off(wrapper, prefix, tmp_path):
    source, target = perceptron(), perceptron()
    weights = {prefix + name: value for name, value in source.state_dict().items()}
    load_weights(target, save(tmp_path / "last.pt", {wrapper: weights, "epoch": 3}))
    assert equal(target, source)


def test_a_module_of_that_name_keeps_its_name(tmp_path):
    source, target = (nn.ModuleDict({"module": nn.Linear(2, 2), "fc": nn.Linear(2, 2)}) for _ in range(2))
    load_weights(target, save(tmp_path / "weights.pth", source.state_dict()))
    assert equal(target, source)


def test_files_from_before_batch_counters_are_loaded(tmp_path):
    source, target = resnet18(num_classes=2), resnet18(num_classes=2)
    old = {n: v for n, v in source.state_dict().items() if not n.endswith("num_batches_tracked")}
    assert load_weights(target, save(tmp_path / "old.pth", old)).loaded == len(old)
    assert equal(target, source)


def test_a_tied_weight_may_stand_under_one_name_only(tmp_path):
    source, target = (transformer(vocabulary_size=9, width=8, heads=2, tied=True) for _ in range(2))
    once = {name: value for name, value in source.state_dict().items() if name != "head.weight"}
    load_weights(target, save(tmp_path / "weights.safetensors", once))
    assert equal(target, source)
    assert target.head.weight is target.embed.table.token.weight


def test_weights_of_another_precision_are_converted(tmp_path):
    source, target = perceptron(), perceptron()
    half = {name: value.bfloat16() for name, value in source.state_dict().items()}
    load_weights(target, save(tmp_path / "weights.safetensors", half))
    assert torch.equal(target[1].weight, source[1].weight.bfloat16().float())


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran-code",)


@pytest.mark.fault("K7")
def test_a_file_that_would_run_code_is_refused_and_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in ({"fc.weight": Evil()}, Evil(), {"state_dict": {"a": torch.ones(1)}, "args": Evil()}):
        with pytest.raises(CheckpointError, match="Nothing in it was run"):
            load_weights(perceptron(), save(tmp_path / "evil.pth", content))
    assert not (tmp_path / "ran-code").exists()


def test_a_file_with_a_whole_model_is_called_that(tmp_path):
    """The message was torch's: that the file can still be loaded, with two options and codes of bold letters."""
    with pytest.raises(CheckpointError, match=r"objects other than tensors, such as a whole model, or is damaged\."):
        load_weights(perceptron(), save(tmp_path / "whole.pth", perceptron()))


def test_files_that_are_not_weights_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"no file of weights at .*none\.pth"):
        load_weights(perceptron(), tmp_path / "none.pth")
    for name in ("torn.pth", "torn.safetensors"):
        path = save(tmp_path / name, perceptron().state_dict())
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.raises(CheckpointError, match=f"{name} cannot be read as weights"):
            load_weights(perceptron(), path)
    with pytest.raises(CheckpointError, match="holds a list instead of a dict of tensors"):
        load_weights(perceptron(), save(tmp_path / "list.pth", [torch.ones(1)]))
    with pytest.raises(CheckpointError, match=r"more than weights: epoch \(int\)"):
        load_weights(perceptron(), save(tmp_path / "mixed.pth", {"w": torch.ones(1), "epoch": 3}))


def test_a_file_that_cannot_be_opened_is_not_called_absent(tmp_path):
    """As one without permission to read it, for which safetensors has the same words."""
    path = tmp_path / "model.safetensors"
    with socket.socket(socket.AF_UNIX) as file:
        file.bind(str(path))
        with pytest.raises(CheckpointError, match=r"cannot be read as weights: .*No such device"):
            metadata_of(path)
