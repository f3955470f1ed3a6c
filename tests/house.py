"""The house rules of ``src/lockstep``, counted: ``make house`` prints them, and a test holds them.

``make files`` writes docs/files.md, the list of all files, out of their docstrings.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "lockstep"
MOST_FILES = 306
MOST_LINES = 76_100
"""The lines reached; the aim is 43,000."""
SMALL = 60


def modules():
    """Every module of the package, as {dotted name: path}."""
    return {
        ".".join(("lockstep", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in sorted(PACKAGE.rglob("*.py"))
    }


@functools.cache
def trees():
    """The parsed modules, as {dotted name: tree}."""
    return {name: ast.parse(path.read_text()) for name, path in modules().items()}


def importers(parsed):
    """The importers of each module, as {dotted name: set of dotted names}."""
    found = collections.defaultdict(set)
    for name, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found[whole if whole in parsed else node.module].add(name)
    return found


def lonely_small_files(parsed):
    """Files of less than 60 lines that only one other file of their package imports.

    ``__init__`` files, ``__main__`` and modules that a target, ``python -m`` or the table of commands names are entry
    points, and aside.
    """
    found, used = [], importers(parsed)
    text = "\n".join(path.read_text() for path in [*modules().values(), *ROOT.glob("Makefile")])
    for name, path in modules().items():
        lines = path.read_text().count("\n")
        if lines >= SMALL or path.name in ("__init__.py", "__main__.py"):
            continue
        package = name.rpartition(".")[0]
        if f"{name}:main" in text or f"-m {name}" in text or f'"{name}"' in text:
            continue
        outside = {user for user in used[name] if user != package and user.rpartition(".")[0] != package}
        inside = used[name] - outside - {package}
        if len(inside) <= 1 and not outside and package not in used[name]:
            found.append(f"{name}: {lines} lines, used by {sorted(inside)}")
    return found


def doubled_classes(parsed):
    """Class names that two modules define."""
    homes = collections.defaultdict(list)
    for name, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(name)
    return {name: places for name, places in homes.items() if len(places) > 1}


def replaced_methods(parsed):
    """Places that put a function where a class or an instance has a method.

    Found are ``setattr(Name, ...)`` on anything with a capital initial, and an assignment of a function, a lambda or
    a partial to an attribute of anything but ``self``.
    """
    found = []
    for name, tree in parsed.items():
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
                if isinstance(node.args[0], ast.Name) and node.args[0].id[:1].isupper():
                    found.append(f"{name}:{node.lineno}: setattr({node.args[0].id}, ...)")
                value = node.args[2]
                if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions):
                    found.append(f"{name}:{node.lineno}: setattr(..., a function)")
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if not isinstance(target, ast.Attribute):
                        continue
                    if isinstance(target.value, ast.Name) and target.value.id == "self":
                        continue
                    value = node.value
                    if isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions):
                        found.append(f"{name}:{node.lineno}: {ast.unparse(target)} = {ast.unparse(value)}")
    return found


OLD_NAMES = frozenset(  # one a word, so that the list can be read
    """
    Rooms Room Together rows_alone Begun look_through ReadClock KeptPhoto crooked
    Course Feeder Unread Pending Delivery Placed Saved Leaving EvaluationLeft take_up part_ways stand_ins
    let_go_of_groups settle Holding any_rank tally Cuts Between Wiring absent_parameters_explained one_forward
    Inbox Ledger Pool Attendance Meeting Role Company Hub Member Switchboard strangers Final conclude weigh withdraw
    Leavers Ending Unfinished in_turn Place Sight Pace WorkMeter light_torch Loss Enough Rhythm mend made_model
    kept_photos
    """.split()  # noqa: SIM905  a list of literals would be a line of its own for each
)
"""Names of our own that standard terms have replaced. A deprecated alias of a public one may stay, as a string."""


def old_names(parsed):
    """Classes, functions, attributes and modules that still have an old name."""
    found = []
    for name, tree in parsed.items():
        found += [f"{name}: the module" for part in name.split(".") if part in OLD_NAMES]
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name.strip("_") in OLD_NAMES:
                found.append(f"{name}:{node.lineno}: {node.name}")
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and node.attr.strip("_") in OLD_NAMES
            ):
                found.append(f"{name}:{node.lineno}: .{node.attr}")
    return found


_FILE_NAME = re.compile(r"[\w./-]*\w\.py|[\w./-]*/\w+/")


def compared_file_names(parsed):
    """Conditions that compare with the name of a source file or a folder of one."""
    found = []
    for name, tree in parsed.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                values = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                values = node.args if node.func.attr in ("endswith", "startswith", "match") else []
            else:
                continue
            found += [
                f"{name}:{node.lineno}: {value.value!r}"
                for value in values
                if isinstance(value, ast.Constant)
                and isinstance(value.value, str)
                and _FILE_NAME.fullmatch(value.value)
            ]
    return found


FILES_PAGE = ROOT / "docs" / "files.md"
_INTRODUCTION = """# Source files

One sentence about each file of `src/lockstep`: the first of its docstring, from which `make files` makes this page.
[Architecture](architecture.md) says how the packages depend on each other, and follows a step, a checkpoint, a failure
and a flag through them.
"""


def first_sentence(docstring):
    """The first sentence of a docstring, on one line, with the backticks of Markdown."""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z])", paragraph)[0].replace("``", "`")


def files_page():
    """The text of docs/files.md: a table for each package, in alphabetical order."""
    tables = collections.defaultdict(list)
    for name, path in modules().items():
        package = path.parent.relative_to(PACKAGE)
        sentence = first_sentence(ast.get_docstring(trees()[name]))
        if path.name == "__init__.py":
            title = "" if path.parent == PACKAGE else f"## {package}\n\n"
            tables[package].insert(0, f"{title}{sentence}\n\n| file | subject |\n|---|---|")
        else:
            tables[package].append(f"| `{path.name}` | {sentence.replace('|', chr(92) + '|')} |")
    parts = ["\n".join(table) for _, table in sorted(tables.items())]
    return "\n\n".join([_INTRODUCTION.rstrip(), *parts]) + "\n"


def main():
    """Prints the counts, or writes the list of files."""
    if "--files" in sys.argv:
        FILES_PAGE.write_text(files_page())
        return
    parsed = trees()
    lines = sum(path.read_text().count("\n") for path in modules().values())
    print(f"files                      {len(parsed):>7,}   at most {MOST_FILES}")
    print(f"lines                      {lines:>7,}   at most {MOST_LINES:,}")
    for title, found in (
        ("small files with one user", lonely_small_files(parsed)),
        ("class names twice", [f"{name}: {', '.join(at)}" for name, at in doubled_classes(parsed).items()]),
        ("old names", old_names(parsed)),
        ("methods replaced", replaced_methods(parsed)),
        ("file names compared", compared_file_names(parsed)),
    ):
        print(f"{title:<26} {len(found):>7,}   at most 0")
        if "-v" in sys.argv:
            print(*(f"    {line}" for line in found), sep="\n")


if __name__ == "__main__":
    main()
