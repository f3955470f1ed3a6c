"""docs/job-files.md lists every setting as the source has it: name, default, sentence."""

import ast
import dataclasses
import inspect
import itertools
import typing
from pathlib import Path

from lockstep.config.components import Component
from lockstep.config.job import JobConfig

PAGE = Path(__file__).parents[2] / "docs" / "job-files.md"


def sentences(cls):
    """The text under each field of a class and its bases, on one line."""
    bodies = [ast.parse(inspect.getsource(each)).body[0].body for each in reversed(cls.__mro__[:-1])]
    return {
        field.target.id: " ".join(text.value.value.split()).replace("``", "`").replace("|", "\\|")
        for body in bodies
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def shown(value):
    if value is dataclasses.MISSING or value is None or value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def sections():
    """Each table of a job file with its dataclass."""
    for name, kind in typing.get_type_hints(JobConfig).items():
        options = [option for option in typing.get_args(kind) or (kind,) if dataclasses.is_dataclass(option)]
        for option in options:
            if option is not Component:
                yield name, option


def rows():
    for name, cls in sections():
        told = sentences(cls)
        for field in dataclasses.fields(cls):
            yield f"| `{name}.{field.name}` | {shown(field.default)} | {told[field.name]} |"


def test_every_setting_is_on_the_page_as_the_source_has_it():
    page = PAGE.read_text().splitlines()
    missing = [row for row in rows() if row not in page]
    assert not missing, "docs/job-files.md lacks:\n" + "\n".join(missing)


def test_the_page_has_no_setting_that_is_gone():
    section = PAGE.read_text().partition("## Every setting\n")[2].partition("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert sorted(listed) == sorted(rows())


def test_the_job_file_of_the_page_is_sound(job_file, tmp_path):
    from lockstep.config.job_file import parse_set
    from lockstep.job import load_job

    text = PAGE.read_text().partition("```toml\n")[2].partition("```")[0]
    path = job_file(text)
    loaded = load_job(str(path), [parse_set(f"data.root={tmp_path}")])
    assert loaded.training.global_batch == 64
