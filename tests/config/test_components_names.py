"""Names are found in source files, nothing is imported, and what the source does not settle stays unknown."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from lockstep.config.components import Absent, Definition, StaticNames

FILES = {
    "own_models/__init__.py": """
from .nets import Net, Deep as Deeper
from own_models.stars import *
if True:
    def inside_an_if(): pass
try:
    import numpy as np
except ImportError:
    np = None
CONSTANT = 3
""",
    "own_models/nets.py": "class Net:\n    def __init__(self, width): pass\nclass Deep(Net): pass\n",
    "own_models/stars.py": "def from_a_star(x): pass\n",
    "own_models/late.py": "def __getattr__(name): return name\n",
    "own_models/broken.py": "def (\n",
    "own_models/twice.py": "def f(): pass\ndef f(x): pass\n",
    "own_models/spread/__init__.py": "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n",
    "own_models/circle.py": "from own_models.circle import f\n",
    "own_models/sub/__init__.py": "raise SystemExit('imported')\n",
    "own_models_of_folders/models/vision/nets.py": "class Net: pass\n",
}


@pytest.fixture
def names(tmp_path):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield StaticNames([str(tmp_path)])
    assert not [name for name in sys.modules if name.startswith("own_models")]


@pytest.mark.parametrize(
    ("name", "module", "defined"),
    [
        ("Net", "own_models.nets", "Net"),
        ("Deeper", "own_models.nets", "Deep"),
        ("from_a_star", "own_models.stars", "from_a_star"),
        ("inside_an_if", "own_models", "inside_an_if"),
    ],
)
def test_a_name_is_followed_to_where_it_is_written(names, name, module, defined):
    found = names.definition("own_models", name)
    assert isinstance(found, Definition)
    assert (found.module, found.node.name) == (module, defined)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("own_models", "np"),
        ("own_models", "CONSTANT"),
        ("own_models", "nets"),
        ("own_models.late", "anything"),
        ("own_models.broken", "x"),
        ("own_models.twice", "f"),
        ("own_models.circle", "f"),
        ("own_models.spread.elsewhere", "x"),
        ("math", "sqrt"),
        ("sys", "path"),
        ("torch", "float32"),
    ],
)
def test_what_the_source_does_not_settle_is_unknown(names, module, name):
    assert names.definition(module, name) is None


def test_what_is_not_there_is_absent_with_what_is(names):
    absent = names.definition("own_models", "Nett")
    assert isinstance(absent, Absent)
    assert absent.holder == "own_models"
    assert {"Net", "Deeper", "from_a_star"} <= set(absent.known)
    assert names.definition("own_models.net", "Net") == Absent(
        "own_models", "net", names.module("own_models.net").known
    )
    assert names.definition("own_modles", "Net") == Absent("", "own_modles", ())


def test_a_module_is_found_without_running_its_packages(names):
    assert isinstance(names.module("own_models.sub"), ModuleSpec)


def test_folders_within_each_other_need_no_init_file(names):
    found = names.definition("own_models_of_folders.models.vision.nets", "Net")
    assert isinstance(found, Definition)
    assert names.definition("own_models_of_folders.models.visoin.nets", "Net") is None, "it may be elsewhere"


def test_torch_is_read_not_imported():
    """A look at torch.optim through its files, in this process that may or may not have torch."""
    found = StaticNames().definition("torch.optim", "SGD")
    assert isinstance(found, Definition)
    assert found.module == "torch.optim.sgd"


def test_a_file_that_hides_a_package_is_named(tmp_path):
    """A ``torch.py`` beside a job was said to be torch, without ``nn``."""
    (tmp_path / "torch.py").touch()
    found = StaticNames([str(tmp_path)]).definition("torch.nn", "Linear")
    assert (found.holder, found.name) == (str(tmp_path / "torch.py"), "nn")
