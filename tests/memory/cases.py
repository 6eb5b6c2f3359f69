"""The grid of ``measure.py``: small experiments that tell the terms of a memory model apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tests.experiments import with_fields
from tridock.experiment import Experiment

Fields = Mapping[str, Any]

_COMMON: Final[dict[str, Any]] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "seq_length": 96,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "batch": {"micro_batch_size": 2},
    "data": {"data_path": "data/demo/stdlib_text_document", "split": "80,10,10"},
    "optimizer": {"lr": 1e-4},
    "precision": "fp32",
    "train": {"train_iters": 4, "log_interval": 10, "eval_iters": 1, "save": False, "tensorboard": False},
}
_VOCABULARY: Final = {"vocab_size": 1100, "make_vocab_size_divisible_by": 50}
_TOKENIZER: Final = {
    "vocab_file": "data/demo/tokenizer/vocab.json",
    "merge_file": "data/demo/tokenizer/merges.txt",
}

BASE: Final[dict[str, dict[str, Any]]] = {
    "megatron-core": _COMMON | {"model": _COMMON["model"] | _VOCABULARY},
    "torch": _COMMON | {"model": _COMMON["model"] | _VOCABULARY, "parallel": {"strategy": "ddp"}},
    "megatron-deepspeed": _COMMON
    | {
        "model": _COMMON["model"] | {"make_vocab_size_divisible_by": 20},
        "data": _COMMON["data"] | _TOKENIZER,
        "parallel": {"strategy": "ddp"},
        # Workers of the data loader cost more than they bring.
        "megatron_args": ["--num-workers", "0"],
    },
}
"""What every case of an engine has, unless its own fields say otherwise."""


@dataclass(frozen=True)
class Case:
    """An experiment, by the fields in which it differs from its engine's base, on so many ranks."""

    engine: str
    world_size: int
    fields: Fields


def experiment(case: Case) -> Experiment:
    """The whole of it."""
    return with_fields({"name": "memory", "engine": case.engine, **BASE[case.engine]}, case.fields)


_BF16: Final = {"precision": "bf16"}
_FP16: Final = {"precision": "fp16", "fp16.initial_scale_power": 8}
_ACCUMULATED: Final = "batch.global_batch_size"
_LARGER: Final = {
    "model.num_layers": 8,
    "model.hidden_size": 96,
    "model.num_attention_heads": 6,
    "model.seq_length": 64,
    "model.max_position_embeddings": 80,
    "batch.micro_batch_size": 3,
}
_LARGER_VOCABULARY: Final = {"model.vocab_size": 730}  # 750 rows, or 800 that two ranks split
_HEADS: Final = {"model.kv_channels": 24}
"""Wider together than hidden_size, as those of preset gpt-xl."""
_LLAMA: Final = {
    "model.num_query_groups": 2,
    "model.ffn_hidden_size": 160,
    "model.normalization": "RMSNorm",
    "model.position_embedding_type": "rope",
    "model.swiglu": True,
    "model.add_bias_linear": False,
}
_QWEN: Final = {
    **_LLAMA,
    "model.kv_channels": 24,
    "model.qk_layernorm": True,
    "model.untie_embeddings_and_output_weights": True,
}
_OLMO2: Final = {
    **_LLAMA,
    "model.qk_layernorm": True,
    "model.qk_layernorm_all_heads": True,
    "model.use_post_norm": True,
}
_GRANITE: Final = {
    **_LLAMA,
    "model.add_attention_bias": True,
    "model.no_rope_freq": 2,
    "model.embedding_multiplier": 3.0,
    "model.residual_multiplier": 0.5,
    "model.attention_multiplier": 0.2,
    "model.logits_scaling": 0.5,
}
"""With SmolLM3's layers without a rotation, and Llama's biases of attention."""
_NORMED_HEADS: Final[dict[str, Fields]] = {
    "layernorm-grouped": {"model.qk_layernorm": True, "model.num_query_groups": 2},
    "layernorm-rope": {**_QWEN, "model.normalization": "LayerNorm"},
    "rmsnorm": {"model.qk_layernorm": True, "model.normalization": "RMSNorm"},
    "rmsnorm-grouped": {**_QWEN, "model.position_embedding_type": "learned_absolute"},
}
"""Norms of queries and keys: what they keep depends on norm, format, rotation and the groups of a rank."""
_MIXTRAL: Final = {
    **_LLAMA,
    "model.num_moe_experts": 4,
    "model.moe_aux_loss_coeff": 0.01,
    "model.untie_embeddings_and_output_weights": True,
}
_OF_TORCH: Final[dict[str, Fields]] = {"llama": _LLAMA, "qwen": _QWEN, "olmo2": _OLMO2, "granite": _GRANITE}
_DROPOUT: Final = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}

_TP, _PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
_VPP, _CP = "parallel.virtual_pipeline_model_parallel_size", "parallel.context_parallel_size"
_EP, _ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
_SP, _DISTRIBUTED = "parallel.sequence_parallel", "parallel.use_distributed_optimizer"

_CORE_LAYOUTS: Final[dict[str, tuple[int, Fields]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "dp2-distributed": (2, {_DISTRIBUTED: True}),
    "tp2": (2, {_TP: 2}),
    "tp2-sp": (2, {_TP: 2, _SP: True}),
    "pp2": (2, {_PP: 2}),
    "pp2-vpp2": (2, {_PP: 2, _VPP: 2}),
    "cp2": (2, {_CP: 2}),
    "cp2-distributed": (2, {_CP: 2, _DISTRIBUTED: True}),
    "tp2-pp2": (4, {_TP: 2, _PP: 2}),
    "tp2-sp-pp2": (4, {_TP: 2, _SP: True, _PP: 2}),
    "pp4": (4, {_PP: 4}),
    "pp2-dp2-distributed": (4, {_PP: 2, _DISTRIBUTED: True}),
    "tp2-sp-cp2-distributed": (4, {_TP: 2, _SP: True, _CP: 2, _DISTRIBUTED: True}),
}
_GRANULARITY = "model.recompute_granularity"
_RECOMPUTED: Final[dict[str, Fields]] = {
    "full1": {_GRANULARITY: "full", "model.recompute_method": "uniform", "model.recompute_num_layers": 1},
    "full2": {_GRANULARITY: "full", "model.recompute_method": "uniform", "model.recompute_num_layers": 2},
    "block1": {_GRANULARITY: "full", "model.recompute_method": "block", "model.recompute_num_layers": 1},
    "selective": {_GRANULARITY: "selective"},
}


def _core() -> Iterator[tuple[str, int, Fields]]:
    for layout, (ranks, fields) in _CORE_LAYOUTS.items():
        replicas = ranks // (fields.get(_TP, 1) * fields.get(_PP, 1) * fields.get(_CP, 1))
        yield f"{layout}-bf16", ranks, {**fields, **_BF16, _ACCUMULATED: 8 * replicas}
        larger = {**_LARGER, **_LARGER_VOCABULARY, _ACCUMULATED: 12 * replicas}
        yield f"{layout}-bf16-larger", ranks, {**fields, **_BF16, **larger}
        if layout in ("one", "dp2-distributed", "tp2-sp", "pp2", "pp2-vpp2", "cp2"):
            yield f"{layout}-fp32", ranks, {**fields, _ACCUMULATED: 4 * replicas}
            yield f"{layout}-fp16", ranks, {**fields, **_FP16, _ACCUMULATED: 4 * replicas}
        if layout in ("one", "tp2", "tp2-sp", "pp2", "pp2-vpp2", "cp2"):
            for kind, recompute in _RECOMPUTED.items():
                if kind != "full2" or layout != "pp2-vpp2":  # it has one layer a run
                    yield f"{layout}-{kind}", ranks, {**fields, **_BF16, **recompute, _ACCUMULATED: 8}
            yield f"{layout}-dropout", ranks, {**fields, **_BF16, **_DROPOUT, _ACCUMULATED: 4}
    for kind, recompute in _RECOMPUTED.items():
        yield f"pp2-{kind}-larger", 2, {_PP: 2, **_BF16, **recompute, **_LARGER, **_LARGER_VOCABULARY, _ACCUMULATED: 12}
    block3 = {**_RECOMPUTED["block1"], "model.recompute_num_layers": 3}
    for layout in ("one", "tp2-sp", "pp2", "cp2"):
        ranks, fields = _CORE_LAYOUTS[layout]
        yield f"{layout}-heads", ranks, {**fields, **_BF16, **_HEADS, _ACCUMULATED: 4}
    for layout in ("one", "tp2-sp", "pp2"):
        ranks, fields = _CORE_LAYOUTS[layout]
        yield f"{layout}-llama", ranks, {**fields, **_BF16, **_LLAMA, _ACCUMULATED: 4}
        yield f"{layout}-qwen", ranks, {**fields, **_BF16, **_QWEN, _ACCUMULATED: 4}
    for layout in ("one", "tp2"):
        ranks, fields = _CORE_LAYOUTS[layout]
        for name, model in _NORMED_HEADS.items():
            for precision in ("fp32", "bf16"):
                few = {**fields, **_PRECISIONS[precision], **model, _ACCUMULATED: 4}
                yield f"{layout}-heads-{name}-{precision}", ranks, few
    for layout in ("one", "dp2-distributed"):
        ranks, fields = _CORE_LAYOUTS[layout]
        yield f"{layout}-mixtral", ranks, {**fields, **_BF16, **_MIXTRAL, _ACCUMULATED: 8}
    of_one = {**_MIXTRAL, "model.moe_router_topk": 1, "model.moe_router_pre_softmax": True}
    yield "one-mixtral-of-one", 1, {**_BF16, **of_one, _ACCUMULATED: 8}
    yield "tp2-sp-no-rope", 2, {_TP: 2, _SP: True, **_BF16, **_LLAMA, "model.no_rope_freq": 2, _ACCUMULATED: 4}
    shared = {"model.moe_shared_expert_intermediate_size": 96}
    gated = {**shared, "model.moe_shared_expert_gate": True, "model.moe_router_pre_softmax": True}
    yield "one-mixtral-shared", 1, {**_BF16, **_MIXTRAL, **shared, _ACCUMULATED: 8}
    yield "one-mixtral-gated", 1, {**_BF16, **_MIXTRAL, **gated, _ACCUMULATED: 8}
    yield "tp2-sp-mixtral-gated", 2, {_TP: 2, _SP: True, **_BF16, **_MIXTRAL, **gated, _ACCUMULATED: 8}
    for layout, ranks, fields in (
        ("ep2", 2, {_EP: 2}),
        ("ep2-distributed", 4, {_EP: 2, _DISTRIBUTED: True}),
        ("tp2-sp-ep2", 2, {_TP: 2, _SP: True, _EP: 2, _ETP: 1}),
    ):
        yield f"{layout}-mixtral", ranks, {**fields, **_BF16, **_MIXTRAL, _ACCUMULATED: 16}
    yield "one-block3-larger", 1, {**_BF16, **block3, **_LARGER, **_LARGER_VOCABULARY, _ACCUMULATED: 3}
    yield "one-full1-dropout", 1, {**_BF16, **_RECOMPUTED["full1"], **_DROPOUT, _ACCUMULATED: 2}
    yield "one-hidden-dropout", 1, {**_BF16, "model.hidden_dropout": 0.1, _ACCUMULATED: 2}
    yield "one-unaccumulated", 1, {**_BF16, _ACCUMULATED: 2}
    yield "pp2-unaccumulated", 2, {_PP: 2, **_BF16, _ACCUMULATED: 2}


_ZERO = "parallel.zero_stage"
_STRATEGIES: Final[dict[str, Fields]] = {
    "ddp": {},
    **{f"zero{stage}": {"parallel.strategy": "zero", _ZERO: stage} for stage in range(4)},
}
_PRECISIONS: Final[dict[str, Fields]] = {"fp32": {}, "bf16": _BF16, "fp16": _FP16}
_WIDE: Final = {"model.num_layers": 3, "model.hidden_size": 192, "batch.micro_batch_size": 1}
"""With weights of more than the 100,000 elements from which on ZeRO 3 parts them by default."""
_DEEP: Final = {
    "model.num_layers": 8,
    "model.hidden_size": 192,
    "model.seq_length": 32,
    "batch.micro_batch_size": 1,
    "deepspeed": {
        "zero_optimization": {
            "stage3_param_persistence_threshold": 1000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_max_live_parameters": 3_000_000,
            "stage3_max_reuse_distance": 4_000_000,
            "reduce_bucket_size": 100_000,
        }
    },
}
"""Eight layers of 444,864 weights, of which ZeRO 3 does not keep all gathered."""
_CHECKPOINTED: Final = {"model.checkpoint_activations": True}


def _torch() -> Iterator[tuple[str, int, Fields]]:
    for strategy, fields in _STRATEGIES.items():
        for precision, format_ in _PRECISIONS.items():
            for ranks in (1, 2):
                yield f"{strategy}-{precision}-{ranks}", ranks, {**fields, **format_, _ACCUMULATED: 2 * ranks}
        larger = {**_LARGER, **_LARGER_VOCABULARY, _ACCUMULATED: 18}
        yield f"{strategy}-bf16-larger", 2, {**fields, **_BF16, **larger}
        yield f"{strategy}-fp32-larger", 2, {**fields, **larger}
        yield f"{strategy}-bf16-checkpointed", 1, {**fields, **_BF16, **_CHECKPOINTED, _ACCUMULATED: 2}
        yield f"{strategy}-bf16-dropout", 1, {**fields, **_BF16, **_DROPOUT, _ACCUMULATED: 2}
    for strategy in ("ddp", "zero1", "zero3"):
        yield f"{strategy}-bf16-heads", 2, {**_STRATEGIES[strategy], **_BF16, **_HEADS, _ACCUMULATED: 4}
        for name, model in _OF_TORCH.items():
            yield f"{strategy}-bf16-{name}", 1, {**_STRATEGIES[strategy], **_BF16, **model, _ACCUMULATED: 2}
    yield "ddp-bf16-heads-checkpointed", 1, {**_BF16, **_HEADS, **_CHECKPOINTED, _ACCUMULATED: 2}
    yield "zero3-bf16-wide", 2, {**_STRATEGIES["zero3"], **_BF16, **_WIDE, _ACCUMULATED: 2}
    yield "zero3-fp32-wide", 2, {**_STRATEGIES["zero3"], **_WIDE, _ACCUMULATED: 2}
    released = {**_STRATEGIES["zero3"], **_DEEP}
    yield "zero3-bf16-released-2", 2, {**released, **_BF16, _ACCUMULATED: 4}
    yield "zero3-fp32-released-2", 2, {**released, _ACCUMULATED: 4}
    yield "zero3-fp32-released-4", 4, {**released, _ACCUMULATED: 8}
    yield "zero3-fp32-released-checkpointed-4", 4, {**released, **_CHECKPOINTED, _ACCUMULATED: 8}
    for precision in ("fp32", "fp16"):
        yield f"ddp-{precision}-checkpointed", 1, {**_PRECISIONS[precision], **_CHECKPOINTED, _ACCUMULATED: 2}


_FSDP: Final = {"parallel.strategy": "fsdp"}
_SCHEDULE, _SHARDS = "parallel.pipeline_schedule", "parallel.data_parallel_shard_size"
_SHARED: Final[dict[str, tuple[int, Fields]]] = {
    "fsdp2": (2, _FSDP),
    "hybrid": (4, {**_FSDP, _SHARDS: 2}),
    "tp2": (2, {_TP: 2}),
    "tp2-dp2": (4, {_TP: 2}),
    "tp2-fsdp2": (4, {_TP: 2, **_FSDP}),
    "pp2": (2, {_PP: 2}),
    "pp2-gpipe": (2, {_PP: 2, _SCHEDULE: "gpipe"}),
    "pp2-vpp2": (2, {_PP: 2, _VPP: 2, _SCHEDULE: "interleaved"}),
    "pp4": (4, {_PP: 4}),
    "pp2-dp2": (4, {_PP: 2}),
    "pp2-fsdp2": (4, {_PP: 2, **_FSDP}),
    "tp2-pp2": (4, {_TP: 2, _PP: 2}),
}
"""What torch shares out itself."""


def _shared() -> Iterator[tuple[str, int, Fields]]:
    for layout, (ranks, fields) in _SHARED.items():
        replicas = ranks // (fields.get(_TP, 1) * fields.get(_PP, 1))
        stages = fields.get(_PP, 1)
        for precision in ("fp32", "bf16"):
            steps = 2 * replicas * stages
            yield f"{layout}-{precision}", ranks, {**fields, **_PRECISIONS[precision], _ACCUMULATED: steps}
        larger = {**_LARGER, **_LARGER_VOCABULARY, _ACCUMULATED: 12 * replicas}
        yield f"{layout}-bf16-larger", ranks, {**fields, **_BF16, **larger}
        if layout in ("fsdp2", "tp2", "pp2"):
            few = {_ACCUMULATED: 2 * replicas * stages}
            yield f"{layout}-bf16-checkpointed", ranks, {**fields, **_BF16, **_CHECKPOINTED, **few}
            yield f"{layout}-bf16-dropout", ranks, {**fields, **_BF16, **_DROPOUT, **few}
    for precision in ("fp32", "bf16"):
        yield f"fsdp2-{precision}-wide", 2, {**_FSDP, **_PRECISIONS[precision], **_WIDE, _ACCUMULATED: 2}
    for layout in ("fsdp2", "tp2", "pp2"):
        ranks, fields = _SHARED[layout]
        yield f"{layout}-bf16-heads", ranks, {**fields, **_BF16, **_HEADS, _ACCUMULATED: 4}
        for name, model in _OF_TORCH.items():
            yield f"{layout}-bf16-{name}", ranks, {**fields, **_BF16, **model, _ACCUMULATED: 4}
    for layout, (ranks, fields) in {"ddp": (1, {}), "tp2": _SHARED["tp2"]}.items():
        for name in ("layernorm-rope", "rmsnorm-grouped"):
            for precision in ("fp32", "bf16"):
                few = {**fields, **_PRECISIONS[precision], **_NORMED_HEADS[name], _ACCUMULATED: 4}
                yield f"{layout}-heads-{name}-{precision}", ranks, few
    yield "pp2-fsdp2-bf16-wide", 4, {_PP: 2, **_FSDP, **_BF16, **_WIDE, _ACCUMULATED: 8}
    yield "fsdp1-fp32", 1, {**_FSDP, _ACCUMULATED: 2}
    yield "fsdp2-fp32-accumulated", 2, {**_FSDP, _ACCUMULATED: 8}
    for precision in ("fp32", "bf16"):
        once = {**_FSDP, **_PRECISIONS[precision], "parallel.reduce_gradients_once": True}
        yield f"fsdp2-{precision}-once", 2, {**once, _ACCUMULATED: 4}
        yield f"fsdp2-{precision}-wide-once", 2, {**once, **_WIDE, _ACCUMULATED: 4}
        yield f"fsdp2-{precision}-wide-accumulated", 2, {**_FSDP, **_PRECISIONS[precision], **_WIDE, _ACCUMULATED: 4}
        yield (
            f"hybrid-{precision}-wide-accumulated",
            4,
            {**_FSDP, _SHARDS: 2, **_PRECISIONS[precision], **_WIDE, _ACCUMULATED: 8},
        )


_FIXED_SCALE: Final = {"precision": "fp16", "fp16.loss_scale": 256.0}
"""Upstream's own scale starts at 2 to the 32nd, and skips the first steps."""


def _v115() -> Iterator[tuple[str, int, Fields]]:
    layouts: dict[str, tuple[int, Fields]] = {
        "tp2": (2, {_TP: 2}),
        "tp2-zero1": (2, {_TP: 2, **_STRATEGIES["zero1"]}),
        "pp2-zero0": (2, {_PP: 2, **_STRATEGIES["zero0"]}),
        "pp2-zero1": (2, {_PP: 2, **_STRATEGIES["zero1"]}),
        "tp2-pp2-zero1": (4, {_TP: 2, _PP: 2, **_STRATEGIES["zero1"]}),
        "pp2-dp2-zero1": (4, {_PP: 2, **_STRATEGIES["zero1"]}),
    }
    layouts |= {f"{strategy}-dp{ranks}": (ranks, of) for strategy, of in _STRATEGIES.items() for ranks in (1, 2)}
    for layout, (ranks, fields) in layouts.items():
        replicas = ranks // (fields.get(_TP, 1) * fields.get(_PP, 1))
        short = _FIXED_SCALE if fields.get(_ZERO) != 0 else {}  # with ZeRO 0 it trains in fp32 only
        for precision, format_ in (("fp32", {}), ("fp16", short)):
            if precision == "fp16" and not short:
                continue
            if ranks > 1 or layout == "ddp-dp1":
                yield f"{layout}-{precision}", ranks, {**fields, **format_, _ACCUMULATED: 2 * replicas}
        steps = 1 if fields.get("parallel.strategy") != "zero" else 4
        if ranks > 1:
            larger = {**_LARGER, _ACCUMULATED: 3 * replicas * steps}
            yield f"{layout}-larger", ranks, {**fields, **short, **larger}
        if layout in ("ddp-dp1", "tp2", "tp2-zero1", "pp2-zero1", "zero3-dp2"):
            stored = {**_CHECKPOINTED, _ACCUMULATED: 2 * replicas * steps}
            yield f"{layout}-checkpointed", ranks, {**fields, **short, **stored}
            yield f"{layout}-checkpointed2", ranks, {**fields, **stored, "model.checkpoint_num_layers": 2}
    yield "zero3-dp2-wide", 2, {**_STRATEGIES["zero3"], **_FIXED_SCALE, **_WIDE, _ACCUMULATED: 2}
    yield "ddp-dp1-dropout", 1, {**_FIXED_SCALE, **_DROPOUT, _ACCUMULATED: 2}
    partitioned = {**_CHECKPOINTED, "model.partition_activations": True, _ACCUMULATED: 2}
    yield "tp2-zero1-partitioned", 2, {_TP: 2, **_STRATEGIES["zero1"], **_FIXED_SCALE, **partitioned}


def _cases() -> Iterator[tuple[str, Case]]:
    for engine, cases in (
        ("megatron-core", _core()),
        ("torch", _torch()),
        ("torch", _shared()),
        ("megatron-deepspeed", _v115()),
    ):
        for name, ranks, fields in cases:
            yield f"{engine}-{name}", Case(engine, ranks, fields)


CASES: Final[dict[str, Case]] = dict(_cases())
