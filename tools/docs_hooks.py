"""MkDocs hooks: README is the first page, and files outside docs/ that a page links to become pages of the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    sources = ["README.md", "CHANGELOG.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    linked = {target for source in sources for target in _linked(source)}
    for name in sorted({*_PAGES, *(name for name in linked if not name.startswith("docs/"))}):
        level = InclusionLevel.UNDEFINED if name in _PAGES else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, _in_site(name), content=_content(name), inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are in the site."""
    uri = page.file.src_uri
    source = next((name for name, place in _PAGES.items() if place == uri), f"docs/{uri}")

    def moved(link: re.Match[str]) -> str:
        target = _in_site(posixpath.normpath(posixpath.join(posixpath.dirname(source), link[1])))
        return posixpath.relpath(target, posixpath.dirname(uri) or ".")

    return _LINK.sub(moved, markdown)


def _linked(source: str) -> Iterator[str]:
    for link in _LINK.findall((ROOT / source).read_text(encoding="utf-8")):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        if (ROOT / target).is_file():
            yield target


def _in_site(name: str) -> str:
    """Where a file of the repository is in the site's sources."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return _PAGES.get(name, f"files/{name}.md")


def _content(name: str) -> str:
    text = (ROOT / name).read_text(encoding="utf-8")
    return text if name in _PAGES else f"# `{name}`\n\n````{Path(name).suffix[1:]}\n{text}````\n"
