"""What megatron-core cannot run, what the others leave to it, and where its ranks stand."""

import pytest

from tests.experiments import make_plan
from tridock.engines import rank_program
from tridock.errors import RequestError
from tridock.experiment import parse_experiment
from tridock.plan import Plan

BASE = """\
name: tiny
engine: megatron-core
model: {num_layers: 24, hidden_size: 96, num_attention_heads: 16, seq_length: 32}
batch: {micro_batch_size: 2}
data: {data_path: data/x}
train: {train_iters: 30}
"""
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
VPP, CP = "parallel.virtual_pipeline_model_parallel_size", "parallel.context_parallel_size"
FIRST, LAST = (f"parallel.decoder_{which}_pipeline_num_layers" for which in ("first", "last"))
SP = "parallel.sequence_parallel"
ELSEWHERE = "leave it out, or use engine megatron-deepspeed"
SHARE = "leave it out; parallel.use_distributed_optimizer shares out the optimizer's state"


def planned(ranks: int, *overrides: str) -> Plan:
    return make_plan(parse_experiment(BASE, "e.yaml", overrides), {"a": range(ranks)}, "e.yaml")


def refused(ranks: int, *overrides: str) -> str:
    with pytest.raises(RequestError) as caught:
        planned(ranks, *overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [
        (3, [f"{TP}=3"], f"{TP}: must divide num_attention_heads 16; got 3; use 2 or 4"),
        (5, [f"{PP}=5"], f"{PP}: must divide num_layers 24; got 5; use 4 or 6, or num_layers 25"),
        (5, [f"{PP}=5", f"{VPP}=2", "batch.global_batch_size=10"],
         f"{PP}: must divide num_layers 24; got 5; use 4 or 6, or num_layers 20"),
        (2, [f"{VPP}=2"],
         f"{VPP}: there is no pipeline to interleave; got 2; "
         "leave it out, or set pipeline_model_parallel_size to 2 or more"),
        (2, [f"{PP}=2", f"{VPP}=5", "batch.global_batch_size=8"],
         f"{VPP}: must divide the 12 layers of a stage; got 5; use 4 or 6"),
        (4, [f"{PP}=2", f"{VPP}=2", "batch.global_batch_size=12"],
         "batch.global_batch_size: an interleaved pipeline needs a multiple of micro_batch_size 2 x"
         " data parallel size 2 x pipeline_model_parallel_size 2; got 12; use 8 or 16"),
        (2, [f"{PP}=2", f"{VPP}=2"],
         "batch.global_batch_size: an interleaved pipeline needs a multiple of micro_batch_size 2 x"
         " data parallel size 1 x pipeline_model_parallel_size 2; got 2; use 4"),
        (4, [f"{PP}=4", f"{FIRST}=5"],
         f"{FIRST}: must leave the other 3 stages equally many of 24 layers; got 5; use 3 or 6"),
        (4, [f"{PP}=4", f"{FIRST}=7", f"{LAST}=6"],
         f"{LAST}: must leave the other 2 stages equally many of 17 layers; got 6; use 5 or 7"),
        (3, [f"{PP}=3", f"{FIRST}=4", f"{LAST}=20"],
         f"{LAST}: must leave the other stage some of 20 layers; got 20; use 19"),
        (4, [f"{PP}=4", f"{FIRST}=24", f"{LAST}=1"],
         f"{LAST}: must leave the other 2 stages equally many of 0 layers; got 1; set {FIRST} to less"),
        (2, [f"{PP}=2", f"{FIRST}=13", f"{LAST}=12"],
         f"{LAST}: the two stages must have num_layers 24 together; got 12; use 11"),
        (1, [f"{LAST}=12"],
         f"{LAST}: there is no pipeline: one stage has all 24 layers; got 12; "
         "leave it out, or set pipeline_model_parallel_size to 2 or more"),
        (2, [f"{PP}=2", f"{VPP}=2", "batch.global_batch_size=8", f"{FIRST}=10", f"{LAST}=14"],
         f"{LAST}: megatron-core derives it from the first stage's if it interleaves two stages; got 14; leave it out"),
        (4, [f"{PP}=4", f"{VPP}=2", "batch.global_batch_size=8", f"{FIRST}=6", f"{LAST}=4"],
         f"{VPP}: must divide the layers of each stage: 6, 7 and 4; got 2; use 1"),
        (4, [f"{PP}=4", f"{FIRST}=4", f"{LAST}=4", "model.recompute_granularity=full",
             "model.recompute_method=uniform", "model.recompute_num_layers=3"],
         "model.recompute_num_layers: recompute_method uniform needs groups that divide the layers of each stage:"
         " 4 and 8; got 3; use 2 or 4"),
        (4, [f"{CP}=4", "model.seq_length=36"],
         "model.seq_length: must be a multiple of 2 x context_parallel_size 4; got 36; use 32 or 40"),
        (4, [f"{TP}=4", f"{SP}=true", "model.seq_length=30"],
         "model.seq_length: sequence_parallel needs a multiple of tensor_model_parallel_size 4; got 30; use 28 or 32"),
        (8, [f"{TP}=4", f"{CP}=2", f"{SP}=true", "model.seq_length=36"],
         "model.seq_length: sequence_parallel needs a multiple of tensor_model_parallel_size 4 x"
         " context_parallel_size 2; got 36; use 32 or 40"),
        (1, ["model.transformer_impl=transformer_engine", "precision=fp32"],
         "model.transformer_impl: TransformerEngine has no fused attention in fp32; got transformer_engine; "
         "set precision to bf16 or fp16, or use local"),
        (1, ["model.fp8=hybrid", "precision=fp32"],
         "model.fp8: needs TransformerEngine's layers, which are not used in fp32; got hybrid; "
         "set precision to bf16 or fp16, or leave it out"),
        (1, ["model.fp8=hybrid", "model.transformer_impl=local"],
         "model.fp8: needs TransformerEngine's layers; got model.transformer_impl local; leave one of the two out"),
        (4, ["model.fp8=e4m3", f"{TP}=4", "model.ffn_hidden_size=96"],
         "model.kv_channels: fp8 needs sizes of products on a rank that are multiples of 16; got 24; "
         "choose another size or layout, or leave model.fp8 out\n"
         "e.yaml: model.num_query_groups: fp8 needs sizes of products on a rank that are multiples of 16; got 72; "
         "choose another size or layout, or leave model.fp8 out\n"
         "e.yaml: model.ffn_hidden_size: fp8 needs sizes of products on a rank that are multiples of 16; got 24; "
         "choose another size or layout, or leave model.fp8 out"),
        (1, ["model.fp8=hybrid", "model.num_moe_experts=4", "model.add_bias_linear=false"],
         "model.fp8: a mixture of experts is not trained in fp8: its experts have any number of tokens; got hybrid; "
         "leave it out"),
        (2, ["model.num_moe_experts=4", "model.add_bias_linear=false", f"{TP}=2", f"{SP}=true",
             "model.moe_shared_expert_intermediate_size=25"],
         "model.moe_shared_expert_intermediate_size: must be a multiple of tensor_model_parallel_size 2; got 25; "
         "use 24 or 26"),
        (1, ["model.num_moe_experts=4", "model.add_bias_linear=false", "model.moe_router_topk=1"],
         "model.moe_router_pre_softmax: moe_router_topk 1 needs it: the softmax of one score is 1, and its router "
         "would not learn; got false; set it to true, or use 2 experts"),
        (1, ["model.moe_shared_expert_intermediate_size=24"],
         "model.moe_shared_expert_intermediate_size: needs model.num_moe_experts; got 24; leave it out"),
        (1, [f"{SP}=true"],
         f"{SP}: there are no tensor parallel ranks to split tokens; got true; "
         "leave it out, or set tensor_model_parallel_size to 2 or more"),
        (6, [f"{CP}=4"],
         "parallel: tensor x pipeline x context size 4 must divide the 6 slots of the hostfile; got 6 slots; "
         "use TP1 PP1 CP2 or TP1 PP1, or 4 or 8 slots"),
        (5, [f"{TP}=2", f"{PP}=2", f"{SP}=true"],
         "parallel: tensor x pipeline size 4 must divide the 5 slots of the hostfile; got 5 slots; use 4 or 8 slots"),
        (8, [f"{TP}=4", f"{CP}=2", f"{SP}=true", "model.seq_length=34"],
         "model.seq_length: must be a multiple of 2 x context_parallel_size 2; got 34; use 32 or 40"),
        (1, ["model.recompute_method=block"],
         "model.recompute_method: applies only to recompute_granularity full; got block; "
         "set model.recompute_granularity to full, or leave it out"),
        (1, ["model.recompute_granularity=selective", "model.recompute_num_layers=1"],
         "model.recompute_num_layers: applies only to recompute_granularity full; got 1; "
         "set model.recompute_granularity to full, or leave it out"),
        (1, ["model.recompute_granularity=full", "model.recompute_num_layers=1"],
         "model.recompute_method: recompute_granularity full needs it; got nothing; use uniform or block"),
        (1, ["model.recompute_granularity=full", "model.recompute_method=uniform"],
         "model.recompute_num_layers: recompute_granularity full needs it; got nothing; use 1 or more"),
        (2, [f"{PP}=2", "model.recompute_granularity=full", "model.recompute_method=uniform",
             "model.recompute_num_layers=5"],
         "model.recompute_num_layers: recompute_method uniform needs groups that divide the 12 layers of a stage; "
         "got 5; use 4 or 6"),
        (1, ["parallel.strategy=zero"],
         f"parallel.strategy: megatron-core runs without DeepSpeed; got zero; {SHARE}"),
        (1, ["parallel.zero_stage=1"],
         f"parallel.zero_stage: megatron-core runs without DeepSpeed; got 1; {SHARE}"),
        (1, ["model.checkpoint_activations=true"],
         "model.checkpoint_activations: has another name in megatron-core; got true; "
         "set model.recompute_granularity to full, recompute_method to uniform and recompute_num_layers to 1"),
        (1, ["model.checkpoint_num_layers=2"],
         "model.checkpoint_num_layers: has another name in megatron-core; got 2; "
         "set model.recompute_num_layers instead"),
        (1, ["model.checkpoint_in_cpu=true"],
         f"model.checkpoint_in_cpu: engine megatron-core has no such option; got true; {ELSEWHERE}"),
        (4, [f"{PP}=2", f"{CP}=2", "parallel.use_tp_pp_dp_mapping=true"],
         "parallel.use_tp_pp_dp_mapping: megatron-core does not number the ranks so with context parallelism; "
         "got true; leave it out, or set context_parallel_size to 1"),
        (1, ["train.save=false", "train.checkpoint_folder=x"],
         "train.checkpoint_folder: nothing is saved; got x; set train.save to true, or leave it out"),
        (1, ["megatron_args=[--swiglu, --x]"],
         f"megatron_args: engine megatron-core has no such arguments; got --swiglu --x; {ELSEWHERE}"),
    ],
)  # fmt: skip
def test_refused_with_the_nearest_choice(ranks: int, overrides: list[str], expected: str) -> None:
    assert refused(ranks, *overrides) == f"e.yaml: {expected}"


@pytest.mark.parametrize("engine", ["torch", "megatron-deepspeed"])
@pytest.mark.parametrize(
    ("override", "got"),
    [
        (f"{CP}=1", None),
        (f"{SP}=true", "true"),
        ("parallel.use_distributed_optimizer=true", "true"),
        ("model.recompute_granularity=selective", "selective"),
        ("model.recompute_method=uniform", "uniform"),
        ("model.recompute_num_layers=1", "1"),
    ],
)
def test_the_other_engines_do_not_pretend(engine: str, override: str, got: str | None) -> None:
    common = [f"engine={engine}", "precision=fp32", "parallel.strategy=zero", "data.vocab_file=v", "data.merge_file=m"]
    if got is None:
        planned(1, *common, override)
        return
    field = override.partition("=")[0]
    todo = "leave it out, or use engine megatron-core"
    assert refused(1, *common, override) == f"e.yaml: {field}: engine {engine} has no such option; got {got}; {todo}"


def test_a_virtual_pipeline_needs_a_pipeline_of_its_kind() -> None:
    others = ["precision=fp32", "parallel.strategy=zero", "data.vocab_file=v", "data.merge_file=m", f"{VPP}=2"]
    assert refused(1, "engine=megatron-deepspeed", *others) == (
        f"e.yaml: {VPP}: engine megatron-deepspeed has no such option; got 2; "
        "leave it out, or use engine torch or megatron-core"
    )
    assert refused(1, "engine=torch", *others) == (
        f"e.yaml: {VPP}: DeepSpeed's ZeRO does not split the torch engine's model; got 2; "
        "set it to 1, or strategy to fsdp or ddp"
    )


def test_a_block_may_be_longer_than_a_stage() -> None:
    full = ["model.recompute_granularity=full", "model.recompute_method=block", "model.recompute_num_layers=13"]
    assert planned(2, f"{PP}=2", *full).pipeline_model_parallel_size == 2


def test_the_strategy_needs_no_word() -> None:
    assert parse_experiment(BASE, "e.yaml").parallel.strategy == "ddp"
    assert parse_experiment(BASE, "e.yaml", [f"{TP}=2"]).parallel.strategy == "ddp"
    assert parse_experiment(BASE, "e.yaml", ["engine=torch"]).parallel.strategy == "zero"
    with pytest.raises(RequestError) as caught:
        parse_experiment(BASE, "e.yaml", ["parallel=3"])
    assert str(caught.value) == (
        "e.yaml: parallel: must be a section of fields; got 3; write `field: value` lines below it"
    )


def test_the_layout_as_text() -> None:
    assert planned(8, f"{TP}=2", f"{PP}=2").layout == "TP2 PP2 DP2"
    plan = planned(8, f"{PP}=2", f"{VPP}=3", f"{CP}=2", "batch.global_batch_size=8")
    assert plan.layout == "TP1 PP2 VPP3 CP2 DP2"
    assert planned(4, f"{PP}=4", f"{FIRST}=7", f"{LAST}=5").layout == "TP1 PP4 FIRST7 LAST5 DP1"
    assert Plan.of(plan.document()) == plan
    assert plan.document()["context_parallel_size"] == 2
    assert (plan.data_parallel_size, plan.accumulation_steps) == (2, 2)


def test_the_program_of_a_rank() -> None:
    experiment = parse_experiment(BASE, "e.yaml", ["env={NCCL_DEBUG: INFO}"])
    program = rank_program(experiment, planned(2), "id", "/workspace/runs/id")
    assert program.module == "tridock.train.megatron_core.pretrain_gpt"
    assert program.arguments == ("--run-folder", "/workspace/runs/id")
    assert program.files == {}
    assert program.env == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "DEEPSPEED_TIMEOUT": "10080",
        "NCCL_DEBUG": "INFO",
        "TRIDOCK_RUN_ID": "id",
        "TRIDOCK_WORLD_SIZE": "2",
    }
