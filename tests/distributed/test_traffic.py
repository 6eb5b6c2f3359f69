"""The plan's traffic is what the engines send: every collective and message of a step, rank by rank (exchanged.py)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.cases import thinned
from tests.distributed.ranks import ask, asked_for
from tridock.engines import cost_model_of
from tridock.engines.deepspeed import REUSED
from tridock.experiment import Experiment
from tridock.layout.shape import LayoutShape
from tridock.layout.traffic import all_gather, all_reduce

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
SMALL = 16  # bytes: norms, losses, counts and flags, of which the plan knows nothing
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, CP, SP = "virtual_pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel"
DISTRIBUTED = "use_distributed_optimizer"


Call = tuple[str, int, str, int]  # group, ranks, operation, bytes


class Case(NamedTuple):
    experiment: Experiment
    shape: LayoutShape

    @property
    def stages(self) -> int:
        return self.experiment.parallel.pipeline_model_parallel_size

    @property
    def world_size(self) -> int:
        parallel = self.experiment.parallel
        return parallel.tensor_model_parallel_size * parallel.context_parallel_size * self.stages * self.shape.data


def case(
    engine: str, data: int, steps: int, precision: str, model: Mapping[str, Any], parallel: Mapping[str, Any]
) -> Case:
    fields = {
        "name": "small",
        "engine": engine,
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 32,
            "vocab_size": 1000,
            "max_position_embeddings": 40,
            **model,
        },
        "parallel": dict(parallel),
        "batch": {"micro_batch_size": 2, "global_batch_size": 2 * data * steps},
        "data": {"data_path": "data/x"},
        "precision": precision,
        "train": {"train_iters": 2},
    }
    return Case(Experiment.model_validate(fields), LayoutShape(data=data, accumulation=steps, slots=64))


def full(method: str, layers: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


SELECTIVE = {"recompute_granularity": "selective"}
MODELS: dict[str, dict[str, Any]] = {
    "": {},
    "full": full("uniform", 1),
    "twos": full("uniform", 2),
    "block": full("block", 1),
    "selective": SELECTIVE,
}
QWEN3: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (1, {TP: 2}),
    "tp4": (1, {TP: 4}),
    "tp2-sp": (1, {TP: 2, SP: True}),
    "tp4-sp": (1, {TP: 4, SP: True}),
    "pp2": (1, {PP: 2}),
    "pp4": (1, {PP: 4}),
    "pp2-vpp2": (1, {PP: 2, VPP: 2}),
    "tp2-pp2-sp": (1, {TP: 2, PP: 2, SP: True}),
    "tp2-pp4-sp-dp2": (2, {TP: 2, PP: 4, SP: True}),
    "tp2-pp2-vpp2-sp": (1, {TP: 2, PP: 2, VPP: 2, SP: True}),
    "cp2": (1, {CP: 2}),
    "cp4": (1, {CP: 4}),
    "tp2-cp2-sp": (1, {TP: 2, CP: 2, SP: True}),
    "cp2-dp2-distributed": (2, {CP: 2, DISTRIBUTED: True}),
    "pp2-cp2": (1, {PP: 2, CP: 2}),
    "dp2": (2, {}),
    "dp4": (4, {}),
    "dp2-distributed": (2, {DISTRIBUTED: True}),
    "dp4-distributed": (4, {DISTRIBUTED: True}),
    "tp2-pp2-dp2": (2, {TP: 2, PP: 2}),
    "tp2-pp2-dp2-distributed": (2, {TP: 2, PP: 2, DISTRIBUTED: True}),
}


def megatron_core_cases() -> Iterator[tuple[str, Case]]:
    for (layout, (data, parallel)), (steps, precision) in product(LAYOUTS.items(), ((1, "fp32"), (4, "bf16"))):
        if steps >= parallel.get(VPP, 1):  # an interleaved pipeline takes micro batches by its stages
            name = f"{layout}-{steps}-{precision}"
            yield name, case("megatron-core", data, steps, precision, {}, parallel)
    for layout, again in product(("tp2", "tp2-sp", "cp2", "tp2-pp2-dp2", "pp2-vpp2"), list(MODELS)[1:]):
        model, (data, parallel) = MODELS[again], LAYOUTS[layout]
        if again != "twos" or parallel.get(VPP, 1) == 1:  # which has a layer a run
            yield f"{layout}-{again}", case("megatron-core", data, 4, "bf16", model, parallel)
    for layout in ("tp2", "tp2-sp", "tp4", "cp2", "tp2-pp2-dp2"):
        data, parallel = LAYOUTS[layout]
        yield f"{layout}-qwen3", case("megatron-core", data, 4, "bf16", QWEN3, parallel)


WIDE = {"num_layers": 1, "hidden_size": 384}  # ZeRO 3 shares out tensors of 1e5 elements and more


def torch_cases() -> Iterator[tuple[str, Case]]:
    for data, precision, steps in ((2, "fp32", 1), (2, "bf16", 3), (4, "fp32", 1)):
        name = f"ddp-dp{data}-{precision}-{steps}"
        yield name, case("torch", data, steps, precision, WIDE, {"strategy": "ddp"})
    for stage, (data, precision, steps) in product(range(4), ((2, "fp32", 1), (4, "bf16", 3))):
        name = f"zero{stage}-dp{data}-{precision}-{steps}"
        yield name, case("torch", data, steps, precision, WIDE, {"strategy": "zero", "zero_stage": stage})


MEGATRON_CORE, TORCH = dict(megatron_core_cases()), dict(torch_cases())
# A quarter of them, with each strategy and stage; the others in `make test-full`.
SOME = {name for cases in (MEGATRON_CORE, TORCH) for number, name in enumerate(cases) if number % 4 == 0}


def exchanged(engine: str, cases: Sequence[Case], **env: str) -> list[list[list[Call]]]:
    """What a rank of each stage of each case says."""
    asked = []
    for one in cases:
        fields = json.loads(one.experiment.model_dump_json())
        per_stage = one.world_size // one.stages
        asked += [[fields, one.world_size, stage * per_stage] for stage in range(one.stages)]
    lines = ask(["exchanged", engine], "megatron-core" if engine == "megatron-core" else "deepspeed", asked, **env)
    answers = iter([json.loads(line) for line in lines if line.startswith("[")])
    return [[next(answers) for _ in range(one.stages)] for one in cases]


Volumes = dict[tuple[str, int], float]  # by the group's name and size


def sent(calls: Sequence[Call], stages: int) -> Volumes:
    """Bytes that a rank sends in each group of more than one, by rings as the plan counts."""
    found: defaultdict[tuple[str, int], float] = defaultdict(float)
    for group, size, operation, volume in calls:
        if size == 1 or volume <= SMALL or operation in ("recv_", "broadcast_"):
            continue  # DeepSpeed sends its ranks the numbers of its weights, to compare
        if operation == "send":
            assert group in ("pipeline", "world"), group
            found["pipeline", stages] += volume
        elif operation.startswith("allreduce"):
            found[group, size] += all_reduce(size, volume)
        else:
            assert "gather" in operation or "reduce_scatter" in operation, operation
            found[group, size] += all_gather(size, volume)
    return dict(found)


def planned(one: Case, stage: int) -> Volumes:
    found = cost_model_of(one.experiment).traffic_of_stage(one.experiment, one.shape, stage)
    return {(group.group, group.size): group.bytes_per_rank for group in found}


@pytest.fixture(scope="module")
def of_megatron_core(request: pytest.FixtureRequest) -> dict[str, list[list[Call]]]:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    cases = asked_for(request, MEGATRON_CORE, SOME)
    return dict(zip(cases, exchanged("megatron-core", list(cases.values())), strict=True))


@pytest.mark.parametrize("name", thinned(MEGATRON_CORE, SOME))
def test_megatron_core(name: str, of_megatron_core: dict[str, list[list[Call]]]) -> None:
    one = MEGATRON_CORE[name]
    found = [sent(answer, one.stages) for answer in of_megatron_core[name]]
    for stage, volumes in enumerate(found):
        # Gradients are reduced in buffers, whose ends are padded to multiples of a few hundred elements.
        assert volumes == pytest.approx(planned(one, stage), rel=2e-3), stage
    busiest = {
        (group.group, group.size): group.bytes_per_rank
        for group in cost_model_of(one.experiment).traffic(one.experiment, one.shape)
    }
    most = {place: max(volumes.get(place, 0.0) for volumes in found) for volumes in found for place in volumes}
    assert most == pytest.approx(busiest, rel=2e-3)


@pytest.fixture(scope="module")
def of_torch(request: pytest.FixtureRequest) -> dict[str, list[list[Call]]]:
    pytest.importorskip("deepspeed")
    cases = asked_for(request, TORCH, SOME)
    return dict(zip(cases, exchanged("torch", list(cases.values())), strict=True))


@pytest.mark.parametrize("name", thinned(TORCH, SOME))
def test_torch(name: str, of_torch: dict[str, list[list[Call]]]) -> None:
    one = TORCH[name]
    (answer,) = of_torch[name]
    # ZeRO 3 keeps small tensors, here a part in sixty, and gathers them once.
    near = 0.02 if one.experiment.parallel.zero_stage == 3 else 2e-3
    assert sent(answer, 1) == pytest.approx(planned(one, 0), rel=near)


def test_freed_weights_are_gathered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another reuse distance than DeepSpeed's, which takes a model of more than 5e8 weights to see."""
    assert REUSED == 1_000_000_000
    monkeypatch.setattr("tridock.engines.deepspeed.REUSED", 0)
    one = case("torch", 2, 2, "fp32", WIDE, {"strategy": "zero", "zero_stage": 3})
    ((answer,),) = exchanged("torch", [one], LET_GO="1")
    assert sent(answer, 1) == pytest.approx(planned(one, 0), rel=0.02)
