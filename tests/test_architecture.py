"""The shape of the package: imports go downward, public names are listed, the start is light."""

import ast
import functools
import graphlib
import importlib
import importlib.metadata
import inspect
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"
LAYERS = (
    {"cli"},
    {"debug", "doctor", "verify", "replay", "audit", "explain", "scale"},
    {"job", "trainer", "integrations"},
    {"run"},
    {"strategies", "checkpoint", "loggers", "profile"},
    {"numerics"},
    {"reduce", "models", "data", "launch", "lint"},
    {"distributed"},
    {"runtime"},
    {"config"},
    {"core"},
    {"errors", "text"},
)
HEIGHT = {name: -depth for depth, layer in enumerate(LAYERS) for name in layer}
MOST_LINES = 640
MOST_FUNCTION_LINES = 80


def modules():
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def parsed(text):
    return ast.parse(text)


def part_of(path):
    """The name of the layer's member that a file belongs to; empty for the package's own ``__init__``."""
    first = path.relative_to(PACKAGE).parts[0]
    return "" if first in ("__init__.py", "__main__.py") else first.removesuffix(".py")


def imports(path, tree):
    """Every ``lockstep`` import of a file: line, dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "lockstep":
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "lockstep":
                for alias in node.names:
                    yield node.lineno, f"lockstep.{alias.name}"
            elif node.module and node.module.startswith("lockstep."):
                yield node.lineno, node.module


def upward_imports(path, text):
    """The lines of a file that import from a layer above its own."""
    own = part_of(path)
    if not own:
        return
    for line, name in imports(path, parsed(text)):
        if name == "lockstep.__version__":
            continue
        parts = name.split(".")
        if len(parts) < 2 or parts[1] not in HEIGHT:
            yield f"{path.relative_to(ROOT)}:{line} imports {name}, which is in no layer"
        elif HEIGHT[parts[1]] > HEIGHT[own]:
            yield f"{path.relative_to(ROOT)}:{line}: {own} imports {name}, which is above it"


def test_every_module_has_a_layer():
    unplaced = {part_of(path) for path in modules()} - {""} - set(HEIGHT)
    assert not unplaced, f"add to LAYERS and to docs/architecture.md: {sorted(unplaced)}"


def test_imports_go_downward_only():
    broken = [line for path in modules() for line in upward_imports(path, path.read_text())]
    assert not broken, "\n".join(broken)


def test_an_upward_import_is_found_and_named():
    found = list(upward_imports(PACKAGE / "core" / "plan.py", "import os\n\nfrom lockstep.cli import main\n"))
    assert found == ["src/lockstep/core/plan.py:3: core imports lockstep.cli, which is above it"]


def test_parts_of_one_layer_do_not_import_in_a_circle():
    graph = {part_of(path): set() for path in modules()}
    for path in modules():
        for _, name in imports(path, parsed(path.read_text())):
            graph[part_of(path)].add(name.split(".")[1])
    for part, needs in graph.items():
        needs.discard(part)
    graphlib.TopologicalSorter(graph).prepare()


KNOW_A_DEVICE_TYPE = {
    "runtime/devices.py": "the one place",
    "core/fingerprint.py": "what decides the bits of a device",
    "core/summation_tree.py": "sums of CUDA have an order of their own",
    "numerics/precision.py": "settings of NVIDIA's libraries",
    "launch/options.py": "counts GPUs before torch is imported",
    "cli/train.py": "as that",
    "strategies/absent.py": "the attribute is_cuda of tensors",
    "strategies/pipeline/chain.py": "settings that the code of a model may change",
}


_TYPES = ("cuda", "cpu:gloo,cuda:nccl", "xpu", "mps")
_OF_STREAMS = (
    "torch.cuda.current_stream",
    "torch.cuda.synchronize",
    "torch.cuda.Stream",
    "torch.cuda.stream",
)


def asked_types(path):
    """Lines of a file that compare or make a device type other than the CPU's, or use its streams."""
    for node in ast.walk(parsed(path.read_text())):
        names = isinstance(node, ast.Constant) and node.value in _TYPES
        asks = isinstance(node, ast.Attribute) and node.attr == "is_cuda"
        queues = isinstance(node, ast.Call) and ast.unparse(node.func) in _OF_STREAMS
        if names or asks or queues:
            yield node.lineno


def test_one_module_asks_for_the_type_of_a_device():
    found = {str(path.relative_to(PACKAGE)): list(asked_types(path)) for path in modules()}
    found = {name: lines for name, lines in found.items() if lines and not name.startswith("lint/")}
    assert set(found) == set(KNOW_A_DEVICE_TYPE), found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("__init__.py")), ids=lambda path: str(path.parent.name))
def test_public_names_are_listed(path):
    tree = parsed(path.read_text())
    name = ".".join(("lockstep", *path.parent.relative_to(PACKAGE).parts))
    module = importlib.import_module(name)
    listed = list(getattr(module, "__all__", []))
    taken = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{name}.")
        for alias in node.names
        if not inspect.ismodule(getattr(module, alias.asname or alias.name))
    }
    used_here = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    public = {item for item in taken if not item.startswith("_")} - used_here
    assert public <= set(listed), f"{path}: imported but not in __all__: {sorted(public - set(listed))}"
    assert len(listed) == len(set(listed))
    absent = [item for item in listed if not hasattr(module, item)]
    assert not absent, f"{path}: in __all__ but not there: {absent}"


@pytest.mark.parametrize(
    "module",
    [
        "lockstep",
        "lockstep.cli",
        "lockstep.cli.train",
        "lockstep.cli.run",
        "lockstep.cli.lint",
        "lockstep.job",
        "lockstep.launch",
    ],
)
def test_what_starts_a_run_does_not_import_torch(module):
    code = f"import {module}, sys; print(*(name for name in ('torch', 'tensorboard') if name in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


@pytest.mark.fault("S7")
def test_a_mistake_in_a_job_is_found_without_torch_and_in_less_than_a_second():
    code = "import sys; from lockstep.cli import main; s=main(); assert 'torch' not in sys.modules; exit(s)"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-c", code, "train", "digits", "--set", "training.epohcs=3"],
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert "'epochs'" in result.stderr
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 1.0, f"{seconds:.2f} s of processor time"


def test_files_and_functions_stay_small():
    long = []
    for path in modules():
        text = path.read_text()
        if text.count("\n") > MOST_LINES:
            long.append(f"{path.relative_to(ROOT)} has {text.count(chr(10))} lines: look for the second idea in it")
        long += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} is too long to be read"
            for node in ast.walk(parsed(text))
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_FUNCTION_LINES
        ]
    assert not long, "\n".join(long)


def test_the_version_is_the_one_that_is_installed():
    assert lockstep.__version__ == importlib.metadata.version("lockstep-train")


def test_no_file_is_called_utils():
    vague = [path for path in modules() if path.stem in ("utils", "util", "helpers", "common", "misc")]
    assert not vague
