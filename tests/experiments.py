"""Experiments for tests: a base, and the fields in which a test differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tridock.experiment import Experiment
from tridock.plan import Plan, assess


def with_fields(base: Mapping[str, Any], fields: Mapping[str, Any]) -> Experiment:
    """The experiment of ``base`` with fields changed by their dotted names: ``{"train.seed": 7}``."""
    whole = dict(base)
    for dotted, value in fields.items():
        section, _, field = dotted.partition(".")
        whole[section] = whole.get(section, {}) | {field: value} if field else value
    return Experiment.model_validate(whole)


def make_plan(experiment: Experiment, slots: Mapping[str, Sequence[int]], source: str) -> Plan:
    """The plan, or the error that a user would see."""
    return assess(experiment, slots, source).checked()
