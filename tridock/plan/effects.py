"""What fields of an experiment require and cost, briefly: ``tridock plan --explain`` shows.

``rules`` are those of :mod:`tridock.plan.legality`. Activations are counted in 16 bits,
as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022); states as in
Rajbhandari et al., "ZeRO" (2020); a pipeline's waiting as in Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters" (2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Effect:
    """The rules of a field beside the engines that have it, and its effect on a rank's memory and time."""

    rules: tuple[str, ...] = ()
    memory: str = ""
    time: str = ""


_STORED = ("needs checkpoint_activations", "needs strategy zero")
_FULL = "goes with recompute_granularity full, which needs it"

_MODEL: Final = {
    "preset": Effect(
        ("what is given beside it wins",),
        "that of its num_layers, num_attention_heads and hidden_size",
        "that of its num_layers, num_attention_heads and hidden_size",
    ),
    "img_h": Effect(("preset resnet50",), "activations in proportion", "in proportion"),
    "img_w": Effect(("preset resnet50",), "activations in proportion", "in proportion"),
    "num_classes": Effect(("preset resnet50",), "2,049 parameters each", "the last layer, in proportion"),
    "num_layers": Effect(
        (
            "megatron-core: pipeline x virtual pipeline size divides it",
            "megatron-deepspeed: one a pipeline stage, at least",
        ),
        "a layer has 12 h^2 + 13 h parameters, and activations of its own",
        "in proportion",
    ),
    "hidden_size": Effect(
        ("num_attention_heads divides it",),
        "parameters grow with its square, activations in proportion",
        "with its square; attention over the tokens and the output layer in proportion",
    ),
    "num_attention_heads": Effect(
        ("divides hidden_size", "tensor_model_parallel_size divides it"),
        "attention scores, 5 a s^2 b bytes a layer, where attention is not fused",
        "next to none by itself: the products are as large, in more pieces",
    ),
    "seq_length": Effect(
        (
            "at most max_position_embeddings",
            "context_parallel_size c > 1: a multiple of 2 c",
            "sequence_parallel: a multiple of t c",
        ),
        "activations grow in proportion; attention scores, where they are kept, with its square",
        "in proportion; attention over the tokens with its square",
    ),
    "max_position_embeddings": Effect(("at least seq_length",), "h parameters each"),
    "vocab_size": Effect(
        ("at least the tokenizer's of the data (seen where the data is)",),
        "h parameters each in the embedding, which is the output layer too; s b V logits in fp32",
        "the output layer, in proportion",
    ),
    "make_vocab_size_divisible_by": Effect(
        (), "up to so many rows more, times t (engine torch: once)", "those rows; sizes in multiples of 128 are fast"
    ),
    "hidden_dropout": Effect((), "masks of one byte an element: 2 s b h a layer", "one pass over the activations each"),
    "attention_dropout": Effect(
        (), "masks of one byte an element: a s^2 b a layer, where attention is not fused", "one pass over the scores"
    ),
    "init_method_std": Effect(),
    "checkpoint_activations": Effect(
        ("megatron-core: recompute_granularity",),
        "2 s b h bytes a layer instead of all activations, and one layer's while it is worked on",
        "a third more products in the layers: their forward pass is done twice",
    ),
    "checkpoint_num_layers": Effect(
        ("needs checkpoint_activations", "divides num_layers where there is no pipeline"),
        "stored states become fewer by this factor, the layers that are worked on at a time more",
    ),
    "partition_activations": Effect(_STORED, "what is stored is divided by t", "gathers each stored state again"),
    "checkpoint_in_cpu": Effect(
        _STORED, "what is stored moves to the host's memory", "copies to the host and back, over PCIe"
    ),
    "contiguous_checkpointing": Effect(
        (*_STORED, "needs partition_activations"), "no gaps between what is stored", "a copy of each stored state"
    ),
    "synchronize_each_layer": Effect(_STORED, "", "waits for the device around each stored layer"),
    "recompute_granularity": Effect(
        (),
        "full: 2 s b h bytes a layer are kept; selective: all but the attention scores, 5 a s^2 b bytes a layer",
        "full: a third more products in the layers; selective: attention over the tokens twice",
    ),
    "recompute_method": Effect(
        (_FULL,), "uniform: all layers of a stage; block: the first ones only, the others keep all activations"
    ),
    "recompute_num_layers": Effect(
        (_FULL, "recompute_method uniform: divides the layers of a (virtual) stage"),
        "uniform: stored states become fewer by this factor; block: layers beyond it keep all activations",
        "block: a third more products in so many layers",
    ),
}

_PARALLEL: Final = {
    "strategy": Effect(
        (
            "megatron-core: ddp",
            "fsdp: engine torch",
            "ddp, fsdp: zero_stage 0",
            "megatron-deepspeed with ddp: no pipeline, one micro-batch a step",
        ),
        "ddp: every rank holds all states of its part of the model; fsdp: 16 / d bytes a parameter, and a layer whole;"
        " zero: see zero_stage",
        "fsdp gathers the weights twice a micro-batch",
    ),
    "data_parallel_shard_size": Effect(
        ("needs strategy fsdp", "divides d"),
        "states are divided by it, and not by d",
        "weights are gathered from so many ranks; gradients go to the others once a step",
    ),
    "pipeline_schedule": Effect(
        (
            "1f1b: as many micro-batches as stages, or more",
            "interleaved: needs virtual_pipeline_model_parallel_size 2 or more",
        ),
        "gpipe: activations of all m micro-batches; 1f1b: of up to p",
        "gpipe and 1f1b wait (p - 1) / m of a step, interleaved less",
    ),
    "zero_stage": Effect(
        (
            "needs strategy zero",
            "megatron-deepspeed: 0 or 1 with a pipeline, 1 or more with fp16",
        ),
        "bytes a parameter in 16 bits with Adam: 16, 4 + 12 / d, 2 + 14 / d, 16 / d at stages 0, 1, 2, 3",
        "stage 1 exchanges half as much again as stage 0; stages 2 and 3 do so after every micro-batch",
    ),
    "tensor_model_parallel_size": Effect(
        (
            "torch: not with strategy zero",
            "divides num_attention_heads",
            "t p c divides the slots",
        ),
        "layers and embedding are divided by it; of the activations (34 s b h bytes a layer) 24 of 34 parts are",
        "four all-reduces of s b h elements a layer and micro-batch: wants the fast links within a node",
    ),
    "pipeline_model_parallel_size": Effect(
        (
            "torch: not with strategy zero",
            "megatron-core: divides num_layers; others: at most num_layers",
            "megatron-deepspeed: needs strategy zero and zero_stage 0 or 1",
            "t p c divides the slots",
        ),
        "layers are divided by it; the first stage keeps the activations of up to p micro-batches",
        "(p - 1) / m of the time of a step is spent waiting; the messages between stages are small",
    ),
    "virtual_pipeline_model_parallel_size": Effect(
        (
            "torch: goes with pipeline_schedule interleaved",
            "needs pipeline_model_parallel_size 2 or more",
            "divides the layers of a stage",
            "global_batch_size: a multiple of micro_batch_size x d p",
        ),
        "the first stage keeps 1 + (p - 1) / (p v) times the activations, v being this",
        "the waiting is divided by it; v times as many messages between stages",
    ),
    "context_parallel_size": Effect(
        ("seq_length: a multiple of twice this", "t p c divides the slots"),
        "activations are divided by it, parameters are not",
        "keys and values of each layer go round its ranks",
    ),
    "sequence_parallel": Effect(
        ("needs tensor_model_parallel_size 2 or more", "seq_length: a multiple of t c"),
        "the other 10 of 34 parts of the activations are divided by t too",
        "as much is exchanged: reduce-scatters and all-gathers instead of all-reduces",
    ),
    "use_distributed_optimizer": Effect(
        (),
        "the optimizer's states (12 bytes a parameter in 16 bits, 8 in fp32) are divided by d c",
        "as much is exchanged: a reduce-scatter and an all-gather instead of an all-reduce",
    ),
}

_BATCH: Final = {
    "micro_batch_size": Effect(
        ("micro_batch_size x d divides global_batch_size",),
        "activations in proportion",
        "larger products keep a device busier; fewer micro-batches make a pipeline wait longer",
    ),
    "global_batch_size": Effect(
        (
            "a multiple of micro_batch_size x d",
            "an interleaved pipeline: a multiple of micro_batch_size x d p",
            "megatron-deepspeed with strategy ddp: micro_batch_size x d",
        ),
        "none: micro-batches are worked through one after another",
        "a step takes as much longer; of it the exchange of gradients and a pipeline's waiting become a smaller part",
    ),
}

EFFECTS: Final = {
    **{f"model.{name}": effect for name, effect in _MODEL.items()},
    **{f"parallel.{name}": effect for name, effect in _PARALLEL.items()},
    **{f"batch.{name}": effect for name, effect in _BATCH.items()},
    "precision": Effect(
        ("megatron-deepspeed: fp16 or fp32", "megatron-deepspeed with strategy zero: fp16 needs zero_stage 1 or more"),
        "bf16 and fp16 halve activations and (not engine torch with ddp) weights, beside which fp32 ones remain",
        "matrix products in 16 bits run on tensor cores, many times as fast as fp32",
    ),
    "data.vocab_file": Effect(("megatron-deepspeed needs it",)),
    "data.merge_file": Effect(("megatron-deepspeed needs it",)),
    "optimizer.lr": Effect(("at least min_lr",)),
    "optimizer.min_lr": Effect(("at most lr",)),
    "optimizer.lr_warmup_iters": Effect(
        (
            "less than lr_decay_iters, or than train_iters where that is left out",
            "megatron-deepspeed: at most half of it",
        )
    ),
    "optimizer.lr_decay_iters": Effect(("more than lr_warmup_iters",)),
    "train.seed": Effect(("megatron-deepspeed: 1 or more",)),
    "train.checkpoint_folder": Effect(("needs train.save",)),
    "megatron_args": Effect(("no option that the experiment has a field for", "none of the fused softmax kernels")),
}
"""By the field's path; every field under :data:`COMPLETE`. The engines' own tables say which of them has a field."""

COMPLETE: Final = ("model.", "parallel.", "batch.", "precision")
"""Beginnings of the paths of fields that do something to memory or time, or could be thought to."""

LETTERS: Final = (
    "s tokens of a sample, b samples of a micro-batch, h hidden size, a heads, V rows of the vocabulary; t, p, c, d"
    " tensor, pipeline, context and data parallel size; m micro-batches of a step"
)
"""What the formulas above call what."""
