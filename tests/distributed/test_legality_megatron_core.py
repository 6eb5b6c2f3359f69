"""What the plan says of an experiment is what megatron-core does with it, in hundreds of layouts.

Each is built and trained one step on the first and the last rank of a pretended world (``pretended.py``).
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.distributed.ranks import rank_environment
from tridock.experiment import Experiment
from tridock.plan.legality import layout_problems

pytest.importorskip("torch")
pytest.importorskip("megatron.core", exc_type=ImportError)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
ACCEPTED, REFUSED = 200, 30  # cases of the sizes that the plan takes, and of each of its reasons against the others


class Case(NamedTuple):
    fields: dict[str, Any]
    world_size: int

    def reasons(self) -> list[str]:
        """Of the plan: fields and rules, with ``#`` for each number."""
        problems = layout_problems(Experiment.model_validate_json(json.dumps(self.fields)), self.world_size)
        return [re.sub(r"\d+", "#", f"{problem.where}: {problem.what}") for problem in problems]


def case(world_size: int, model: dict[str, Any], parallel: dict[str, Any], **others: Any) -> Case:
    base = {"num_layers": 4, "hidden_size": 12, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 20}
    fields = {
        "name": "small",
        "engine": "megatron-core",
        "model": {**base, "make_vocab_size_divisible_by": 4, **model},
        "parallel": parallel,
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/x"},
        "precision": "fp32",
        "train": {"train_iters": 2},
        **others,
    }
    return Case(fields, world_size)


def sizes() -> Iterator[Case]:
    """Every combination of small sizes, in a world of one or two replicas, or one rank more than fits."""
    chance = random.Random(1)
    parallel = product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2), (1, 2), (False, True))
    for layers, heads, (tensor, stages, virtual, context, sequence), steps in product(
        (2, 3, 4, 6, 8), (2, 3, 4, 5), list(parallel), (1, 2, 3, 4)
    ):
        replicas, over = chance.choice((1, 2)), chance.choice((0, 0, 0, 1))
        model = {"num_layers": layers, "num_attention_heads": heads, "seq_length": chance.choice((6, 7, 8, 10, 12, 24))}
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        layout = {
            **dict(zip(names, (tensor, stages, virtual), strict=True)),
            "context_parallel_size": context,
            "sequence_parallel": sequence,
        }
        micro = chance.choice((1, 2))
        batch = {"micro_batch_size": micro, "global_batch_size": micro * replicas * steps + chance.choice((0, 0, 0, 1))}
        yield case(tensor * stages * context * replicas + over, model, layout, batch=batch)


def chosen(cases: Iterator[Case]) -> list[tuple[Case, bool]]:
    """So many that the plan takes, and so many for each of its reasons where that is the only one."""
    kinds: defaultdict[str, list[Case]] = defaultdict(list)
    for found in cases:
        reasons = found.reasons()
        if len(reasons) < 2:
            kinds["".join(reasons)].append(found)
    chance = random.Random(2)
    return [
        (found, not reason)
        for reason, members in sorted(kinds.items())
        for found in chance.sample(members, min(len(members), REFUSED if reason else ACCEPTED))
    ]


def outcomes(cases: Sequence[Case]) -> list[list[str]]:
    """What becomes of each case on its first and on its last rank."""
    ranks = [sorted({0, case.world_size - 1}) for case in cases]
    asked = [[*case, rank] for case, places in zip(cases, ranks, strict=True) for rank in places]
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.pretended"],
        input="".join(json.dumps(line) + "\n" for line in asked),
        env=rank_environment() | {"DS_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = iter([json.loads(line) for line in done.stdout.splitlines()])
    return [[next(answers) for _ in places] for places in ranks]


def agree(cases: Sequence[tuple[Case, bool]]) -> None:
    found = outcomes([one for one, _ in cases])
    for (one, accepted), outcome in zip(cases, found, strict=True):
        runs = all(word == "runs" for word in outcome)
        assert runs == accepted, f"{one}: the plan says {one.reasons() or 'it runs'}, the engine {outcome}"


def test_sizes() -> None:
    cases = chosen(sizes())
    reasons = {reason for one, _ in cases for reason in one.reasons()}
    assert len(reasons) == 13, reasons
    assert len(cases) > 300
    agree(cases)


def test_recomputation() -> None:
    methods = product(("full", "selective"), (None, "uniform", "block"), (None, 1, 2, 3, 4, 5, 6))
    layouts = [(1, 1, 6), (2, 1, 6), (2, 2, 4)]
    cases = []
    for (granularity, method, number), (stages, virtual, layers) in product(methods, layouts):
        if granularity == "selective" and method is not None:
            continue  # the engine takes the method then, and does nothing with it
        model = {"num_layers": layers, "recompute_method": method, "recompute_num_layers": number}
        parallel = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": virtual}
        batch = {"micro_batch_size": 1, "global_batch_size": 2}
        one = case(stages, {**model, "recompute_granularity": granularity}, parallel, batch=batch)
        cases.append((one, not one.reasons()))
    assert {accepted for _, accepted in cases} == {False, True}
    agree(cases)


def test_formats_optimizers_and_the_smallest_models() -> None:
    cases = []
    for precision, optimizer, data, tensor in product(("fp32", "bf16", "fp16"), (False, True), (1, 2), (1, 2)):
        parallel = {"use_distributed_optimizer": optimizer, "tensor_model_parallel_size": tensor}
        cases.append(case(data * tensor, {}, parallel, precision=precision))
    for positions, length in product((1, 7, 8, 9), (1, 7, 8, 9)):
        cases.append(case(1, {"max_position_embeddings": positions, "seq_length": length}, {}))
    cases.append(case(1, {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1}, {}))
    cases.append(case(4, {"vocab_size": 1, "make_vocab_size_divisible_by": 1}, {"tensor_model_parallel_size": 4}))
    agree([(one, not one.reasons()) for one in cases])


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_the_schedule_is_one_of_megatrons(style: str) -> None:
    scheduler: Any = pytest.importorskip("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    for warmup, decay, iterations, peak, least in product(
        (0, 1, 4, 5), (None, 1, 5), (1, 5), (1e-3, 1e-5), (0.0, 1e-4)
    ):
        settings = {"lr_warmup_iters": warmup, "lr_decay_iters": decay, "lr": peak, "min_lr": least}
        one = case(1, {}, {}, optimizer={**settings, "lr_decay_style": style}, train={"train_iters": iterations})
        try:
            scheduler(
                SimpleNamespace(param_groups=[]),
                0.0,
                peak,
                least,
                warmup,
                decay or iterations,
                style,
                0.0,
                0.0,
                1,
                "constant",
            )
        except AssertionError:
            assert one.reasons(), one
        else:
            assert not one.reasons(), one
