"""Documents compared field by field."""

from hypothesis import given
from hypothesis import strategies as st

from tridock.differences import Difference, differences

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_fields_that_differ_in_the_order_in_which_they_come_up() -> None:
    first = {"image": "a", "seed": 1, "data": {"x": "00", "y": "11"}, "gone": True, "run_id": "r1"}
    second = {"image": "b", "seed": 1, "data": {"x": "00", "y": "22"}, "new": None, "run_id": "r2"}
    assert differences([first, second], ["run_id"]) == [
        Difference("image", ("a", "b")),
        Difference("data.y", ("11", "22")),
        Difference("gone", ("true", "-")),
        Difference("new", ("-", "null")),
    ]


def test_a_section_is_ignored_with_all_that_is_in_it() -> None:
    assert differences([{"a": {"b": 1, "c": {"d": 1}}, "ab": 1}, {"a": {"b": 2}, "ab": 1}], ["a"]) == []


def test_numbers_and_lists() -> None:
    assert differences([{"lr": 1.0, "n": [1, 2]}, {"lr": 1, "n": [1, 2]}]) == []
    assert differences([{"on": True, "n": [1, 2]}, {"on": 1, "n": [2, 1]}]) == [
        Difference("on", ("true", "1")),
        Difference("n", ("[1, 2]", "[2, 1]")),
    ]


def test_an_empty_section_is_a_value() -> None:
    assert differences([{"a": {}}, {"a": {"b": 1}}]) == [Difference("a", ("{}", "-")), Difference("a.b", ("-", "1"))]


def test_three_documents() -> None:
    assert differences([{"a": 1}, {"a": 1}, {"a": 2}]) == [Difference("a", ("1", "1", "2"))]


@given(document=st.dictionaries(st.text(max_size=3), documents, max_size=4), other=documents)
def test_the_same_document_does_not_differ_and_a_new_field_does(document: dict[str, object], other: object) -> None:
    assert differences([document, document, dict(reversed(document.items()))]) == []
    new = {**document, "a field of its own": [other]}
    assert [it.field for it in differences([document, new])] == ["a field of its own"]
