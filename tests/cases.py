"""The cases of a parametrized test that every change runs; the others are left to `make test-full`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], chosen: Collection[Any]) -> list[Any]:
    """Parameters of a test: the chosen cases always, the others in `make test-full`."""
    return [case if case in chosen else pytest.param(case, marks=pytest.mark.full) for case in cases]
