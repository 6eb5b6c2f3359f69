"""What the README and docs/ show: their fenced blocks, the commands in them, and the commands in their prose."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")))
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_HEREDOC = re.compile(r"^([^\n]*)<<'(\w+)'([^\n]*)\n(.*?)^\2\n", re.DOTALL | re.MULTILINE)
_PROGRAMS = r"(?:tridock|fab|make|docker compose)"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[Block]:
    """The page's fenced blocks, without their indentation."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, found[2], re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE))


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a shell block, as argv; a heredoc is the last argument of its command."""
    text, bodies = block.text, []

    def keep(found: re.Match[str]) -> str:
        bodies.append(found[4])
        return f"{found[1]}{found[3]} HEREDOC-{len(bodies) - 1}\n"

    text = _HEREDOC.sub(keep, text)
    before = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        try:
            found = list(split(before + line))
        except ValueError:  # inside quotes
            before += f"{line}\n"
            continue
        before = ""
        for argv in found:
            yield [bodies[int(word[8:])] if word.startswith("HEREDOC-") else word for word in argv]


def split(line: str) -> Iterator[list[str]]:
    """A line's simple commands, as argv. ``[--option]`` is as good as the option, ``<name>`` is a name."""
    line = re.sub(r"<([\w-]+)>", r"\1", re.sub(r"\[(--[^\]]*)\]", r"\1", line))
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&")
    lexer.whitespace_split = True
    argv: list[str] = []
    for word in lexer:
        if set(word) <= set(";|&"):
            yield argv
            argv = []
        else:
            argv.append(word)
    yield argv


def listed_commands(block: Block) -> Iterator[list[str]]:
    """The commands in a block that is no script, one a line."""
    for line in block.text.splitlines():
        if re.match(rf"{_PROGRAMS} (?!.*…)", line):
            yield from split(line)


def spans(page: str) -> Iterator[str]:
    """The commands of the page's prose and tables."""
    prose = _FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    yield from re.findall(rf"`({_PROGRAMS} [^`]+)`", re.sub(r"\s*\n\s*", " ", prose))
