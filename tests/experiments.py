"""Experiments for tests: a base, and the fields in which a test differs from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tridock.experiment import Experiment
from tridock.plan import Plan, assess

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64},
    "batch": {"micro_batch_size": 2, "global_batch_size": 24},
    "data": {"data_path": "data/x"},
    "precision": "fp32",
    "train": {"train_iters": 3},
}
"""A GPT of engine torch for two ranks or more."""


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
