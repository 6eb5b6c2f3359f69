"""What engine torch refuses, and what only it has: every message whole."""

from __future__ import annotations

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.plan import assess

BASE: dict[str, Any] = {
    "name": "small",
    "model": {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64},
    "parallel": {"strategy": "ddp"},
    "batch": {"micro_batch_size": 1, "global_batch_size": 8},
    "data": {"data_path": "data/x"},
    "precision": "fp32",
    "train": {"train_iters": 3},
}
TP, PP, VPP = (f"parallel.{name}_model_parallel_size" for name in ("tensor", "pipeline", "virtual_pipeline"))
SCHEDULE, SHARDS, STRATEGY = "parallel.pipeline_schedule", "parallel.data_parallel_shard_size", "parallel.strategy"
ONCE, BATCH = "parallel.reduce_gradients_once", "batch.global_batch_size"
CORE = "leave it out, or use engine torch"


def said(slots: int, fields: dict[str, Any]) -> list[str]:
    return [str(problem) for problem in assess(with_fields(BASE, fields), {"a": range(slots)}, "e").problems]


@pytest.mark.parametrize(
    ("slots", "fields", "expected"),
    [
        (4, {STRATEGY: "zero", TP: 2},
         f"{TP}: DeepSpeed's ZeRO does not split the torch engine's model; got 2; set it to 1, or "
         "strategy to fsdp or ddp"),
        (4, {STRATEGY: "zero", PP: 2},
         f"{PP}: DeepSpeed's ZeRO does not split the torch engine's model; got 2; set it to 1, or "
         "strategy to fsdp or ddp"),
        (4, {STRATEGY: "fsdp", "parallel.zero_stage": 3},
         "parallel.zero_stage: strategy fsdp shares everything out, as ZeRO 3 does; got 3; set it to 0, "
         "or strategy to zero"),
        (4, {SHARDS: 2},
         f"{SHARDS}: strategy ddp has no shards; got 2; leave it out, or set strategy to fsdp"),
        (4, {ONCE: True},
         f"{ONCE}: the choice is that of strategy fsdp without a pipeline; got true with strategy ddp; "
         "leave it out"),
        (4, {ONCE: True, STRATEGY: "fsdp", PP: 2},
         f"{ONCE}: the choice is that of strategy fsdp without a pipeline; got true with strategy fsdp and 2 stages; "
         "leave it out"),
        (4, {STRATEGY: "fsdp", SHARDS: 3},
         f"{SHARDS}: must divide the data parallel size 4; got 3; use 2 or 4, or leave it out"),
        (3, {TP: 3, "model.make_vocab_size_divisible_by": 129},
         f"{TP}: must divide num_attention_heads 4; got 3; use 2 or 4"),
        (2, {"model.num_query_groups": 3},
         "model.num_query_groups: must divide num_attention_heads 4; got 3; use 2 or 4"),
        (4, {TP: 4, "model.num_query_groups": 2},
         f"{TP}: must divide num_query_groups 2; got 4; use 2"),
        (2, {TP: 2, "model.ffn_hidden_size": 33},
         f"{TP}: must divide ffn_hidden_size 33; got 2; use 1"),
        (1, {"model.rotary_base": 500},
         "model.rotary_base: needs position_embedding_type rope; got 500.0; leave it out"),
        (1, {"model.position_embedding_type": "rope", "model.rope_scaling_factor": 32.0},
         "model.rope_scaling_factor: needs use_rope_scaling; got 32.0; leave it out"),
        (2, {"model.qk_layernorm": True, "model.qk_layernorm_all_heads": True, "parallel.strategy": "ddp",
             "parallel.tensor_model_parallel_size": 2},
         "parallel.tensor_model_parallel_size: with qk_layernorm_all_heads, needs normalization RMSNorm; got 2; "
         "set it to 1: fsdp and stages split the model"),
        (1, {"model.qk_layernorm_all_heads": True},
         "model.qk_layernorm_all_heads: needs qk_layernorm; got true; set it, or leave this out"),
        (1, {"model.position_embedding_type": "rope", "model.rotary_percent": 0.4},
         "model.rotary_percent: must rotate an even number of the 8 elements of a head; got 0.4; "
         "use 0.5 or 1, or other heads"),
        (8, {PP: 8},
         f"{PP}: must be at most num_layers 4; got 8; use 4 or fewer"),
        (2, {VPP: 2},
         f"{VPP}: there is no pipeline to interleave; got 2; leave it out, or set "
         "pipeline_model_parallel_size to 2 or more"),
        (2, {PP: 2, VPP: 2},
         f"{VPP}: above 1 goes with pipeline_schedule interleaved, and 1 with the others; got 2 with "
         "1f1b; set it to 1, or pipeline_schedule to interleaved"),
        (2, {PP: 2, SCHEDULE: "interleaved"},
         f"{VPP}: above 1 goes with pipeline_schedule interleaved, and 1 with the others; got 1 with "
         "interleaved; set it to 2 or more, or pipeline_schedule to 1f1b"),
        (2, {PP: 2, VPP: 3, SCHEDULE: "interleaved"},
         f"{VPP}: an interleaved pipeline wants pipeline x virtual size to divide num_layers 4; got 2 x "
         "3; use sizes whose product is 4"),
        (4, {PP: 4, BATCH: 3},
         f"{BATCH}: schedule 1f1b needs at least micro_batch_size 1 x data parallel size 1 x "
         "pipeline_model_parallel_size 4; got 3; use 4 or more, or parallel.pipeline_schedule gpipe"),
        (2, {PP: 2, VPP: 2, SCHEDULE: "interleaved", BATCH: 5},
         f"{BATCH}: schedule interleaved wants a multiple of micro_batch_size 1 x data parallel size 1 x "
         "pipeline_model_parallel_size 2; got 5; use 4 or 6"),
        (2, {"engine": "megatron-core", SHARDS: 2},
         f"{SHARDS}: engine megatron-core has no such option; got 2; {CORE}"),
        (2, {"engine": "megatron-core", SCHEDULE: "gpipe"},
         f"{SCHEDULE}: engine megatron-core has no such option; got gpipe; {CORE}"),
    ],
)  # fmt: skip
def test_what_cannot_be(slots: int, fields: dict[str, Any], expected: str) -> None:
    assert said(slots, fields) == [expected]


def test_compiled_layers_are_torchs() -> None:
    assert said(2, {"engine": "megatron-core", "train.compile": True}) == [
        f"train.compile: engine megatron-core has no such option; got true; {CORE}"
    ]


def test_fsdp_is_not_megatrons() -> None:
    fields = {"engine": "megatron-deepspeed", "data.vocab_file": "v", "data.merge_file": "m", STRATEGY: "fsdp"}
    expected = (
        "parallel.strategy: engine megatron-deepspeed has no such option; got fsdp; use zero or ddp, or engine torch"
    )
    assert expected in said(2, fields)
    assert any(
        problem.startswith("parallel.strategy: ") for problem in said(2, {"engine": "megatron-core", STRATEGY: "fsdp"})
    )


@pytest.mark.parametrize(
    ("slots", "fields"),
    [
        (4, {STRATEGY: "fsdp"}),
        (4, {STRATEGY: "fsdp", SHARDS: 2}),
        (4, {STRATEGY: "fsdp", SHARDS: 1}),
        (8, {TP: 2, PP: 2}),
        (4, {STRATEGY: "fsdp", TP: 4}),
        (2, {TP: 2, "model.make_vocab_size_divisible_by": 5}),  # of 65 rows the first rank has one more
        (3, {PP: 3}),  # of four layers the first stage has two
        (4, {PP: 4, BATCH: 2, SCHEDULE: "gpipe"}),
        (2, {PP: 2, VPP: 2, SCHEDULE: "interleaved", BATCH: 3}),  # fewer rounds than stages twice over
    ],
)
def test_what_can_be(slots: int, fields: dict[str, Any]) -> None:
    assert said(slots, fields) == []


def memory(slots: int, fields: dict[str, Any]) -> dict[str, int]:
    found = assess(with_fields(BASE, fields), {"a": range(slots)}, "e")
    return {term.name: term.bytes for term in found.memory[0].terms}


def test_states_are_sharded() -> None:
    """fp32 weights and two moments: 12 bytes a weight, over the shards; what is summed up is not."""
    alone = memory(1, {})
    states = ("weights", "optimizer states")
    for slots, fields, parts in (
        (4, {STRATEGY: "fsdp"}, 4),
        (4, {STRATEGY: "fsdp", SHARDS: 2}, 2),
        (4, {STRATEGY: "fsdp", SHARDS: 1}, 1),
    ):
        shared = memory(slots, fields)
        for name in states:
            assert shared[name] == -(-alone[name] // parts), (fields, name)


def test_gradients_of_several_micro_batches() -> None:
    """FSDP2 scatters them after each, or once a step; until then each rank has all of them in fp32."""
    weights = memory(1, {})["weights"]  # fp32 too
    one, two, many = (memory(4, {STRATEGY: "fsdp", BATCH: 4 * steps}) for steps in (1, 2, 9))
    once = memory(4, {STRATEGY: "fsdp", BATCH: 8, ONCE: True})
    assert once["gradients of a step"] == weights
    assert two == many
    assert one.get("gradients of a step", 0) < two["gradients of a step"] < weights
    assert memory(4, {STRATEGY: "fsdp", BATCH: 8, SHARDS: 1})["gradients of a step"] == weights


def test_scattering_after_each_micro_batch_sends_more() -> None:
    def sent(**fields: Any) -> float:
        found = assess(with_fields(BASE, {STRATEGY: "fsdp", BATCH: 16, **fields}), {"a": range(4)}, "e").cost
        assert found is not None
        return sum(one.bytes_per_rank for one in found.traffic)

    # Four micro-batches, in fp32: two gatherings and one scattering of each, or one of all.
    assert sent() / sent(**{ONCE: True}) == pytest.approx(12 / 9)


def test_the_last_stage_of_gpipe_has_the_logits_of_all_micro_batches() -> None:
    def head(schedule: str, steps: int) -> int:
        found = assess(with_fields(BASE, {PP: 2, SCHEDULE: schedule, BATCH: steps}), {"a": range(2)}, "e")
        return {term.name: term.bytes for term in found.memory[1].terms}["logits and loss"]

    assert head("1f1b", 2) == head("1f1b", 8) == head("gpipe", 1)
    more = {head("gpipe", steps) - head("gpipe", steps - 1) for steps in (2, 3, 4)}
    assert len(more) == 1  # each as much
    assert min(more) > 0


EVERY = {"train.save_interval": 1}


@pytest.mark.parametrize(
    ("fields", "per_parameter"),
    [
        ({**EVERY, STRATEGY: "ddp"}, 12),
        ({**EVERY, STRATEGY: "fsdp"}, 12 / 4),
        ({**EVERY, STRATEGY: "zero", "parallel.zero_stage": 1, "precision": "bf16"}, 2 + 12 / 4),
        ({**EVERY, "engine": "megatron-core", "precision": "bf16"}, 2 + 12),
        ({**EVERY, "engine": "megatron-core", "precision": "bf16", "parallel.use_distributed_optimizer": True}, 2 + 12),
        ({**EVERY, "train.async_save": False}, 0),
        ({**EVERY, "train.save": False}, 0),
        ({}, 0),
    ],
)
def test_the_copy_of_a_checkpoint_is_in_the_plan(fields: dict[str, Any], per_parameter: float) -> None:
    (stage,) = assess(with_fields(BASE, fields), {"a": range(4)}, "e").document()["memory"]["stages"]
    assert stage["checkpoint_copy_bytes"] == pytest.approx(per_parameter * stage["parameters"], rel=0.01)
