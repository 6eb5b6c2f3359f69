"""Runs of every layout begin with a folder of transformers', have its loss, and become it again, to the bit."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import VOCABULARY, Started, asked_for, losses, make_run, run_several
from tests.distributed.test_shared_models import GRANITE, LLAMA, OLMO2, PP, QWEN3, STRATEGY, TP, VPP
from tests.exact_logits import exact_logits
from tridock.train.huggingface.export import export

pytest.importorskip("safetensors")
pytest.importorskip("megatron.core", exc_type=ImportError)

pytestmark = pytest.mark.distributed

CORE = {"engine": "megatron-core", STRATEGY: "ddp", "model.make_vocab_size_divisible_by": 9}
SP = "parallel.sequence_parallel"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (1, {}),
    "zero1": (2, {STRATEGY: "zero", "parallel.zero_stage": 1}),
    "zero3": (2, {STRATEGY: "zero", "parallel.zero_stage": 3}),
    "fsdp": (2, {STRATEGY: "fsdp"}),
    "tp2": (2, {TP: 2}),
    "pp2-interleaved": (2, {PP: 2, VPP: 2, "parallel.pipeline_schedule": "interleaved"}),
    "pp2-tp2": (4, {PP: 2, TP: 2}),
    "core-one": (1, CORE),
    "core-dp2": (2, {**CORE, "parallel.use_distributed_optimizer": True}),
    "core-tp2": (2, {**CORE, TP: 2, SP: True}),
    "core-pp2-vpp2": (2, {**CORE, PP: 2, VPP: 2}),
    "core-pp2-unequal": (2, {**CORE, PP: 2, "parallel.decoder_first_pipeline_num_layers": 1}),
    "core-tp2-pp2": (4, {**CORE, TP: 2, PP: 2}),
    "core-tp2-pp2-vpp2-dp2": (8, {**CORE, TP: 2, SP: True, PP: 2, VPP: 2, "parallel.use_distributed_optimizer": True}),
}
EP = "parallel.expert_model_parallel_size"
LAYOUTS |= {
    "core-ep2": (2, {**CORE, EP: 2, "parallel.use_distributed_optimizer": True}),
    "core-tp2-ep2": (2, {**CORE, TP: 2, SP: True, EP: 2, "parallel.expert_tensor_parallel_size": 1}),
    "core-tp2-pp2-sp": (4, {**CORE, TP: 2, SP: True, PP: 2}),
    "core-pp2-ep2": (4, {**CORE, PP: 2, EP: 2}),
}
MIXTRAL = {
    **{name: value for name, value in LLAMA.items() if not name.startswith("model.use_rope")},
    "model.num_moe_experts": 4,
    "model.untie_embeddings_and_output_weights": True,
}
QWEN2_MOE = {
    **MIXTRAL,
    "model.add_qkv_bias": True,
    "model.moe_router_pre_softmax": True,
    "model.moe_ffn_hidden_size": 16,
    "model.moe_shared_expert_intermediate_size": 24,
    "model.moe_shared_expert_gate": True,
}
OF_ONE = {**QWEN2_MOE, "model.moe_router_topk": 1}
MIXTURES = {"mixtral": MIXTRAL, "qwen2-moe": QWEN2_MOE, "one-expert": OF_ONE}
YARN = {**LLAMA, "model.rope_scaling_type": "yarn", "model.original_max_position_embeddings": 8}
SMOLLM3 = {**LLAMA, "model.no_rope_freq": 2}
OF_TORCH = {"olmo2": OLMO2, "granite": {**GRANITE, "model.no_rope_freq": None}}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "yarn": YARN,
    "smollm3": SMOLLM3,
    "qwen3": QWEN3,
    **OF_TORCH,
    **MIXTURES,
}
OF_MIXTURES = {
    "core-one",
    "core-dp2",
    "core-tp2",
    "core-pp2-vpp2",
    "core-ep2",
    *list(LAYOUTS)[-4:],
    "core-tp2-pp2-vpp2-dp2",
}
CASES = {
    f"{kind}-{layout}": (kind, layout)
    for kind, (layout, (_, fields)) in product(KINDS, LAYOUTS.items())
    if (layout in OF_MIXTURES if kind in MIXTURES else EP not in fields)
    and not (kind in OF_TORCH and layout.startswith("core"))
}
SOME_CASES = (
    *("gpt2-zero3", "llama-core-pp2-vpp2", "qwen3-tp2", "qwen2-moe-core-tp2-ep2", "smollm3-core-pp2-unequal"),
)
STILL = {
    "model.num_layers": 4, "optimizer.lr": 1e-30, "optimizer.min_lr": 0.0, "train.train_iters": 1, "train.save": True,
    "optimizer.lr_warmup_iters": 0, "model.make_vocab_size_divisible_by": 96,
}  # fmt: skip
"""One step that changes no weight."""


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def exported(run: Path) -> Path:
    folder = run.parent / f"{run.name}-hf"
    export(run, folder)
    return folder


@pytest.fixture(scope="module")
def origins(workspace: Path) -> dict[str, Path]:
    """Of each kind the folder that the other runs begin with: a run's own, with other weights than it began with."""
    moved = {**STILL, "optimizer.lr": 0.05, "train.train_iters": 2}
    engines = {kind: CORE if kind in MIXTURES else {} for kind in KINDS}
    runs = {
        kind: make_run(workspace, f"origin-{kind}", 1, **{**moved, **own, **engines[kind]})
        for kind, own in KINDS.items()
    }
    for is_core in (False, True):
        run_several([run for kind, run in runs.items() if bool(engines[kind]) == is_core], 1)
    return {kind: exported(run) for kind, run in runs.items()}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, workspace: Path, origins: dict[str, Path]) -> dict[str, Path]:
    asked = asked_for(request, CASES, SOME_CASES)
    found = {}
    for name, (kind, layout) in asked.items():
        ranks, fields = LAYOUTS[layout]
        load = {"train.load": f"hf:runs/{origins[kind].name}"}
        found[name] = make_run(workspace, name, ranks, **{**STILL, **KINDS[kind], **fields, **load})
    for ranks in (1, 2, 4, 8):
        for is_core in (False, True):
            together = [
                found[name]
                for name, (_, layout) in asked.items()
                if LAYOUTS[layout][0] == ranks and layout.startswith("core") == is_core
            ]
            if together:
                argv = ["-m", "tests.distributed.recorded_batches", *map(str, together)]
                with Started(argv, together[0], ranks, {}, "megatron-core" if is_core else "deepspeed") as started:
                    finished = started.wait()
                assert finished.codes == [0] * ranks, "\n".join(finished.err)
    return found


@pytest.mark.parametrize("name", thinned(CASES, SOME_CASES))
def test_weights_go_through_a_run_unchanged(runs: dict[str, Path], origins: dict[str, Path], name: str) -> None:
    origin, folder = origins[CASES[name][0]], exported(runs[name])
    found, wanted = weights(folder), weights(origin)
    assert found.keys() == wanted.keys()
    assert [key for key in found if not torch.equal(found[key], wanted[key])] == []
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, origin)]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", thinned(CASES, SOME_CASES))
def test_the_loss_is_that_of_transformers(runs: dict[str, Path], origins: dict[str, Path], name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(origins[CASES[name][0]], dtype=torch.float32)
    tokens = torch.cat([torch.load(file) for file in sorted(runs[name].glob("batch-*.pt"))])
    wanted = exact_logits(model, tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(wanted, tokens[:, 1:].flatten())
    assert losses(runs[name])[1, "train"] == pytest.approx(float(loss), abs=1e-5)


def logits_of(run: Path, replica: int, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of a replica's step, [samples, sequence, vocabulary], joined from its ranks' columns."""
    parts = [torch.load(file) for file in sorted(run.glob(f"logits-{replica}-*.pt"))]
    passes = list(zip(*parts, strict=True))
    if sum(columns[0][1].numel() for columns in passes) > tokens[:, 1:].numel():
        passes = passes[1:]  # a pipeline of torch finds its shapes with the first micro-batch
    micro_batches = []
    for columns in passes:
        of_all = torch.cat([logits for _, _, logits in sorted(columns, key=lambda it: it[0])], -1)[:, :VOCABULARY]
        labels = columns[0][1].flatten()
        samples = len(labels) // (tokens.shape[1] - 1)
        wanted = tokens[sum(map(len, micro_batches)) :][:samples, 1:]
        if torch.equal(labels, wanted.flatten()):
            micro_batches.append(of_all.unflatten(0, wanted.shape))
        else:  # Megatron's order: the sequence first
            assert torch.equal(labels, wanted.t().flatten())
            micro_batches.append(of_all.unflatten(0, wanted.t().shape).transpose(0, 1))
    return torch.cat(micro_batches)


@pytest.mark.parametrize("name", thinned(CASES, SOME_CASES))
def test_the_logits_are_those_of_transformers(runs: dict[str, Path], origins: dict[str, Path], name: str) -> None:
    """Every one, in the step's own forward pass: through the pipeline, of all columns and replicas."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(origins[CASES[name][0]], dtype=torch.float32)
    samples = 0
    for replica, file in enumerate(sorted(runs[name].glob("batch-*.pt"))):
        tokens = torch.load(file)
        wanted = exact_logits(model, tokens[:, :-1])
        found = logits_of(runs[name], replica, tokens)
        assert found.shape == wanted.shape
        assert wanted.std() > 0.1
        assert float((found - wanted).abs().max()) <= 1e-5
        samples += len(tokens)
    assert samples == 8
