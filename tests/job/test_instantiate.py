"""Objects from import paths: found, checked against the signature, made; every failure names its part."""

import pickle
import sys

import pytest

from lockstep.config.components import Component
from lockstep.config.job_file import with_lengths
from lockstep.errors import ConfigError
from lockstep.job.instantiate import Composed, build, find_object, importable_from, instantiate


def part(target, **args):
    return Component(target=target, args=args)


def refusal(component, *positional, **options):
    with pytest.raises(ConfigError) as caught:
        instantiate(component, *positional, **options)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_function_and_a_class_are_called_with_their_arguments():
    assert instantiate(part("fractions:Fraction", numerator=3, denominator=6)) == 0.5
    assert instantiate(part("textwrap:shorten", text="a b c", width=100)) == "a b c"
    assert instantiate(part("datetime:datetime.fromtimestamp", timestamp=0)).year in (1969, 1970)


def test_arguments_from_lockstep_come_first_and_those_of_the_job_win():
    assert instantiate(part("fractions:Fraction", denominator=4), 2) == 0.5
    assert instantiate(part("fractions:Fraction", numerator=3), numerator=1, denominator=2) == 1.5


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("fractons:Fraction", "there is no module 'fractons'. Did you mean 'fractions'?"),
        ("xml.dmo:minidom", "xml has no module 'dmo'. Did you mean 'dom'?"),
        ("fractions:Fractoin", "fractions has no 'Fractoin'. Did you mean 'Fraction'?"),
        (
            "datetime:datetime.fromtimestmp",
            "datetime.datetime has no 'fromtimestmp'. Did you mean 'fromtimestamp'?",
        ),
        ("math:pi", "is a value of type float and cannot be called"),
        ("xml:dom", "is a module and cannot be called"),
    ],
)
@pytest.mark.fault("M11")
def test_the_part_of_the_path_that_failed_is_named_with_its_nearest_name(target, expected):
    import xml.dom  # noqa: F401 - makes `dom` an attribute

    assert expected in refusal(part(target), name="model")
    assert refusal(part(target), name="model").startswith("model: ")


@pytest.mark.parametrize(
    ("component", "expected"),
    [
        (
            part("fractions:Fraction", numerater=3),
            "numerater is not an argument of fractions:Fraction. Did you mean 'numerator'?",
        ),
        (part("textwrap:shorten", text="a"), "width is missing: textwrap:shorten needs it."),
        (part("textwrap:shorten"), "text is missing: textwrap:shorten needs it. textwrap:shorten.width is"),
        (
            part("textwrap:TextWrapper", tabsize=4, expand_tabs="off"),
            "expand_tabs is the text 'off', which Python",
        ),
        (
            part("fractions:Fraction", numerator="x"),
            "Fraction(numerator='x') failed with ValueError: Invalid literal",
        ),
    ],
)
@pytest.mark.fault("M11")
def test_arguments_are_checked_before_the_call(component, expected):
    assert expected in refusal(component)


def test_an_argument_that_lockstep_gives_may_not_be_given_again():
    assert "is given to textwrap:shorten by Lockstep" in refusal(part("textwrap:shorten", text="a", width=3), "b")


def test_a_module_that_fails_while_it_is_imported_is_told_apart(tmp_path):
    (tmp_path / "own_broken.py").write_text("raise RuntimeError('on purpose')\n")
    (tmp_path / "own_needs.py").write_text("import surely_not_installed\n")
    importable_from([str(tmp_path)])
    assert "importing own_broken failed with RuntimeError: on purpose" in refusal(part("own_broken:x"))
    assert "needs the module 'surely_not_installed'" in refusal(part("own_needs:x"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raise RuntimeError('on purpose')", "failed with RuntimeError: on purpose"),
        ("{}['x']", "failed with KeyError: 'x'"),
        ("assert n == 4", "failed with AssertionError"),
        ("raise StopIteration", "failed with StopIteration"),
        ("import sys; sys.exit(0)", "ended the program with sys.exit(0). It must return."),
    ],
)
def test_what_a_constructor_raises_is_a_sentence_and_the_users_lines(line, expected, tmp_path):
    """A constructor that called sys.exit(0) ended the job with exit status 0, untrained."""
    name = f"own_failing_{abs(hash(line))}"
    (tmp_path / f"{name}.py").write_text(f"def net(n):\n    {line}\n")
    importable_from([str(tmp_path)])
    told = refusal(part(f"{name}:net", n=3), name="model").splitlines()
    assert told[0] == f"model: {name}:net(n=3) {expected}"
    assert told[1:3] == [f'  File "{tmp_path}/{name}.py", line 2, in net', f"    {line}"]


def test_what_a_disk_or_network_raises_stays_itself_so_that_the_run_is_restarted(tmp_path):
    (tmp_path / "own_reset.py").write_text("def data():\n    raise ConnectionResetError('gone')\n")
    importable_from([str(tmp_path)])
    with pytest.raises(ConnectionResetError) as caught:
        instantiate(part("own_reset:data"), name="data.train")
    assert caught.value.__notes__ == ["data.train: own_reset:data() raised this."]


def test_folders_of_a_job_are_searched_in_their_order():
    importable_from(["/first", "/second", "/first"])
    assert sys.path[:2] == ["/first", "/second"]


def test_tables_among_the_arguments_are_made_first_at_any_depth():
    value = build({"a": [{"target": "fractions:Fraction", "numerator": 1}], "b": {"object": "math:pi"}}, "x")
    assert value == {"a": [1], "b": 3.141592653589793}
    with pytest.raises(ConfigError, match=r"x\.a\.0\.n is not an argument of fractions:Fraction"):
        build({"a": [{"target": "fractions:Fraction", "n": 1}]}, "x")
    with pytest.raises(ConfigError, match="no other key"):
        build({"object": "math:pi", "n": 1}, "x")


def test_a_list_of_transforms_is_composed_and_a_single_one_stays_itself():
    absolute, square = {"object": "builtins:abs"}, {"object": "tests_do_not_need:x"}
    both = build([absolute, {"object": "math:sqrt"}], "t", "transform")
    assert isinstance(both, Composed)
    assert both(-9) == 3
    assert build([absolute], "t", "transform") is abs
    assert build([absolute, absolute], "t", "other") == [abs, abs]
    assert build([], "t", "transform") == []
    assert pickle.loads(pickle.dumps(both))(-4) == 2
    with pytest.raises(ConfigError, match="tests_do_not_need"):
        build([square], "t", "transform")


def test_a_transform_that_is_no_function_is_not_put_into_a_list():
    """Of photos: the run ended at its first sample, as one that cannot be read."""
    crop, flip = {"target": "lockstep.data:CenterCrop", "size": 8}, {"object": "math:sqrt"}
    with pytest.raises(ConfigError, match="give CenterCrop alone; it is not a function of samples"):
        build([crop, flip], "data.train.transform", "transform")
    assert type(build([crop], "data.train.transform", "transform")).__name__ == "CenterCrop"


def test_transforms_of_an_image_and_its_label_pass_both_on():
    assert Composed((lambda x, y: (x + 1, y), lambda x, y: (x * y, y)))(1, 3) == (6, 3)


def test_lengths_of_the_run_are_filled_into_a_torch_scheduler():
    asked = part("torch.optim.lr_scheduler:OneCycleLR", total_steps="{steps}", other=["{epochs}", "{steps_per_epoch}"])
    assert with_lengths(asked, epochs=3, steps=20, steps_per_epoch=7).args == {
        "total_steps": 20,
        "other": [3, 7],
    }


def test_optimizers_losses_and_schedulers_of_torch():
    import torch

    model = instantiate(part("torch.nn:Linear", in_features=3, out_features=2))
    optimizer = instantiate(part("torch.optim:AdamW", lr=0.01, betas=[0.9, 0.99]), model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.01
    scheduler = instantiate(part("torch.optim.lr_scheduler:StepLR", step_size=3), optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    loss = instantiate(part("torch.nn:CrossEntropyLoss", label_smoothing=0.1))
    assert loss(torch.zeros(1, 2), torch.tensor([0])).item() == pytest.approx(0.6931, abs=1e-4)
    assert "Did you mean 'lr'?" in refusal(part("torch.optim:SGD", lrr=1.0), model.parameters())
    assert "momentum" in refusal(part("torch.optim:SGD", lr=1.0, momentum=-1), model.parameters())


def test_models_of_torchvision(torchvision):
    model = instantiate(part("torchvision.models:resnet18", num_classes=5))
    assert model.fc.out_features == 5
    wide = part("torchvision.models:resnet18", norm_layer={"object": "torch.nn:SyncBatchNorm"})
    assert type(instantiate(wide).bn1).__name__ == "SyncBatchNorm"
    assert "torchvision.models has no 'resnet81'" in refusal(part("torchvision.models:resnet81"))
    assert "clases" in refusal(part("torchvision.models:resnet18", num_clases=5))


def test_transforms_and_data_sets_of_torchvision(torchvision):
    import torch

    transform = [
        {"target": "torchvision.transforms.v2:RandomResizedCrop", "size": 32},
        {"target": "torchvision.transforms.v2:RandomHorizontalFlip", "p": 1.0},
        {"target": "torchvision.transforms.v2:ToImage"},
        {"target": "torchvision.transforms.v2:ToDtype", "dtype": {"object": "torch:float32"}, "scale": True},
        {"target": "torchvision.transforms.v2:Normalize", "mean": [0.5] * 3, "std": [0.25] * 3},
    ]
    data = instantiate(part("torchvision.datasets:FakeData", size=4, image_size=[3, 40, 40], transform=transform))
    image, label = data[0]
    assert image.shape == (3, 32, 32)
    assert image.dtype == torch.float32
    assert -2 <= image.min() < image.max() <= 2
    assert 0 <= int(label) < 10
    transform[0] = {"target": "torchvision.transforms.v2:RandomResizedCrop", "sise": 32}
    message = refusal(part("torchvision.datasets:FakeData", transform=transform), name="data.train")
    assert message.startswith("data.train.transform.0.sise is not an argument of")
    assert "Did you mean 'size'?" in message


def test_models_of_timm(timm):
    model = instantiate(part("timm:create_model", model_name="resnet10t", num_classes=3))
    assert model.num_classes == 3
    assert "timm has no 'creat_model'. Did you mean 'create_model'?" in refusal(part("timm:creat_model"))


def test_find_object_gives_the_object_as_it_is():
    assert find_object("math:pi") == pytest.approx(3.14159, abs=1e-5)
