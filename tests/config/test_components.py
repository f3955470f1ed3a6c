"""Wrong import paths and arguments are found in the source, before anything starts."""

import subprocess
import sys

import pytest

from lockstep.config.components import Component, origins, preflight
from lockstep.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["model.target=safetensor.torch:load_file"],
            "there is no module 'safetensor'. Did you mean 'safetensors'?",
        ),
        (
            ["model.target=torchwhatever.models:net"],
            "there is no module 'torchwhatever'. Install the package that provides it, or correct the name.",
        ),
        (["model.target=torch.nn.modulse:Linear"], "torch.nn has no 'modulse'. Did you mean 'modules'?"),
        (["model.target=torch.nn:Linaer"], "torch.nn has no 'Linaer'. Did you mean 'Linear'?"),
        (["optimizer.lrr=1"], "optimizer.lrr is not an argument of torch.optim:SGD. Did you mean 'lr'?"),
        (["loss.target=torch.nn:CrossEntropyLoss", "loss.smoothing=1"], "Did you mean 'label_smoothing'?"),
        (["model.target=torch.nn:Conv2d"], "model.kernel_size is missing: torch.nn:Conv2d needs it."),
        (["schedule.target=torch.optim.lr_scheduler:StepLR"], "step_size is missing"),
        (["schedule.target=torch.optim.lr_scheduler:StepLR", "schedule.optimizer=1"], "is given to"),
        (
            ["data.train.net={target='torch.nn:Linear', in_features=1}"],
            "data.train.net.out_features is missing",
        ),
        (["data.train.net={deep=[{object='torch.nn:Linaer'}]}"], "data.train.net.deep.0.object is"),
        (["model.target=torch.nn.functional:relu.x"], None),
        (
            ["optimizer.nesterov=False"],
            "optimizer.nesterov is the text 'False', which Python takes as true. ",
        ),
        (["optimizer.nesterov=no"], "Write false, in lower case and without quotes."),
        (["optimizer.foreach=True"], "optimizer.foreach is the text 'True'"),
        (["optimizer.nesterov=false"], None),
        (
            ["optimizer.lr=abc"],
            "optimizer.lr is the text 'abc', and torch.optim:SGD takes a number, such as 0.1.",
        ),
        (
            ["optimizer.momentum=.9"],
            "optimizer.momentum is the text '.9', and torch.optim:SGD takes a number, such as 0.1.",
        ),
        (["optimizer.momentum=0"], None),
        (
            [
                "data.train.target=lockstep.data:ImageFolder",
                "data.train.root=x",
                "data.train.split_by=folder",
            ],
            "data.train.split_by is 'folder', which lockstep.data:ImageFolder does not know. Did you mean 'folders'?",
        ),
        (["optimizer.lr=true"], "optimizer.lr is true, and torch.optim:SGD takes a number, such as 0.1."),
        (
            ["schedule.target=torch.optim.lr_scheduler:StepLR", "schedule.step_size=abc"],
            "schedule.step_size is the text 'abc', and torch.optim.lr_scheduler:StepLR takes a number, such as 1.",
        ),
        (["schedule.target=torch.optim.lr_scheduler:StepLR", "schedule.step_size={steps}"], None),
        (
            ["loss.target=torch.nn:CrossEntropyLoss", "loss.label_smoothing=x"],
            "takes a number, such as 0.1",
        ),
    ],
)
def test_what_is_certainly_wrong_is_said(load, options, expected):
    config = load(*options)
    texts = " ".join(problem.text for problem in preflight(config.components(), config.code))
    if expected is None:
        assert not texts
    else:
        assert expected in texts


def test_the_plain_job_and_its_nested_parts_have_no_problem(load):
    parts = "[{target='torch.nn:Linear', in_features=1, out_features=2}, {object='torch:float32'}]"
    config = load("data.train.target=builtins:dict", f"data.train.parts={parts}")
    assert preflight(config.components(), config.code) == []


def test_the_line_of_the_file_is_named(load):
    with pytest.raises(
        ConfigError, match=r"work\.toml:3: model\.in_feature is not an argument.*Did you mean 'in_features'"
    ):
        load(text=WRONG, imports=True)


WRONG = """\
[model]
target = "torch.nn:Linear"
in_feature = 4
in_features = 4
out_features = 2
[data.train]
target = "torch.utils.data:TensorDataset"
[optimizer]
target = "torch.optim:SGD"
"""


def test_a_users_module_beside_the_job_file_is_looked_into(job_file, load):
    job_file("def net(width): pass\n", name="own_net_beside.py")
    with pytest.raises(ConfigError) as caught:
        load("model.target=own_net_beside:net", "model.widht=3", imports=True)
    assert "model.widht is not an argument of own_net_beside:net. Did you mean 'width'?" in str(caught.value)
    assert "own_net_beside" not in sys.modules


def test_inherited_constructors_are_followed_and_unclear_ones_left_alone(job_file, load):
    job_file(
        """
import abc, dataclasses
class Base:
    def __init__(self, width): pass
class Child(Base): pass
@dataclasses.dataclass
class Made:
    width: int
class Any(Base):
    def __init__(self, **settings): pass
class Odd(Base, metaclass=type):
    pass
class BelowOdd(Odd):
    def __init__(self, width): pass
class Plain(Base, metaclass=abc.ABCMeta): pass
class New(Base):
    def __new__(cls, depth): pass
""",
        name="own_kinds.py",
    )

    def problems(target):
        config = load(f"model.target=own_kinds:{target}", "model.in_features=1", "model.width=2")
        return [problem.path[-1] for problem in preflight(config.components(), config.code)]

    for plain in ("Child", "Plain"):
        assert problems(plain) == ["in_features", "out_features"]
    for unclear in ("Made", "Any", "Odd", "BelowOdd", "New"):
        assert problems(unclear) == []


def test_the_check_imports_no_torch(job_file):
    code = (
        "import sys; from lockstep.job import load_job; load_job(sys.argv[1]);"
        "assert not {'torch', 'torchvision'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(job_file())], check=True)


@pytest.mark.fault("X5")
def test_code_that_is_not_installed_is_named_with_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit")
    targets = ("torch.optim:SGD", "mine:Net", "lockstep.data:Digits", "absent.part:x", "collections:Counter")
    parts = [(("model",), Component(target=target)) for target in targets]
    found = origins(parts, [str(tmp_path)])
    assert found == ["absent from a place that is not found", f"mine from {tmp_path / 'mine.py'}"]


def test_packages_of_the_system_are_not_named_in_a_virtual_environment_that_sees_them():
    """Each command said: imports: torch from /usr/lib/..."""
    code = """
import sysconfig
path, paths = sysconfig.get_path, sysconfig.get_paths
own = dict.fromkeys(("purelib", "platlib", "platstdlib", "scripts", "data"), "/venv")
sysconfig.get_path = lambda name, *rest: own.get(name) or path(name, *rest)
sysconfig.get_paths = lambda *rest: paths(*rest) | own
from lockstep.config.components import Component, origins
assert not origins([(("optimizer",), Component(target="torch.optim:SGD"))])
"""
    subprocess.run([sys.executable, "-c", code], check=True)
