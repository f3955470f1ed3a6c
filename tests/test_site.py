"""The site of ``make docs``: its generated reference is complete, its links lead somewhere, and it needs no network."""

import html.parser
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from tests.scale.browser import needs_browser, open_page
from tests.test_public_names import COMMANDS, DATA, ERRORS, EXIT_CODES, MODELS, NAMES

ROOT = Path(__file__).parents[1]
LOADING = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/site/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_every_public_name(reference):
    pages = reference.pages()
    listed = {
        "lockstep": NAMES,
        "lockstep.errors": [*ERRORS, *EXIT_CODES],
        "lockstep.data": DATA,
        "lockstep.models": MODELS,
        "lockstep.reduce": ["ordered_hook", "OrderedHookState"],
        "lockstep.verify": ["Recorder"],
    }
    for module, names in listed.items():
        shown = re.findall(rf"^::: {module}\.(\w+)$", pages[f"reference/{module}.md"], re.M)
        assert not set(names) - set(shown)
        assert len(shown) == len(set(shown))


def test_the_reference_has_every_class_that_the_pages_import_from_an_integration(reference):
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    found = re.findall(r"^from (lockstep\.integrations\.\w+) import \(?\s*(\w+)", pages, re.M)
    assert len(found) >= 4
    for module, name in found:
        assert name in reference.public_names(module)


def test_the_command_line_page_has_every_command_and_argument(reference):
    page = reference.pages()["reference/command-line.md"]
    sections = dict(re.findall(r"^## lockstep (\S+)\n((?:(?!## ).*\n?)*)", page, re.M))
    assert list(sections) == list(COMMANDS)
    for name, arguments in COMMANDS.items():
        shown = " ".join(re.findall(r"^\| `(.*?)` \|", sections[name], re.M))
        options = {word for word in arguments.split() if word.startswith("--")}
        assert not options - set(re.findall(r"--[\w-]+", shown))


def test_no_cell_of_the_command_line_page_is_empty(reference):
    rows = re.findall(r"^\|(.*)\|(.*)\|$", reference.pages()["reference/command-line.md"], re.M)
    assert [argument for argument, told in rows if not told.strip()] == []


class _Document(html.parser.HTMLParser):
    """The anchors, links and loaded addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded, self.language = set(), [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "html":
            self.language = given["lang"]
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if given.get(LOADING.get(tag)) and given.get("rel") not in ("prev", "next", "canonical"):
            self.loaded.append(given[LOADING[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site. MkDocs has checked the links of the pages; a warning ends it."""
    folder = tmp_path_factory.mktemp("site")
    words = ["make", "docs", f"ARGS=--site-dir {folder}", f"PYTHON={sys.executable}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)
    if done.returncode and re.search("NewConnectionError|ConnectTimeout|NameResolutionError", done.stderr):
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def documents(site):
    return {path.resolve(): _Document(path.read_text()) for path in site.rglob("*.html")}


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")


def slow(test):
    """Marks a test that needs the built site."""
    for mark in (needs_make, pytest.mark.slow, pytest.mark.timeout(900)):
        test = mark(test)
    return test


@slow
def test_every_link_leads_to_a_page_and_an_anchor_of_the_site(documents):
    broken = []
    for path, document in documents.items():
        if path.name == "404.html":
            continue
        for link in document.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = documents[target].anchors if target in documents else ()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append(f"{path.name}: {link}")
    assert not broken[:20]


@slow
def test_no_page_and_no_style_sheet_loads_from_another_place(site, documents):
    loaded = {address for document in documents.values() for address in document.loaded}
    for path in site.rglob("*.css"):
        loaded |= set(re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", path.read_text()))
    assert [address for address in loaded if re.match(r"(?!data:)\w+:|//", address)] == []


@slow
def test_every_page_of_the_documentation_is_there_in_its_language(site, documents):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    built = {path.relative_to(site.resolve()).with_suffix("") for path in documents}
    missing = [page for page in pages if page.with_suffix("") not in built and page.name != "README.md"]
    assert not missing
    for path, document in documents.items():
        chinese = "course/zh/" in path.as_posix() or path.name.endswith(".zh.html")
        assert document.language == ("zh" if chinese else "en")


@slow
def test_every_public_name_has_its_heading(documents, reference):
    anchors = set().union(*(document.anchors for document in documents.values()))
    for module in reference.MODULES:
        assert not [name for name in reference.public_names(module) if f"{module}.{name}" not in anchors]


@slow
@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("place", ["index", "course/zh/02-one-device", "reference/command-line", "reference/lockstep"])
def test_a_page_opened_as_a_file_asks_for_nothing_and_fits(site, place, width):
    with open_page(site / f"{place}.html", width=width) as page:
        assert [address for address in page.requests if not address.startswith(("file:", "data:"))] == []
        assert page.complaints == []
        assert page.value("document.documentElement.scrollWidth") <= width


@slow
@needs_browser
@pytest.mark.parametrize(("words", "place"), [("staleness", "parameter_server.html"), ("反向传播", "course/zh/")])
def test_the_search_finds_words_of_both_languages(site, words, place):
    with open_page(site / "index.html") as page:
        found = page.value(
            f"""new Promise(done => {{
              const list = document.querySelector("[data-md-component=search-result] ol")
              const found = () => [...list.querySelectorAll("a")].map(a => a.href)
              const watch = new MutationObserver(() => found().length && done(found()))
              watch.observe(list, {{childList: true, subtree: true}})
              const input = document.querySelector("[data-md-component=search-query]")
              input.focus()
              input.value = {words!r}
              input.dispatchEvent(new Event("input", {{bubbles: true}}))
              input.dispatchEvent(new KeyboardEvent("keyup", {{bubbles: true}}))
            }})"""
        )
    assert any(place in address for address in found)
