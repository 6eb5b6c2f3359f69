"""A line becomes the texts of a document, or one whole sentence about what is wrong with it."""

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridock.data.input.documents import form_of, parse
from tridock.data.input.sources import Kind

JSON = "is not valid JSON"


@pytest.mark.parametrize(
    ("line", "what", "got"),
    [
        (b"{broken", JSON, "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b'{"text": "a"} {"text": "b"}', JSON, "Extra data: line 1 column 15 (char 14)"),
        (b"", "is blank", ""),
        (b" \t\r", "is blank", ""),
        (b'\xef\xbb\xbf{"text": "a"}', "begins with a byte order mark", "EF BB BF"),
        (b'{"text": "a\xff"}', "is not UTF-8", "byte 0xff at column 12"),
        (b"[1]", "is not a JSON object", "[1]"),
        (b'{"body": "a", "aa": 1}', "has no key 'text'", "the keys aa, body"),
        (b"{}", "has no key 'text'", "the keys (none)"),
        (b'{"text": null}', "has no text under 'text'", "null"),
        (b'{"text": {"a": {"b": 1}}}', "has no text under 'text'", '{"a": {"b": 1}}'),
        (b'{"text": ["a", ' + b"1" * 99 + b"]}", "has no text under 'text'", '["a", ' + "1" * 51 + "..."),
        (b'{"text": "a", "text": "b"}', "has the key text more than once", '["a", "b"]'),
        (b'{"text": "a", "te\\u0078t": {"c": 1}}', "has the key text more than once", '["a", {"c": 1}]'),
        (
            b'{"text": "a\\ud800"}',
            "contains a lone surrogate, which is not a character",
            "U+D800 at character 2",
        ),
        (b"[" * 200_000, "is nested too deep", ""),
    ],
)
def test_a_line_that_is_no_document(line: bytes, what: str, got: str) -> None:
    data = b'{"text": "fine"}\n' + line + b'\n{"text": "too"}\n'
    found = parse(data, ["text"], Kind.JSONL)
    assert [(r.line, r.what, r.got, r.data) for r in found.rejected_lines] == [(1, what, got, line)]
    assert (found.texts, found.counts) == ([["fine", "too"]], [[1, 1]])


def test_a_deeply_nested_value_is_no_text() -> None:
    (rejected,) = parse(b'{"text": ' + b"[" * 600 + b"]" * 600 + b"}", ["text"], Kind.JSONL).rejected_lines
    assert rejected.what == "has no text under 'text'"


def test_the_message_and_its_remedy() -> None:
    refused = parse(b"1\n", ["a", "b"], Kind.JSONL).rejected_lines[0]
    assert str(refused.problem("x.jsonl", 7, form_of(["a", "b"], Kind.JSONL))) == (
        "x.jsonl:7: is not a JSON object; got 1; correct or remove the line, or skip such lines with --on-error skip "
        '--rejects FILE; each is one object such as {"a": "…", "b": "…"}'
    )
    assert form_of(["text"], Kind.TEXT) == ""


def test_several_keys_and_lists_of_texts() -> None:
    data = '{"a": ["x", "", "ž"], "b": "y", "n": NaN}\n{"a": [], "b": [""]}'.encode()
    found = parse(data, ["a", "b"], Kind.JSONL)
    assert (found.texts, found.counts, found.rejected_lines) == ([["x", "", "ž"], ["y", ""]], [[3, 0], [1, 1]], [])


def test_a_document_that_lacks_one_key_leaves_nothing_under_the_other() -> None:
    found = parse(b'{"a": "x"}\n', ["a", "b"], Kind.JSONL)
    assert (found.texts, found.counts, len(found.rejected_lines)) == ([[], []], [[], []], 1)


def test_lines_of_text() -> None:
    found = parse("a b\r\n\n\xa0ž\u2028c".encode(), ["text"], Kind.TEXT)
    assert (found.texts, found.counts) == ([["a b", "", "\xa0ž\u2028c"]], [[1, 1, 1]])
    refused = parse(b"a\xc3\n\xef\xbb\xbfb\n", ["text"], Kind.TEXT).rejected_lines
    assert [(r.line, r.what) for r in refused] == [(0, "is not UTF-8"), (1, "begins with a byte order mark")]


VALUES = st.recursive(
    st.one_of(st.text(max_size=5), st.integers(), st.floats(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)
PAIRS = st.lists(st.tuples(st.sampled_from(["text", "te", "other", "\u017e", ""]), VALUES), max_size=4)


@settings(max_examples=300, deadline=None)
@given(PAIRS, st.booleans(), st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=2))
def test_the_quick_parser_changes_nothing(
    pairs: list[tuple[str, object]], escaped: bool, damage: list[tuple[int, int]]
) -> None:
    """Well-formed lines and lines with bytes overwritten: what Python's own parser says of them."""
    parts = (f"{json.dumps(k, ensure_ascii=escaped)}: {json.dumps(v, ensure_ascii=escaped)}" for k, v in pairs)
    line = bytearray(f"{{{', '.join(parts)}}}".encode("utf-8", "surrogatepass"))
    for place, byte in damage:
        line[place % len(line)] = byte
    quick = parse(bytes(line), ["text"], Kind.JSONL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "simdjson", None)
        assert parse(bytes(line), ["text"], Kind.JSONL) == quick


@given(st.lists(st.text()), st.booleans())
def test_every_text_arrives(texts: list[str], escaped: bool) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=escaped) + "\n" for text in texts]
    found = parse("".join(lines).encode("utf-8", "surrogatepass"), ["text"], Kind.JSONL)
    assert found.texts == [texts]
    assert found.rejected_lines == []
