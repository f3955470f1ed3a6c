"""Both languages of the course have the same structure, and its pages hold the code and the output of its files."""

import re

import pytest
from tests.course.notebooks import notebook
from tests.course.pages import BLOCK, CODE, COURSE, ROOT, blocks, filled, pages, printed, without_numbers

NAMES = [page.name for page in pages("en")]
PAGES = [*pages("en"), *pages("zh")]
COMMANDS = sorted({block[:2] for page in PAGES for block in blocks(page.read_text()) if block[0] != "code"})
PAIRS = [
    *((COURSE / "en" / name, COURSE / "zh" / name) for name in NAMES),
    (ROOT / "README.md", ROOT / "README.zh.md"),
]


def structure(text):
    """The parts that languages of a page share: levels of headings, fenced blocks, figures, links, sizes of lists."""
    text = text.replace("README.zh.md", "README.md").replace("docs/course/zh/", "docs/course/en/")
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    return {
        "headings": re.findall(r"^(#+) ", prose, re.M),
        "blocks": re.findall(r"```.*?```", text, re.S),
        "figures": re.findall(r"!\[[^\]]+\]\(([^)]+)\)", prose),
        "links": sorted(re.findall(r"(?<!!)\[[^\]]+\]\(([^)]+)\)", re.sub(r"!\[[^\]]*\]\([^)]*\)", "", prose))),
        "items": re.findall(r"^(\d+)\. ", prose, re.M),
        "rows": len(re.findall(r"^\|", prose, re.M)),
    }


def id_of(page):
    return f"{page.parent.name}/{page.name}"


def test_both_languages_have_the_same_pages():
    assert [page.name for page in pages("zh")] == NAMES


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].name)
def test_both_languages_have_one_structure(pair):
    english, chinese = (structure(page.read_text(encoding="utf-8")) for page in pair)
    for part in english:
        assert chinese[part] == english[part], part


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_a_page_holds_the_code_of_its_files(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text, run=False) == text, "make course-pages writes it"


@pytest.mark.parametrize("page", [page for page in PAGES if page.name[0].isdigit()], ids=id_of)
def test_a_chapter_is_complete(page):
    text = page.read_text(encoding="utf-8")
    files = {file for kind, file, _ in blocks(text) if kind == "code"}
    assert files == {str(path.relative_to(CODE)) for path in (CODE / page.name[:2]).glob("*.py")}
    by_hand = f"{page.name[:2]}/by_hand.py"
    assert by_hand in files
    assert len((CODE / by_hand).read_text(encoding="utf-8").splitlines()) < 60
    found = structure(text)
    assert found["figures"]
    assert found["items"][-10:] == [*"12345", *"12345"]
    commands = [command for kind, command, _ in blocks(text) if kind != "code"]
    assert any(re.match(r"lockstep (lint|verify) ", command) for command in commands)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name[0].isdigit()], ids=id_of)
def test_a_notebook_has_the_text_the_files_and_the_commands_of_its_page(page):
    text = page.read_text(encoding="utf-8")
    found = notebook(text)
    cells = [("".join(cell["source"]), cell) for cell in found["cells"]]
    first, *code = [(source, cell) for source, cell in cells if cell["cell_type"] == "code"]
    assert first[0] == "%cd ../code"
    assert len({cell["id"] for _, cell in cells}) == len(cells)
    for (kind, name, content), (source, cell) in zip(blocks(text), code, strict=True):
        printed_there = "".join("".join(each["text"]) for each in cell["outputs"])
        if kind == "code":
            assert source == f"%%writefile {name}\n{content.rstrip()}"
        else:
            assert (source, f"$ {name}\n{printed_there}") == (f"!{name}", content)
    prose = " ".join(source for source, cell in cells if cell["cell_type"] == "markdown")
    assert prose.split() == BLOCK.sub("", text).split()


def test_every_item_of_the_notes_has_a_place():
    for language in ("en", "zh"):
        rows = re.findall(r"^\| (\d+) \| .+\]\(", (COURSE / language / "items.md").read_text(), re.M)
        assert [int(row) for row in rows] == list(range(1, 64))


def test_links_with_a_fragment_lead_to_a_heading():
    for page in PAGES:
        for path, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            target = page if not path else page.parent / path
            headings = re.findall(r"^#+ (.+)", target.read_text(), re.M)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert fragment in slugs, f"{id_of(page)}: {path}#{fragment}"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "command"), COMMANDS, ids=lambda value: value)
def test_a_command_prints_what_the_page_says(kind, command):
    output = printed(command)
    for page in PAGES:
        for _, other, content in blocks(page.read_text(encoding="utf-8")):
            if other == command and kind != "code":
                if "numbers vary" in kind:
                    assert without_numbers(output) == without_numbers(content), id_of(page)
                else:
                    assert output == content, id_of(page)
