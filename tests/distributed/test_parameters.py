"""The plan's number of weights is what the engines build, to the weight, on every rank."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed.ranks import ask
from tests.experiments import make_plan
from tridock.engines import cost_model_of, rank_program
from tridock.experiment import Experiment
from tridock.experiment.parameters import model_parameters
from tridock.plan.legality import layout_problems

pytest.importorskip("torch")

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
VPP = "virtual_pipeline_model_parallel_size"


class Case(NamedTuple):
    experiment: Experiment
    world_size: int

    @property
    def stages(self) -> int:
        return self.experiment.parallel.pipeline_model_parallel_size

    def stage(self, rank: int) -> int:
        return rank * self.stages // self.world_size


def case(engine: str, model: dict[str, Any], parallel: dict[str, Any], data: int = 1) -> Case:
    fields: dict[str, Any] = {
        "name": "small",
        "engine": engine,
        "model": model,
        "parallel": parallel,
        "batch": {"micro_batch_size": 1, "global_batch_size": data * parallel.get(PP, 1)},
        "data": {"data_path": "data/x", "vocab_file": "vocab.json", "merge_file": "merges.txt"},
        "precision": "fp32",
        "train": {"train_iters": 2},
    }
    if engine != "megatron-deepspeed":
        fields["data"] = {"data_path": "data/x"}
    world = parallel.get(TP, 1) * parallel.get(PP, 1) * parallel.get(CP, 1) * data
    return Case(Experiment.model_validate(fields), world)


KINDS: list[dict[str, Any]] = [
    {},
    {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False},
    {"swiglu": True, "qk_layernorm": True, "untie_embeddings_and_output_weights": True},
    {"normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True, "qk_layernorm": True},
    {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "add_attention_bias": True},
    {"normalization": "RMSNorm", "qk_layernorm": True, "qk_layernorm_all_heads": True, "use_post_norm": True},
    {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "ffn_hidden_size": 24},
]
"""GPT-2's layers, Llama's, and mixtures."""


def models(chance: random.Random) -> Iterator[dict[str, Any]]:
    """Every combination of layers, widths and vocabularies, with positions and kinds more or less at random."""
    for layers, (width, heads, head), tokens, multiple in product(
        (1, 2, 3, 4, 6, 8, 12),
        ((4, 4, None), (12, 4, None), (18, 4, 7), (48, 12, None)),
        (1, 17, 96, 1001),
        (1, 5, 8, 128),
    ):
        yield {
            "num_layers": layers,
            "hidden_size": width,
            "num_attention_heads": heads,
            "kv_channels": head,
            "seq_length": 8,
            "vocab_size": tokens,
            "make_vocab_size_divisible_by": multiple,
            "max_position_embeddings": chance.choice((None, 8, 9, 33)),
            **(kind := chance.choice(KINDS)),
            "num_query_groups": chance.choice((None, heads // 2)) if kind else None,
            **({"kv_channels": 2 * (head or 2)} if "position_embedding_type" in kind else {}),
        }


def megatron_core_cases(of_each: int) -> list[Case]:
    """So many of each layout, of those that the plan takes."""
    chance = random.Random(3)
    kinds: dict[tuple[int, ...], list[Case]] = {}
    for model, layout in product(models(chance), product((1, 2, 4), (1, 2, 3, 4), (1, 2), (1, 2))):
        one = case("megatron-core", model, dict(zip((TP, PP, VPP, CP), layout, strict=True)))
        if one.world_size <= 16 and not layout_problems(one.experiment, one.world_size):
            kinds.setdefault(layout, []).append(one)
    return [one for members in kinds.values() for one in chance.sample(members, min(len(members), of_each))]


def unequal_cases() -> Iterator[Case]:
    """Own numbers of layers of the first and the last stage."""
    numbers = product((3, 4), (1, 2), (None, 2, 4), (None, 2, 6))
    for (stages, virtual, first, last), kind in product(numbers, KINDS[:2]):
        model = {
            "num_layers": 12,
            "hidden_size": 12,
            "num_attention_heads": 4,
            "seq_length": 8,
            "vocab_size": 96,
            **kind,
        }
        own = {"decoder_first_pipeline_num_layers": first, "decoder_last_pipeline_num_layers": last}
        one = case("megatron-core", model, {PP: stages, VPP: virtual, **own})
        if not layout_problems(one.experiment, one.world_size):
            yield one


def mixture_cases() -> Iterator[Case]:
    """Expert parallelism, with whole experts and with experts split by tensor parallelism."""
    sizes = {"num_layers": 4, "hidden_size": 12, "num_attention_heads": 4, "seq_length": 8, "vocab_size": 96}
    kinds = ({"add_bias_linear": False}, KINDS[1])
    names = (TP, PP, CP, "expert_model_parallel_size", "expert_tensor_parallel_size")
    layouts = product((1, 2), (1, 2), (1, 2), (1, 2, 4), (None, 1, 2))
    for layout, kind, ffn in product(layouts, kinds, (None, 20)):
        parallel = {**dict(zip(names, layout, strict=True)), "sequence_parallel": layout[0] > 1}
        shared = None if ffn is None else 12
        model = {**sizes, **kind, "num_moe_experts": 8, "moe_ffn_hidden_size": ffn}
        model |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": shared is not None}
        one = case("megatron-core", model, parallel, data=2)
        if not layout_problems(one.experiment, one.world_size):
            yield one


def counted(engine: str, cases: Sequence[Case], arguments: Sequence[Sequence[str]], **env: str) -> list[list[int]]:
    """The weights of every rank of each case."""
    imports = "megatron-core" if engine == "megatron-core" else "deepspeed"
    asked = [
        [json.loads(one.experiment.model_dump_json()), one.world_size, rank, list(given)]
        for one, given in zip(cases, arguments, strict=True)
        for rank in range(one.world_size)
    ]
    answers = iter([int(line) for line in ask(["counted", engine], imports, asked, **env)])
    return [[next(answers) for _ in range(one.world_size)] for one in cases]


def agree(cases: Sequence[Case], found: Sequence[Sequence[int]]) -> None:
    for one, weights in zip(cases, found, strict=True):
        model, stages = cost_model_of(one.experiment), map(one.stage, range(one.world_size))
        planned = [model.parameters(one.experiment, stage).total for stage in stages]
        assert list(weights) == planned, one
        if one.world_size == 1:
            rows = model.rules.rows_of_vocabulary(one.experiment)
            assert weights[0] == model_parameters(one.experiment.model, rows), one


@pytest.mark.parametrize(("of_each", "least"), [(1, 20), pytest.param(3, 60, marks=pytest.mark.full)])
def test_megatron_core(of_each: int, least: int) -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    cases = megatron_core_cases(of_each)
    assert len(cases) > least
    assert {one.world_size for one in cases} >= {1, 2, 3, 4, 6, 8, 12, 16}
    agree(cases, counted("megatron-core", cases, [()] * len(cases)))


def test_unequal_stages() -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    cases = list(unequal_cases())[::2]
    assert len(cases) > 8
    agree(cases, counted("megatron-core", cases, [()] * len(cases)))


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.full)])
def test_mixtures_of_experts(every: int) -> None:
    pytest.importorskip("megatron.core", exc_type=ImportError)
    cases = list(mixture_cases())[::every]
    assert len(cases) > 50 / every
    agree(cases, counted("megatron-core", cases, [()] * len(cases)))


def test_torch() -> None:
    from tridock.train.models.gpt import GPT, Shape

    for model in models(random.Random(4)):
        one = case("torch", model, {"strategy": "ddp"})
        built = GPT(Shape.of(one.experiment.model, model["vocab_size"]))
        agree([one], [[sum(weight.numel() for weight in built.parameters())]])


def vocabulary(folder: Path, tokens: int) -> tuple[str, str]:
    """Files of a GPT-2 tokenizer with so many tokens."""
    names, merges = folder / f"vocab-{tokens}.json", folder / "merges.txt"
    names.write_text(json.dumps({"<|endoftext|>": 0} | {f"token{number}": number for number in range(1, tokens)}))
    merges.write_text("#version: 0.2\n")
    return str(names), str(merges)


V115_LAYOUTS: list[tuple[dict[str, Any], int]] = [
    ({"strategy": "ddp"}, 1),
    ({"strategy": "ddp", TP: 2}, 1),
    ({"strategy": "zero"}, 2),
    ({"strategy": "zero", TP: 4}, 1),
    ({"strategy": "zero", PP: 2}, 1),
    ({"strategy": "zero", PP: 3}, 1),
    ({"strategy": "zero", PP: 4, "zero_stage": 1}, 1),
    ({"strategy": "zero", PP: 2, TP: 2}, 2),
    ({"strategy": "zero", PP: 3, TP: 2}, 1),
]


def v115_cases() -> Iterator[Case]:
    chance = random.Random(5)
    own = {"num_query_groups", "kv_channels", *(name for kind in KINDS for name in kind)}
    sizes = [model for model in models(chance) if model["num_layers"] > 3 and not any(map(model.get, own))]
    for parallel, data in V115_LAYOUTS:
        for model in chance.sample(sizes, 3):
            positions = {"max_position_embeddings": chance.choice((8, 33))}
            yield case("megatron-deepspeed", model | positions, parallel, data)
    for stages, layers in product((3, 4), range(4, 14)):  # which do not come out even
        if layers % stages:
            yield case("megatron-deepspeed", sizes[0] | {"num_layers": layers}, {"strategy": "zero", PP: stages})


def command_line(one: Case, folder: Path) -> Sequence[str]:
    """Megatron's, of a case of engine ``megatron-deepspeed``."""
    vocab_file, merge_file = vocabulary(folder, one.experiment.model.vocab_size or 0)
    files = one.experiment.data.model_copy(update={"vocab_file": vocab_file, "merge_file": merge_file})
    experiment = one.experiment.model_copy(update={"data": files})
    plan = make_plan(experiment, {"n0": range(one.world_size)}, "case")
    arguments = rank_program(experiment, plan, "case", str(folder)).arguments
    return arguments[arguments.index("--num-layers") :]


def test_megatron_v115(source: Path, tmp_path: Path) -> None:
    cases = list(v115_cases())
    command_lines = [command_line(one, tmp_path) for one in cases]
    agree(cases, counted("megatron-deepspeed", cases, command_lines, TRIDOCK_MEGATRON=str(source)))


@pytest.mark.parametrize("more", [[], ["--apply-query-key-layer-scaling"]])
def test_the_attention_of_megatron_v115_is_upstreams(source: Path, tmp_path: Path, more: list[str]) -> None:
    model = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 96}
    one = case("megatron-deepspeed", model | {"hidden_dropout": 0.0, "attention_dropout": 0.0}, {"strategy": "ddp"})
    argv = [*command_line(one, tmp_path), *more]
    (line,) = ask(["attention_of_v115"], "deepspeed", [argv], TRIDOCK_MEGATRON=str(source))
    found = json.loads(line)
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
    assert 0 < found["gradient"] < 1e-5  # equal ones would be the same code
