"""YAML 1.2: the values that text stands for, the text of values, and what is refused, with its place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import example, given, strategies

from tridock.errors import RequestError
from tridock.yaml_text import dump_yaml, parse_value, parse_yaml, shown


def refused(text: str) -> str:
    with pytest.raises(RequestError) as caught:
        parse_value(text, "e.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("+7", 7),
        ("-0", 0),
        ("12:48", "12:48"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("True", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("'null'", "null"),
        ("2026-01-02", "2026-01-02"),
        ("=", "="),
        ("!!str 010", "010"),
        ("!!int '3'", 3),
        ("!!float 3", 3.0),
        ("! 3", "3"),
        ("[a, [1, {b: ~}]]", ["a", [1, {"b": None}]]),
        ("- &a {x: 1}\n- *a\n", [{"x": 1}, {"x": 1}]),
        ("{1: a, ~: b}", {1: "a", None: "b"}),
    ],
)  # fmt: skip
def test_a_value_is_that_of_yaml_1_2(text: str, value: Any) -> None:
    assert repr(parse_value(text, "e.yaml")) == repr(value)


def test_merged_keys_yield_to_the_mappings_own_and_earlier_mappings_win() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\none: {<<: *a, x: 0}\nboth: {<<: [*a, *b]}\nplain: {'<<': 1}\n"
    found = parse_yaml(text, "e.yaml")
    assert found["one"] == {"x": 0, "y": 1}
    assert found["both"] == {"x": 1, "y": 1, "z": 2}
    assert found["plain"] == {"<<": 1}


def test_what_an_alias_repeats_is_not_shared() -> None:
    found = parse_value("[&a {x: [1]}, *a]", "e.yaml")
    found[0]["x"].append(2)
    assert found[1] == {"x": [1]}


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "e.yaml:3: the key stands twice; got 'a'; keep one of the two"),
        ("{a: &a [*a]}", "e.yaml:1:9: refers to no anchor; got *a; name an anchor that stands, complete, above it"),
        ("[*b]", "e.yaml:1:2: refers to no anchor; got *b; name an anchor that stands, complete, above it"),
        (BOMB, "e.yaml:5:35: has more than 50,000 values, those that aliases repeat included; remove some"),
        ("{a: {[1]: 2}}", "e.yaml:1:6: must be a plain value before the colon; got a list; write `name: value`"),
        ("? {a: b}\n: c", "e.yaml:1:3: must be a plain value before the colon; got a mapping; write `name: value`"),
        ("[" * 5000, "e.yaml:1:65: is nested deeper than 64 levels; remove levels"),
        ("a: " + "9" * 400, f"e.yaml:1:4: is a number of more than 64 bits; got {'9' * 40}… (400 characters); write a smaller one"),  # noqa: E501
        ("9223372036854775808", "e.yaml:1:1: is a number of more than 64 bits; got 9223372036854775808; write a smaller one"),  # noqa: E501
        ("{<<: 3}", "e.yaml:1:6: is no mapping, which << merges; got 3; name a mapping's anchor, as in `<<: *defaults`, or a list of them"),  # noqa: E501
        ("!!python/name:os.system x", "e.yaml:1:1: has a tag that does not fit its value; got !!python/name:os.system; leave the tag out"),  # noqa: E501
        ("!!int x", "e.yaml:1:1: has a tag that does not fit its value; got !!int; leave the tag out"),
        ("!!set {a}", "e.yaml:1:1: has a tag that does not fit its value; got !!set; leave the tag out"),
        ('"a\\0b"', "e.yaml:1:1: has a character that no text can have; got U+0000; remove it"),
        ('"\\ud800"', "e.yaml:1:1: has a character that no text can have; got U+D800; remove it"),
        ("a: 1\nb: \x1b[2J", "e.yaml:2: is not valid YAML; got character U+001B; remove it"),
        ("a\n---\nb", "e.yaml:2:1: begins a second document; got ---; keep one"),
        ("[1", "e.yaml:1:3: is not valid YAML; got expected ',' or ']', but got '<stream end>'; correct the syntax here"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_is_refused_is_named_with_its_place(text: str, message: str) -> None:
    assert refused(text) == message


JSON = strategies.recursive(
    strategies.none() | strategies.booleans() | strategies.integers(-(2**63) + 1, 2**63 - 1)
    | strategies.floats(allow_nan=False) | strategies.text(strategies.characters(exclude_categories=["Cs"], exclude_characters="\0"))  # noqa: E501
    | strategies.sampled_from(["1e-4", "0o17", "010", "12:48", "no", "~", "<<", "", "1_0", ".inf", "0x1F", "-.5e3", "=", "\x85", "\u2028x"]),  # noqa: E501
    lambda inner: strategies.lists(inner) | strategies.dictionaries(strategies.text("abc<~0o17.e-", max_size=4), inner),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
@example("\x85")
@example(["a\u2029"])
def test_what_is_written_is_read_as_the_same_by_yaml_1_2(value: Any) -> None:
    assert repr(parse_yaml(dump_yaml({"value": value}), "e.yaml")["value"]) == repr(value)


@given(JSON)
@example("\x85")
@example(["a\u2029"])
def test_what_is_written_is_read_as_the_same_by_yaml_1_1(value: Any) -> None:
    assert repr(yaml.safe_load(dump_yaml({"value": value}))["value"]) == repr(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        ("a\x1b", "'a\\x1b'"),
        ({"a": [None, False]}, "{'a': [null, false]}"),
        ("x" * 5000, f"'{'x' * 80}'… (5,000 characters)"),
        (list(range(50000)), "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...]"),
    ],
)
def test_a_value_is_shown_as_yaml_and_cut(value: Any, text: str) -> None:
    assert shown(value) == text
