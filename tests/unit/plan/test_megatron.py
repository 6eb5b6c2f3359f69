"""What Megatron v1.1.5 cannot run, and the numbers of its ranks."""

import pytest

from tests.experiments import make_plan
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.plan import Plan

BASE = """\
name: tiny
engine: megatron-deepspeed
model: {num_layers: 60, hidden_size: 96, num_attention_heads: 16, seq_length: 16}
batch: {micro_batch_size: 2}
data: {data_path: data/x, vocab_file: v, merge_file: m}
precision: fp32
train: {train_iters: 30}
"""
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"


def planned(ranks: int, *overrides: str) -> Plan:
    return make_plan(parse_experiment(BASE, "e.yaml", overrides), {"a": range(ranks)}, "e.yaml")


@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [
        (2, [f"{PP}=2", "parallel.zero_stage=2"],
         "parallel.zero_stage: DeepSpeed's pipeline works with ZeRO 0 and 1 only; got 2; "
         "use 1, or set pipeline_model_parallel_size to 1"),
        (3, [f"{TP}=3"], f"{TP}: must divide num_attention_heads 16; got 3; use 2 or 4"),
        (64, [f"{PP}=64"], f"{PP}: must be at most num_layers 60; got 64; use 60 or fewer"),
        (1, ["precision=fp16"],
         "parallel.zero_stage: DeepSpeed does not scale Megatron v1.1.5's fp16 loss at stage 0; got 0; "
         "use 1, which has the same losses, or strategy ddp"),
        (2, [f"{PP}=2", "parallel.strategy=ddp"],
         f"{PP}: Megatron v1.1.5 without DeepSpeed has no pipeline; got 2; set it to 1, or strategy to zero"),
        (1, ["parallel.strategy=ddp", "parallel.zero_stage=1"],
         "parallel.zero_stage: strategy ddp keeps everything on every rank; got 1; set it to 0, or strategy to zero"),
        (2, ["parallel.strategy=ddp", "batch.global_batch_size=8"],
         "batch.global_batch_size: Megatron v1.1.5 without DeepSpeed does not accumulate gradients; got 8; "
         "use 4, or strategy zero"),
        (1, ["precision=bf16"],
         "precision: Megatron v1.1.5 supports fp16 and fp32; got 'bf16'; use fp16 on GPUs, or fp32"),
        (1, ["data.merge_file=null"],
         "data.merge_file: Megatron v1.1.5 reads GPT-2's tokenizer; got nothing; "
         "name the file that the data was tokenized with (the demo's are in data/demo/tokenizer)"),
        (1, ["optimizer.lr_warmup_iters=16", "optimizer.lr_decay_iters=31"],
         "optimizer.lr_warmup_iters: Megatron v1.1.5 reaches lr only in a warm-up of at most half of"
         " lr_decay_iters 31; got 16; use 15 or less"),
        (1, ["optimizer.lr_warmup_fraction=0.6", "optimizer.lr_decay_iters=31"],
         "optimizer.lr_warmup_fraction: Megatron v1.1.5 reaches lr only in a warm-up of at most half of"
         " lr_decay_iters 31; got 0.6; use 0.5 or less"),
        (1, ["train.seed=0"], "train.seed: Megatron v1.1.5 needs a positive seed; got 0; use 1 or more"),
        (1, ["megatron_args=[--scaled-masked-softmax-fusion]"],
         "megatron_args: Megatron v1.1.5's fused softmax kernels do not compile since torch 1.11; "
         "got --scaled-masked-softmax-fusion; leave it out"),
        (1, ["model.swiglu=true"],
         "model.swiglu: Megatron-LM v1.1.5 has GPT-2's layers: the MLP has GELU; got true; "
         "leave it out, or use engine torch or megatron-core"),
        (1, ["train.load=megatron:checkpoints/345m"],
         "train.load: is how engines torch and megatron-core start from v1.1.5's weights; it resumes from a"
         " folder; got megatron:checkpoints/345m; set it to checkpoints/345m, or use another engine"),
        (1, ["train.load=hf:models/gpt2"],
         "train.load: Megatron v1.1.5 loads its own checkpoints only; got hf:models/gpt2; "
         "use engine torch or megatron-core"),
        (1, ["megatron_args=[--batch-size=9]"],
         "megatron_args: the experiment has a field for this; got --batch-size; set batch.micro_batch_size"),
        (1, ["train.save=false", "train.checkpoint_folder=x"],
         "train.checkpoint_folder: nothing is saved; got x; set train.save to true, or leave it out"),
        (1, ["model.checkpoint_activations=true", "model.checkpoint_num_layers=7"],
         "model.checkpoint_num_layers: must divide num_layers 60: Megatron v1.1.5 would run the first ones again; "
         "got 7; use 6 or 10"),
        (1, ["model.checkpoint_num_layers=2"],
         "model.checkpoint_num_layers: is about stored activations, and none are stored; got 2; "
         "set model.checkpoint_activations to true, or leave it out"),
        (1, ["model.partition_activations=true"],
         "model.partition_activations: is about stored activations, and none are stored; got true; "
         "set model.checkpoint_activations to true, or leave it out"),
        (1, ["model.checkpoint_activations=true", "model.contiguous_checkpointing=true"],
         "model.contiguous_checkpointing: needs partition_activations; got true; "
         "set model.partition_activations to true, or leave it out"),
        (1, ["parallel.strategy=ddp", "model.checkpoint_activations=true", "model.checkpoint_in_cpu=true"],
         "model.checkpoint_in_cpu: needs DeepSpeed, which strategy ddp does not use; got true; "
         "set it to false, or strategy to zero"),
    ],
)  # fmt: skip
def test_refused_with_the_nearest_choice(ranks: int, overrides: list[str], expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(ranks, *overrides)
    assert str(caught.value) == f"e.yaml: {expected}"


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (32, [f"{PP}=32"]),
        (7, [f"{PP}=7", "model.checkpoint_activations=true", "model.checkpoint_num_layers=11"]),
        (1, ["precision=fp16", "parallel.zero_stage=1"]),
        (1, ["precision=fp16", "parallel.strategy=ddp"]),
    ],
)
def test_what_the_engine_runs_is_not_refused(ranks: int, overrides: list[str]) -> None:
    assert planned(ranks, *overrides).world_size == ranks


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.checkpoint_num_layers=2",
         "model.checkpoint_num_layers: engine torch stores every layer's; got 2; "
         "leave it out, or use engine megatron-deepspeed"),
        ("model.checkpoint_in_cpu=true",
         "model.checkpoint_in_cpu: engine torch has no such option; got true; "
         "leave it out, or use engine megatron-deepspeed"),
        ("megatron_args=[--fp16, --x]",
         "megatron_args: engine torch has no such arguments; got --fp16 --x; "
         "leave it out, or use engine megatron-deepspeed"),
    ],
)  # fmt: skip
def test_the_torch_engine_does_not_pretend(override: str, expected: str) -> None:
    with pytest.raises(RequestError) as caught:
        planned(1, "engine=torch", override)
    assert str(caught.value) == f"e.yaml: {expected}"
