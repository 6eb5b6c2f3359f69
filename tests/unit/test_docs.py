"""Every path, link and anchor that the documentation names exists; its lines can be read as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tridock.ops.checks.finding import CHECKS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md"))
)
FOLDERS = r"(?:tridock|tests|docs|configs|tools|entrypoint|patches|locks|hostfiles|upstream)"
PATH = re.compile(rf"(?<![\w./<>-])(?:{FOLDERS}/[\w./*-]*[\w*]|\.ci/\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
EXAMPLES = {"tools/preprocess_data.py", "tools/merge_datasets.py"}
"""Scripts of Megatron-LM."""


def prose(page: str) -> str:
    """The page without its code blocks, whose files are often the reader's own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_the_paths_of_a_page_exist(page: str) -> None:
    """``*`` and ``NAME`` stand for any name. The changelog names files that were removed."""
    named = {path.replace("NAME", "*") for path in PATH.findall(prose(page))} - EXAMPLES
    missing = [path for path in named if not any(ROOT.glob(path))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    broken = []
    for link in LINK.findall(prose(page)):
        name, _, anchor = link.partition("#")
        if ":" in name:
            continue
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_lines_of_prose_have_at_most_100_characters(page: str) -> None:
    """They are read as text, too. Rows of tables and pictures are one line each."""
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > 100 and not line.lstrip().startswith(("|", "![", "<"))] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_the_modules_and_verbs_of_a_page_exist(page: str) -> None:
    """Of ``python -m tridock.…`` in prose and code blocks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    verbs = (ROOT / "tridock" / "node" / "__main__.py").read_text(encoding="utf-8")
    missing = []
    for module, verb in re.findall(r"-m (tridock[.\w]*\w)(?: ([a-z-]+))?", text):
        path = ROOT / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            missing.append(module)
        if module == "tridock.node" and verb and not re.search(rf'verb\(\s*"{verb}"', verbs):
            missing.append(f"{module} {verb}")
    assert missing == []


def test_the_architecture_page_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = [path.name + "/" * path.is_dir() for path in (ROOT / "tridock").iterdir() if path.name[0] != "_"]
    assert [room for room in rooms if not re.search(rf"^  {re.escape(room)} ", page, re.MULTILINE)] == []


def test_the_doctors_page_has_a_row_for_every_check() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [check for check in CHECKS if not re.search(rf"^\| {check} \|", page, re.MULTILINE)] == []
