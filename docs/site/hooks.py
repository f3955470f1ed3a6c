"""MkDocs calls these functions while it builds the site: generated pages, navigation, links that leave ``docs/``.

The pages are written for the repository, in which a link may lead to any file. On the site a link to a page of the
repository's root leads to its copy; one to another file leads to ``repo_url``, and is plain text where none is set.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree.ElementTree import Element

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import reference

ROOT = Path(__file__).parents[2]
ROOT_PAGES = ("README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md")
COPIES = {name: f"repository/{name.replace('README', 'readme')}" for name in ROOT_PAGES}
"""Pages of the root with their places on the site. A README.md there would be the index of its folder."""
OTHER_LANGUAGE = {"README.md": "README.zh.md", "README.zh.md": "README.md"}


class LinksOutOfDocs(Treeprocessor):
    """Changes the links of one page that MkDocs cannot follow; MkDocs checks the others."""

    page = ""
    """The place of the page in the repository, and that on the site."""
    place = ""
    repository: str | None = None
    files: Files

    def run(self, root: Element) -> None:
        """Changes the tree in place."""
        for element in root.iter():
            attribute = {"a": "href", "img": "src"}.get(element.tag)
            if attribute is None or not (address := element.get(attribute)):
                continue
            target = self.target(address)
            if target is not None:
                element.set(attribute, target)
            elif element.tag == "a":
                element.tag = "span"
                element.attrib.clear()

    def target(self, address: str) -> str | None:
        """Where a link leads on the site; None where the file is not on it and there is no repository to link to."""
        parts = urlsplit(address)
        if parts.scheme or parts.netloc or not parts.path:
            return address
        file = posixpath.normpath(posixpath.join(posixpath.dirname(self.page), unquote(parts.path)))
        fragment = f"#{parts.fragment}" if parts.fragment else ""
        place = COPIES.get(file, file.removeprefix("docs/") if file.startswith("docs/") else "")
        if place and self.files.get_file_from_path(place):
            return posixpath.relpath(place, posixpath.dirname(self.place) or ".") + fragment
        if not (ROOT / file).exists():
            return address  # MkDocs says that the link is broken
        return f"{self.repository.rstrip('/')}/blob/main/{file}{fragment}" if self.repository else None


class _Links(Extension):
    """Puts ``LinksOutOfDocs`` before MkDocs's own look at the links."""

    processor: LinksOutOfDocs

    def extendMarkdown(self, md: Markdown) -> None:
        md.treeprocessors.register(self.processor, "links_out_of_docs", 5)


_links = LinksOutOfDocs()


def on_config(config: MkDocsConfig) -> None:
    """Adds the look at the links to the extensions of Markdown."""
    _links.repository = config.repo_url
    extension = _Links()
    extension.processor = _links
    config.markdown_extensions.append(extension)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the copies of the root's pages and the generated ones, and makes the navigation of all pages."""
    for name, place in COPIES.items():
        files.append(File.generated(config, place, abs_src_path=str(ROOT / name)))
    for place, text in reference.pages().items():
        files.append(File.generated(config, place, content=text))
    config.nav = navigation([file.src_uri for file in files.documentation_pages()])
    _links.files = files


def navigation(places: list[str]) -> list[Any]:
    """The navigation: the course as its folders have it, the sections of the map, the reference, and what is left."""
    left = sorted(places, key=lambda place: (posixpath.basename(place) not in ("index.md", "README.md"), place))

    def take(*beginnings: str) -> list[str]:
        found = [place for beginning in beginnings for place in left if place.startswith(beginning)]
        left[:] = [place for place in left if place not in found]
        return found

    home = take("index.md")
    introduction = take("repository/readme.md")
    course, chinese = take("course/en/"), take("repository/readme.zh.md", "course/zh/")
    api, decisions = take(*(f"reference/{module}.md" for module in reference.MODULES)), take("decisions/")
    reference_pages = [{"Python": api}, *take("reference/", "job-files.md")]
    strategies = take("strategies/")
    sections = []
    for title, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", (ROOT / "docs/index.md").read_text(), re.M):
        links = (posixpath.normpath(posixpath.join("docs", link)) for link in re.findall(r"\]\(([^)#]+)", body))
        named = dict.fromkeys(COPIES.get(link, link.removeprefix("docs/")) for link in links)
        pages: list[Any] = []
        for place in named:
            if place == "strategies/README.md" and strategies:
                pages.append({"Strategies": strategies})
                strategies = []
            elif place in left:
                pages += take(place)
        sections.append({title: pages})
    sections[-1]["Inside"] += [*left, {"Decisions": decisions}]
    return [
        {"Home": [*home, *introduction]},
        {"Course": course},
        {"中文": chinese},
        *sections,
        {"Reference": reference_pages},
    ]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Notes which page is rendered now, and the same page in the other language."""
    place = page.file.src_uri
    _links.place = place
    back = {copy: name for name, copy in COPIES.items()}
    _links.page = back.get(place, f"docs/{place}")
    page.meta["language"] = "zh" if "/zh/" in f"/{place}" or place.endswith(".zh.md") else "en"
    if place.startswith("course/"):
        other = {"en": "course/en/index.md", "zh": "course/zh/index.md"}
        name = posixpath.basename(place)
        other |= {each: f"course/{each}/{name}" for each in other if files.get_file_from_path(f"course/{each}/{name}")}
    else:
        other = {"en": COPIES["README.md"], "zh": COPIES["README.zh.md"]}
        other[page.meta["language"]] = place
    page.meta["languages"] = {each: files.get_file_from_path(path).url for each, path in other.items()}
