"""The documentation names files, modules and functions that exist, and every source file is listed."""

import ast
import re
from pathlib import Path

import pytest
from tests.house import FILES_PAGE, files_page

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FLOWS = re.findall(  # without the lines of "The path of a step", which name files only
    r"^(\w[\w/]*\.py) {2,}(\w[\w.]*(?:, \w[\w.]*)*) {2,}(\S.*)$",
    ARCHITECTURE.read_text().partition("## Four flows")[2],
    re.M,
)


def dotted_name_exists(name):
    """True if ``lockstep.a.b.C`` leads to a module, and the word after it is found in that module."""
    parts = name.split(".")[1:]
    for count in range(len(parts), -1, -1):
        place = PACKAGE.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                rest = parts[count:]
                return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
    return False


def missing_names(page):
    """The names in backticks that should be files or modules of the repository and are none."""
    text = page.read_text()
    for word in re.findall(r"(?<=[`\s(])lockstep(?:\.\w+)+(?=[`(),:\s])", text):
        if not dotted_name_exists(word):
            yield word
    for path in re.findall(r"`((?:\w+/)+\w+\.py|(?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", text):
        removed = page.parent.name == "decisions" and path.startswith("tests/")  # decisions are history too
        if not removed and not any((base / path).exists() for base in (ROOT, PACKAGE, page.parent)):
            yield path
    for path in re.findall(r"\]\((?!https?:)([^)#\s]+)", text):
        if not (page.parent / path).exists():
            yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    assert not sorted(set(missing_names(page)))


def test_the_list_of_files_is_what_their_docstrings_say():
    assert FILES_PAGE.read_text() == files_page(), "run `make files`"


def test_the_architecture_names_every_package():
    listed = set(re.findall(r"`([\w/]+)`", ARCHITECTURE.read_text().partition("## Four flows")[0]))
    assert {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/__init__.py")} <= listed


def definitions(body, name):
    """The functions and classes of this name in some statements; a name without a dot may be in a class."""
    first, _, rest = name.partition(".")
    nodes = body if rest else [node for top in body for node in ast.walk(top)]
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first]
    return found if not rest else [inner for node in found for inner in definitions(node.body, rest)]


@pytest.mark.parametrize(("file", "functions", "words"), FLOWS, ids=lambda value: value.replace(", ", "+"))
def test_the_functions_of_the_flows_exist(file, functions, words):
    named = [(file, function) for function in functions.split(", ")]
    for path, name in [*named, *re.findall(r"(\S+\.py): (\w+)", words)]:
        assert definitions(ast.parse((PACKAGE / path).read_text()).body, name), f"{path} has no {name}"
