"""Cases that compare the plan's verdict with an engine's own."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from tests.distributed.ranks import ask
from tridock.experiment import Experiment
from tridock.plan.legality import layout_problems


class Case(NamedTuple):
    """An experiment on so many ranks."""

    fields: dict[str, Any]
    world_size: int

    def reasons(self) -> list[str]:
        """Of the plan: fields and rules, with ``#`` for each number."""
        problems = layout_problems(Experiment.model_validate_json(json.dumps(self.fields)), self.world_size)
        return [re.sub(r"\d+", "#", f"{problem.where}: {problem.what}") for problem in problems]


def case(engine: str, world_size: int, model: dict[str, Any], parallel: dict[str, Any], **others: Any) -> Case:
    """A small experiment with these fields."""
    base = {"num_layers": 4, "hidden_size": 12, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 20}
    fields = {
        "name": "small",
        "engine": engine,
        "model": {**base, "make_vocab_size_divisible_by": 4, **model},
        "parallel": parallel,
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/x", "vocab_file": "vocab.json", "merge_file": "merges.txt"},
        "precision": "fp32",
        "train": {"train_iters": 1, "log_interval": 1, "save": False, "tensorboard": False},
        **others,
    }
    return Case(fields, world_size)


def batch(chance: random.Random, replicas: int, steps: int) -> dict[str, int]:
    """So many micro-batches a replica, and once in a while a sample too many."""
    micro = chance.choice((1, 2))
    return {"micro_batch_size": micro, "global_batch_size": micro * replicas * steps + chance.choice((0, 0, 0, 1))}


def chosen(cases: Iterable[Case], accepted: int, refused: int) -> list[Case]:
    """So many that the plan takes, and so many for each of its reasons where that is the only one."""
    kinds: defaultdict[str, list[Case]] = defaultdict(list)
    for found in cases:
        reasons = found.reasons()
        if len(reasons) < 2:
            kinds["".join(reasons)].append(found)
    chance = random.Random(2)
    return [
        found
        for reason, members in sorted(kinds.items())
        for found in chance.sample(members, min(len(members), refused if reason else accepted))
    ]


def reasons_in(cases: Iterable[Case]) -> set[str]:
    """All reasons of the plan against any of them."""
    return {reason for found in cases for reason in found.reasons()}


def outcomes(cases: Sequence[Case], *program: str) -> list[str]:
    """What becomes of each case in a program of ``tests.distributed``: ``runs``, or why not."""
    imports = "megatron-core" if cases[0].fields["engine"] == "megatron-core" else "deepspeed"
    return [json.loads(line) for line in ask(program, imports, cases)]


def agree(cases: Sequence[Case], *program: str) -> None:
    """The plan takes those that run and no others."""
    differences = []
    for found, outcome in zip(cases, outcomes(cases, *program), strict=True):
        if (outcome == "runs") != (not found.reasons()):
            differences.append(f"{found}: the plan says {found.reasons() or 'it runs'}, the engine {outcome}")
    assert not differences, "\n".join(differences)
