"""The plan's traffic is what ranks of Megatron-LM v1.1.5 send, in an iteration of a run."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import Started
from tests.distributed.test_megatron_v115 import PP, TP, ZERO, experiment
from tests.experiments import make_plan
from tridock.data.corpus import prepare_demo
from tridock.engines import cost_model_of, rank_program
from tridock.experiment import dump_experiment
from tridock.layout.shape import LayoutShape
from tridock.layout.traffic import all_gather, all_reduce

pytestmark = pytest.mark.distributed

TOKENS = 500
AGAIN = {"model.checkpoint_activations": True, "model.partition_activations": True, "model.checkpoint_num_layers": 2}
FP16 = {"precision": "fp16"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"parallel.strategy": "ddp", "batch.micro_batch_size": 4}),
    "zero2": (2, {ZERO: 2, **FP16}),
    "tp2-again": (2, {TP: 2, **AGAIN}),
    "pp3": (3, {PP: 3}),
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "pp2-zero1": (4, {PP: 2, ZERO: 1, **FP16}),
}


@pytest.fixture(scope="module")
def workspace(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    prepare_demo(folder / "data" / "demo", vocab_size=TOKENS, report=lambda _: None, corpus_bytes=300_000)
    return folder


def sent(calls: list[tuple[int, str, int]]) -> dict[str, float]:
    """Bytes by kind: messages and collectives, in groups of more than one.

    Without what the plan leaves out: the batch and scalars, which are broadcast; norms, counts and shapes.
    """
    found: defaultdict[str, float] = defaultdict(float)
    for size, operation, volume in calls:
        if size == 1 or volume <= 72 or operation in ("recv_", "broadcast_"):
            continue
        if operation == "send":
            found["messages"] += volume
        else:
            found["collectives"] += (all_reduce if operation == "allreduce_" else all_gather)(size, volume)
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_megatron_v115(name: str, workspace: Path, source: Path) -> None:
    world, fields = CASES[name]
    given = experiment(
        **{
            "batch.micro_batch_size": 2,
            **fields,
            "train.train_iters": 4,
            "train.eval_interval": 0,
            "optimizer.lr_warmup_iters": 0,
        },
    )
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    plan = make_plan(given, {"localhost": range(world)}, name)
    resolved = given.resolved(plan.data_parallel_size)
    program = rank_program(resolved, plan, name, str(folder))
    (folder / "experiment.yaml").write_text(dump_experiment(resolved))
    for file, content in program.files.items():
        (folder / file).write_bytes(content)
    env = {**program.env, "TRIDOCK_MEGATRON": str(source)}
    with Started(["-m", "tests.distributed.recorded_v115", *program.arguments], folder, world, env) as started:
        finished = started.wait()
    assert finished.codes == [0] * world, finished.out[0][-5000:]

    model = resolved.model.model_copy(update={"vocab_size": TOKENS})
    steps = (given.batch.global_batch_size or 0) // (given.batch.micro_batch_size * plan.data_parallel_size)
    shape, stages = LayoutShape(plan.data_parallel_size, steps, world), resolved.parallel.pipeline_model_parallel_size
    for rank in range(world):
        planned: defaultdict[str, float] = defaultdict(float)
        given = resolved.model_copy(update={"model": model})
        for one in cost_model_of(given).traffic_of_stage(given, shape, rank * stages // world):
            planned["messages" if one.group == "pipeline" else "collectives"] += one.bytes_per_rank
        # ZeRO leaves out the gradient of the positions that a last stage has no use for.
        near = 0.02 if resolved.parallel.zero_stage == 1 and stages > 1 else 1e-3
        found = sent(json.loads((folder / f"exchanged-{rank}.json").read_text()))
        assert found == pytest.approx(dict(planned), rel=near), rank
