"""pydantic's findings as Tridock's messages, for models of every shape; the loaders' own tests have the rest."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tridock.errors import RequestError
from tridock.strict_yaml import validated


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int = 0


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    optional: Inner | None = None
    mapping: dict[str, Inner] = Field(default_factory=dict)
    sequence: list[Inner] = Field(default_factory=list)
    rows: tuple[Inner, ...] = ()
    deep: dict[str, list[Annotated[Inner, Field()] | None]] | None = None


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"optional": {"siz": 1}}, "optional.siz"),
        ({"mapping": {"size": {"siz": 1}}}, "mapping.size.siz"),
        ({"sequence": [{}, {"siz": 1}]}, "sequence.1.siz"),
        ({"rows": [{"siz": 1}]}, "rows.0.siz"),
        ({"deep": {"a": [None, {"siz": 1}]}}, "deep.a.1.siz"),
    ],
)
def test_an_unknown_field_is_told_the_nearest_one(value: dict[str, object], place: str) -> None:
    with pytest.raises(RequestError) as caught:
        validated(Outer, value, "f.yaml")
    assert [str(problem) for problem in caught.value.problems] == [
        f"f.yaml: {place}: is not a field; got 1; did you mean size?"
    ]
