"""Whether a checkpoint fits an experiment, before anything is loaded."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.engines.test_fields import leaves
from tests.unit.train.experiments import experiment
from tridock.engines.progress import _EXPERTS, _MODEL, Progress, check_fit, read_progress
from tridock.errors import RequestError
from tridock.experiment import Experiment
from tridock.experiment.schema import TRAINING

ZERO = {"parallel.strategy": "zero", "parallel.zero_stage": 2}


def progress(**fields: object) -> Progress:
    return Progress.of(experiment(**fields), 2, 100)


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"a": 1}', "Progress.__init__() got an unexpected keyword argument 'a'"),
    ],
)
def test_half_a_checkpoint(tmp_path: Path, content: str | None, got: str) -> None:
    if content is not None:
        (tmp_path / "tridock.json").write_text(content)
    with pytest.raises(RequestError) as caught:
        read_progress(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/tridock.json: cannot be read; got {got}; use another checkpoint: this one is incomplete"
    )


def test_every_difference_is_named(tmp_path: Path) -> None:
    saved = replace(progress(**ZERO), data_parallel_size=4)  # which may be another
    sizes = {"model.hidden_size": 32, "model.max_position_embeddings": 64}
    wanted = progress(**{**sizes, **ZERO, "parallel.zero_stage": 1})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="fp32"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    assert str(caught.value).splitlines() == [
        f"model.hidden_size: {where} 16; got 32; {todo}",
        f"model.max_position_embeddings: {where} 8; got 64; {todo}",
        f"parallel.zero_stage: {where} 2; got 1; {todo}",
        f"precision: {where} bf16; got fp32; {todo}",
    ]


def test_heads_have_the_size_of_the_checkpoints(tmp_path: Path) -> None:
    plain, same, other = (
        progress(**ZERO, **{"model.num_attention_heads": 2, "model.kv_channels": size}) for size in (None, 8, 12)
    )
    check_fit(tmp_path, plain, same)
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, plain, other)
    assert str(caught.value).startswith("model.kv_channels: ")


def test_a_mixture_has_the_experts_of_the_checkpoint(tmp_path: Path) -> None:
    core = {"engine": "megatron-core", "parallel.strategy": "ddp", "model.add_bias_linear": False}
    four = {**core, "model.num_moe_experts": 4, "model.moe_ffn_hidden_size": 24}
    gated = {"model.moe_shared_expert_intermediate_size": 8, "model.moe_shared_expert_gate": True}
    check_fit(tmp_path, progress(**four), progress(**four))
    check_fit(tmp_path, progress(**core), progress(**core))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    for saved, wanted, named in (
        (four, {**four, "model.num_moe_experts": 8}, {"num_moe_experts": "4; got 8"}),
        (four, core, {"num_moe_experts": "4; got None"}),
        (core, {**core, "model.num_moe_experts": 4}, {"num_moe_experts": "None; got 4"}),
        (four, {**four, "model.moe_ffn_hidden_size": 16}, {"moe_ffn_hidden_size": "24; got 16"}),
        (four, {**four, "model.moe_router_topk": 3}, {"moe_router_topk": "2; got 3"}),
        ({**four, **gated}, four, {"moe_shared_expert_intermediate_size": "8; got None",
                                   "moe_shared_expert_gate": "True; got False"}),
    ):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            check_fit(tmp_path, progress(**saved), progress(**wanted))
        found = str(caught.value).splitlines()
        for name, values in named.items():
            assert f"model.{name}: {where} {values}; {todo}" in found


def test_ddp_may_change_what_does_not_matter_to_it(tmp_path: Path) -> None:
    ddp = {"parallel.strategy": "ddp"}
    saved = replace(progress(**ddp), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**ddp))
    check_fit(tmp_path, saved, progress(**ddp, precision="fp32"), ["precision"])
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(**ZERO))
    assert str(caught.value).startswith(f"parallel.strategy: the checkpoint {tmp_path} was saved with ddp; got zero; ")


def test_megatron_core_may_change_its_layout_and_not_its_optimizer(tmp_path: Path) -> None:
    core = {"engine": "megatron-core", "precision": "fp16"}
    saved = replace(progress(**core), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**core, **{"parallel.tensor_model_parallel_size": 2}))
    wanted = progress(**core, **{"parallel.use_distributed_optimizer": True})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="bf16"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start from scratch"
    assert str(caught.value).splitlines() == [
        f"precision: {where} fp16; got bf16; {todo}",
        f"parallel.use_distributed_optimizer: {where} False; got True; {todo}",
    ]


def test_a_checkpoint_of_another_engine(tmp_path: Path) -> None:
    saved = progress(**{"parallel.strategy": "ddp"}, precision="fp32")
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(engine="megatron-core", precision="fp32"))
    assert str(caught.value) == (
        f"engine: the checkpoint {tmp_path} was saved with torch; got megatron-core;"
        " use the same, or start from scratch"
    )


SCHEDULE = {"optimizer.lr_decay_style": "cosine", "optimizer.lr_decay_iters": None, "train.train_iters": 100}
HARMLESS = {
    "name": "other", "train.train_iters": 200, "optimizer.lr_decay_iters": 100, "train.log_interval": 3,
    "train.save_interval": 7, "train.async_save": False, "trackers": [{"name": "wandb"}], "env": {"A": "b"},
    "batch.micro_batch_size": 1, "restart.max": 2, "model.checkpoint_activations": True, "fp16.loss_scale": 8.0,
}  # fmt: skip


def test_what_changes_no_loss_needs_no_choice(tmp_path: Path) -> None:
    check_fit(tmp_path, progress(**SCHEDULE), progress(**SCHEDULE | HARMLESS))
    flat = SCHEDULE | {"optimizer.lr_decay_style": "constant"}
    check_fit(tmp_path, progress(**flat), progress(**flat | {"train.train_iters": 200}))


def test_another_training_is_chosen_by_name(tmp_path: Path) -> None:
    saved = progress(**SCHEDULE)
    other = {"train.train_iters": 200, "batch.global_batch_size": 64, "optimizer.weight_decay": 0.5, "train.seed": 9}
    wanted = progress(**SCHEDULE | other)
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, wanted)
    names = "batch.global_batch_size, optimizer.lr_decay_iters, optimizer.weight_decay, train.seed"
    where = f"the checkpoint {tmp_path} was saved with"
    todo = f"use the same, or choose the new values: --set 'train.override_checkpoint=[{names}]'"
    batch = saved.training["batch.global_batch_size"]
    assert str(caught.value).splitlines() == [
        f"batch.global_batch_size: {where} {batch}; got 64; {todo}",
        f"train.seed: {where} 1234; got 9; {todo}",
        f"optimizer.lr_decay_iters: {where} 100; got 200; {todo}",
        f"optimizer.weight_decay: {where} 0.01; got 0.5; {todo}",
    ]
    check_fit(tmp_path, saved, wanted, names.split(", "))
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, wanted, names.split(", ")[1:])
    assert [it.where for it in caught.value.problems] == ["batch.global_batch_size"]
    assert names in str(caught.value)


def test_zeros_loss_scaler_is_the_checkpoints(tmp_path: Path) -> None:
    fp16 = {**ZERO, "precision": "fp16"}
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, progress(**fp16), progress(**fp16, **{"fp16.loss_scale": 8}), ["fp16.loss_scale"])
    assert str(caught.value) == (
        f"fp16.loss_scale: the checkpoint {tmp_path} was saved with 0; got 8; use the same, or start from scratch"
    )


def test_every_field_is_either_compared_or_changes_no_loss() -> None:
    """A new field has its place here, or in TRAINING."""
    fitting = {f"model.{name}" for name in (*_MODEL, *_EXPERTS)} | {
        *("engine", "parallel.strategy", "parallel.zero_stage", "parallel.use_distributed_optimizer"),
        *("model.kv_channels", "model.num_query_groups", "model.ffn_hidden_size", "model.moe_ffn_hidden_size"),
        *("model.max_position_embeddings", "model.vocab_size", "model.make_vocab_size_divisible_by"),
    }
    by_the_data = {"model.img_h", "model.img_w", "model.num_classes", "data.vocab_file", "data.merge_file"}
    evaluated = {"data.valid_data_path", "data.test_data_path"}
    at_the_start = {"model.preset", "model.init_method_std", "fp16.initial_scale_power"}
    how_it_runs = {
        "name", "program", "trackers", "notify", "env", "deepspeed", "batch.micro_batch_size", "model.transformer_impl",
        *(f"model.{name}" for name in ("checkpoint_activations", "checkpoint_num_layers", "partition_activations")),
        *(f"model.{name}" for name in ("checkpoint_in_cpu", "contiguous_checkpointing", "synchronize_each_layer")),
        *(f"model.recompute_{name}" for name in ("granularity", "method", "num_layers")),
    }  # fmt: skip
    sections = ("parallel.", "launch.", "restart.", "train.")
    left = {it for it in leaves(Experiment) if not it.startswith(sections)}
    assert left == ({*TRAINING} | (fitting | by_the_data | evaluated | at_the_start | how_it_runs) & left) - {
        it for it in TRAINING if it.startswith("train.")
    }
    assert {it for it in TRAINING if it.startswith("train.")} == {"train.seed", "train.tf32"}
