"""No line of the package loads a pickle that a peer, a store or a file of somebody else could have made."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "lockstep"
FORBIDDEN = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
MODULES = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing.managers")
"""The first may be imported by its name, so that its calls are found."""
ALLOWED = {
    "launch/rank_process.py": "the arguments of a function, sent by the very program that starts the ranks",
    "data/formats/cifar10.py": "its Unpickler finds no name but those of arrays",
}


def pickles(source):
    """The lines of a source that load a pickle, or send one to other ranks."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield node.lineno, f"from {node.module}"
        if isinstance(node, ast.Import) and (named := [a.name for a in node.names if a.name in MODULES[1:]]):
            yield node.lineno, named[0]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        name = called.rpartition(".")[2]
        careful = any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)
        careless = any(word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords)
        unpickles = careless or called in ("pickle.load", "pickle.loads") or ("Unpickler" in called and name == "load")
        if unpickles or name in FORBIDDEN or (called == "torch.load" and not careful):
            yield node.lineno, called


@pytest.mark.fault("X3", "K7")
def test_no_pickle_is_loaded_or_sent():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {called}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in ALLOWED
        for line, called in pickles(path.read_text())
    ]
    assert not found


def test_what_would_be_found_is_found():
    source = (
        "torch.load(p)\ntorch.load(p, weights_only=True)\ndist.all_gather_object(a, b)\npickle.loads(x)\n"
        "from pickle import loads\nimport pickle\nimport dill\nnp.load(p, allow_pickle=True)\n"
        "np.load(p, allow_pickle=False)\n"
    )
    assert sorted(line for line, _ in pickles(source)) == [1, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("path", ALLOWED)
def test_the_exceptions_are_still_needed(path):
    assert list(pickles((PACKAGE / path).read_text()))
