"""Nothing in triage/, bench/ and ops/ matches text that Tridock itself writes: the parts agree on typed data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sources import SOURCES, nodes, parsed
from tridock.triage.diagnosis import RULES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("sources")
ROOMS = ("triage", "bench", "ops")
REGEX_CALLS = {"compile", "search", "match", "fullmatch", "findall", "finditer", "split", "sub", "regex"}
STRING_CALLS = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "find", "rfind"}
# What a variable or attribute is called that holds text of a process or log; a word `in` anything else is a key.
TEXT = re.compile(r"text|line|output|log|stdout|stderr|message|reason|words|low|err(ors?)?")

# Upstream's text that some text of Tridock's happens to hold: reviewed one by one, with who writes it.
UPSTREAM = {
    "Connection (?:closed|reset) by peer|remote process exited or there was a network error": (
        "the system (ECONNRESET), Gloo; NCCL"
    ),
    "EADDRINUSE|[Aa]ddress already in use": "the system (EADDRINUSE), torch",
    "Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED": "OpenSSH",
    "REMOTE HOST IDENTIFICATION HAS CHANGED": "OpenSSH",
    "connection closed": "OpenSSH",
    "connection reset": "OpenSSH",
    "permission denied": "OpenSSH; Docker",
    "refused": "OpenSSH (ECONNREFUSED)",
}


@dataclass(frozen=True)
class Matcher:
    """A pattern, or a literal, that some code looks for in a text."""

    place: str
    pattern: str
    is_regex: bool

    def finds(self, text: str) -> bool:
        if self.is_regex:
            return re.search(self.pattern, text, re.MULTILINE) is not None
        return self.pattern in text or self.pattern in text.lower()


def written(node: ast.expr) -> str | None:
    """The text of a constant, bytes too, or of an f-string with ``x`` for its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) or "x" for part in node.values)
    return None


def matched_expressions(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, bool, bool]]:
    """Every expression looked for, whether it is a regular expression, and whether even one word of it is a text."""
    for node in nodes:
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_re = isinstance(node.func, ast.Name) or getattr(getattr(node.func, "value", None), "id", "") == "re"
            if node.args and ((name in REGEX_CALLS and of_re) or name in STRING_CALLS):
                yield node.args[0], name in REGEX_CALLS, name == "regex"
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            names = [getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node.comparators[0])]
            yield node.left, False, any(TEXT.fullmatch(name) for name in names)


def matchers(tree: ast.Module, place: str) -> Iterator[Matcher]:
    """What a module looks for, by constants of the module too."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for found, is_regex, worded in matched_expressions(ast.walk(tree)):
        expression = constants.get(found.id, found) if isinstance(found, ast.Name) else found
        text = written(expression)
        if text is not None and re.search(r"[A-Za-z]{3}", text) and (worded or " " in text):
            yield Matcher(place, text, is_regex)


def sentences(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Texts of several words that a module may print, raise or record: no docstrings, and not what it looks for."""
    skipped: set[int] = set()
    for expression, *_ in matched_expressions(nodes):
        skipped |= {id(part) for part in ast.walk(expression)}
    for node in nodes:
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.expr) and id(node) not in skipped:
            text = written(node)
            if text and re.search(r"[A-Za-z]\S* \S*[A-Za-z]", text):
                yield text


@pytest.fixture(scope="module")
def own_sentences() -> set[str]:
    """All texts of Tridock, except the causes and remedies that rules show to users."""
    found = set[str]()
    for path in SOURCES:
        if "triage" not in path.parts:
            found |= set(sentences(nodes(path)))
    return found


def found_in(tree: ast.Module, place: str, own: set[str]) -> list[str]:
    return [
        f"{matcher.place}: {matcher.pattern!r} matches {text!r}"
        for matcher in matchers(tree, place)
        if matcher.pattern not in UPSTREAM
        for text in sorted(own)
        if matcher.finds(text)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_matches_tridocks_own_text(room: str, own_sentences: set[str]) -> None:
    found = [
        line
        for path in sorted((ROOT / "tridock" / room).rglob("*.py"))
        for line in found_in(parsed(path), str(path.relative_to(ROOT)), own_sentences)
    ]
    assert not found, "agree on a code, a field or an exit code in tridock/contracts:\n" + "\n".join(found)


def test_no_rule_about_upstream_matches_tridocks_own_text(own_sentences: set[str]) -> None:
    patterns = {rule.says.pattern for rule in RULES if rule.says is not None} - UPSTREAM.keys()
    found = [
        (pattern, text) for pattern in patterns for text in own_sentences if re.search(pattern, text, re.MULTILINE)
    ]
    assert patterns
    assert not found, "agree on a code, a field or an exit code in tridock/contracts"


@pytest.mark.parametrize(
    "source",
    [
        'Rule("x", says=regex(r"the loss is not finite"))',
        'failed = [line for line in lines if ": the run failed; " in line]',
        'RESTARTED = "tridock: restart "\ntext.rpartition(RESTARTED)',
        'MARK = "was killed by the kernel"\nif MARK in reason: pass',
        'if b"has not answered" in done.stderr: pass',
        'if said.startswith("the checkpoint could not be written"): pass',
        'import re\nre.search("ranks joined at (.+)", log)',
    ],
)
def test_a_match_of_own_text_is_found(source: str, own_sentences: set[str]) -> None:
    own = own_sentences | {"tridock: restart x of at most x", "x: the run failed; x"}
    assert found_in(ast.parse(source), "here", own)
