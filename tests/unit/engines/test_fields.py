"""Every field of an experiment, asked of every engine: it is honoured, refused, or declared as never read."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.experiments import make_plan, with_fields
from tests.sources import nodes
from tridock.engines import ENGINES, RankProgram, rank_program
from tridock.engines.fields import Declared, Fields, Honoured, Refused, Unused
from tridock.experiment import Experiment
from tridock.plan.legality import layout_problems

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("sources")
BASE: dict[str, Any] = {
    "name": "tiny",
    "model": {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 8, "seq_length": 64},
    "batch": {"micro_batch_size": 2, "global_batch_size": 16},
    "data": {"data_path": "data/x"},
    "precision": "fp32",
    "train": {"train_iters": 40, "save_interval": 10},
}
IMAGES = {"model": {"preset": "resnet50"}, "parallel.strategy": "ddp"}
STORED = {"model.checkpoint_activations": True}
FULL = {"model.recompute_granularity": "full", "model.recompute_method": "uniform", "model.recompute_num_layers": 1}
MOE = {"model.num_moe_experts": 4, "model.add_bias_linear": False}
ROPE = {"model.position_embedding_type": "rope"}
PIPELINE = {"parallel.pipeline_model_parallel_size": 2}
INTERLEAVED = {
    **PIPELINE,
    "parallel.pipeline_schedule": "interleaved",
    "parallel.virtual_pipeline_model_parallel_size": 2,
}
ZERO, FSDP, DDP = ({"parallel.strategy": strategy} for strategy in ("zero", "fsdp", "ddp"))
FP16 = {"precision": "fp16", **DDP}
CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "name": ("other", {}),
    "engine": (None, {}),
    "program": ("nemo", {}),
    "model.preset": ("gpt2", {"model": {"preset": "gpt2-large", "seq_length": 64}}),
    "model.num_layers": (16, {}),
    "model.hidden_size": (128, {}),
    "model.num_attention_heads": (4, {}),
    "model.kv_channels": (16, {}),
    "model.num_query_groups": (2, {}),
    "model.ffn_hidden_size": (96, {}),
    "model.num_moe_experts": (8, MOE),
    "model.moe_router_topk": (3, MOE),
    "model.moe_router_pre_softmax": (True, MOE),
    "model.moe_ffn_hidden_size": (96, MOE),
    "model.moe_shared_expert_intermediate_size": (96, MOE),
    "model.moe_shared_expert_gate": (True, {**MOE, "model.moe_shared_expert_intermediate_size": 96}),
    "model.moe_router_load_balancing_type": ("seq_aux_loss", MOE),
    "model.moe_aux_loss_coeff": (0.1, MOE),
    "model.seq_length": (32, {}),
    "model.max_position_embeddings": (128, {}),
    "model.position_embedding_type": ("rope", {}),
    "model.rotary_base": (500, ROPE),
    "model.rotary_percent": (0.5, ROPE),
    "model.use_rope_scaling": (True, ROPE),
    "model.rope_scaling_type": ("yarn", {**ROPE, "model.use_rope_scaling": True}),
    "model.rope_scaling_factor": (32.0, {**ROPE, "model.use_rope_scaling": True}),
    "model.original_max_position_embeddings": (4096, {**ROPE, "model.use_rope_scaling": True}),
    "model.no_rope_freq": (4, ROPE),
    "model.normalization": ("RMSNorm", {}),
    "model.norm_epsilon": (1e-6, {}),
    "model.qk_layernorm": (True, {}),
    "model.qk_layernorm_all_heads": (True, {"model.qk_layernorm": True}),
    "model.use_post_norm": (True, {}),
    "model.swiglu": (True, {}),
    "model.activation_func": ("gelu", {}),
    "model.add_bias_linear": (False, {}),
    "model.add_qkv_bias": (True, {"model.add_bias_linear": False}),
    "model.add_attention_bias": (True, {"model.add_bias_linear": False}),
    "model.embedding_multiplier": (12.0, {}),
    "model.residual_multiplier": (0.22, {}),
    "model.attention_multiplier": (0.015625, {}),
    "model.logits_scaling": (8.0, {}),
    "model.untie_embeddings_and_output_weights": (True, {}),
    "model.vocab_size": (1000, {}),
    "model.make_vocab_size_divisible_by": (64, {}),
    "model.hidden_dropout": (0.0, {}),
    "model.attention_dropout": (0.0, {}),
    "model.init_method_std": (0.1, {}),
    "model.checkpoint_activations": (True, {}),
    "model.checkpoint_num_layers": (2, STORED),
    "model.partition_activations": (True, STORED),
    "model.checkpoint_in_cpu": (True, STORED),
    "model.contiguous_checkpointing": (True, {**STORED, "model.partition_activations": True}),
    "model.synchronize_each_layer": (True, STORED),
    "model.recompute_granularity": ("selective", {}),
    "model.recompute_method": ("block", FULL),
    "model.recompute_num_layers": (2, FULL),
    "model.transformer_impl": ("local", {}),
    "model.fp8": ("hybrid", {"precision": "bf16"}),
    "model.img_h": (64, IMAGES),
    "model.img_w": (64, IMAGES),
    "model.num_classes": (10, IMAGES),
    "parallel.strategy": ("zero", DDP),
    "parallel.data_parallel_shard_size": (2, FSDP),
    "parallel.reduce_gradients_once": (True, FSDP),
    "parallel.pipeline_schedule": ("gpipe", {**DDP, **PIPELINE}),
    "parallel.zero_stage": (1, ZERO),
    "parallel.tensor_model_parallel_size": (2, DDP),
    "parallel.pipeline_model_parallel_size": (2, DDP),
    "parallel.virtual_pipeline_model_parallel_size": (4, {**DDP, **INTERLEAVED}),
    "parallel.decoder_first_pipeline_num_layers": (3, {**DDP, **PIPELINE}),
    "parallel.decoder_last_pipeline_num_layers": (3, {**DDP, **PIPELINE}),
    "parallel.use_tp_pp_dp_mapping": (True, {**DDP, **PIPELINE}),
    "parallel.context_parallel_size": (2, {}),
    "parallel.expert_model_parallel_size": (2, MOE),
    "parallel.expert_tensor_parallel_size": (2, MOE),
    "parallel.sequence_parallel": (True, {"parallel.tensor_model_parallel_size": 2}),
    "parallel.use_distributed_optimizer": (True, {}),
    "parallel.tp_comm_overlap": (
        True,
        {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True, "precision": "bf16"},
    ),
    "batch.micro_batch_size": (1, {}),
    "batch.global_batch_size": (32, ZERO),
    "data.data_path": ("data/y", {}),
    "data.train_data_path": ("data/y", {"data.data_path": None, "data.train_data_path": "data/x"}),
    "data.valid_data_path": ("data/y", {"data.data_path": None, "data.train_data_path": "data/x"}),
    "data.test_data_path": ("data/y", {"data.data_path": None, "data.train_data_path": "data/x"}),
    "data.split": ("98,1,1", {}),
    "data.vocab_file": ("other.json", {}),
    "data.merge_file": ("other.txt", {}),
    "optimizer.lr": (0.5, {}),
    "optimizer.min_lr": (0.0, {}),
    "optimizer.lr_decay_style": ("linear", {}),
    "optimizer.lr_warmup_iters": (3, {}),
    "optimizer.lr_warmup_fraction": (0.25, {}),
    "optimizer.lr_decay_iters": (20, {}),
    "optimizer.weight_decay": (0.5, {}),
    "optimizer.adam_beta1": (0.5, {}),
    "optimizer.adam_beta2": (0.5, {}),
    "optimizer.adam_eps": (0.5, {}),
    "optimizer.clip_grad": (0.5, {}),
    "precision": ("fp16", DDP),
    "fp16.loss_scale": (8.0, FP16),
    "fp16.initial_scale_power": (8, FP16),
    "fp16.loss_scale_window": (8, FP16),
    "fp16.hysteresis": (8, FP16),
    "train.train_iters": (50, {}),
    "train.log_interval": (5, {}),
    "train.eval_interval": (5, {}),
    "train.eval_iters": (5, {}),
    "train.sample_prompts": (("Once",), {}),
    "train.sample_tokens": (5, {}),
    "train.save_interval": (5, {}),
    "train.save": (False, {}),
    "train.keep_checkpoints": (2, {}),
    "train.async_save": (False, {}),
    "train.checkpoint_copies": (2, {}),
    "train.checkpoint_folder": ("elsewhere", {}),
    "train.load": ("runs/other/checkpoints", {}),
    "train.override_checkpoint": (("optimizer.lr",), {}),
    "train.seed": (7, {}),
    "train.compile": (True, {}),
    "train.tf32": (True, {}),
    "train.tensorboard": (False, {}),
    "train.profile_iters": (5, {}),
    "launch.launcher": ("ssh", {}),
    "launch.master_port": (29999, {}),
    "launch.allow_other_tokenizer": (True, {}),
    "launch.hang_timeout": (99, {}),
    "restart.max": (3, {}),
    "restart.window": (99, {}),
    "restart.node_timeout": (99, {}),
    "restart.min_nodes": (2, {}),
    "trackers": ([{"name": "wandb"}], {}),
    "notify": ([{"variable": "A"}], {}),
    "megatron_args": (("--num-workers", "0"), {}),
    "deepspeed": ({"wall_clock_breakdown": True}, ZERO),
    "env": ({"A": "b"}, {}),
}
"""Each field with a value that is not its default, and what else the experiment needs for it to matter."""
LAUNCH = ("launchers", "ops", "node")
"""Rooms that honour what starts and supervises a run, whichever engine it has."""
OF_TORCH = [f"tridock.train.{room}" for room in ("bench", "models.gpt", "models.layered", "models.resnet", "parallel")]
"""Rooms of engine torch, of which the others import helpers that read no field."""


def declared(fields: Fields, path: str) -> Declared | None:
    """What is declared of a field, by itself or with its section; None where it is forgotten."""
    return fields.get(path) or fields.get(path.partition(".")[0])


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def experiment(engine: str, fields: dict[str, Any]) -> Experiment:
    """Changed in what the engine refuses anyway only where ``fields`` ask for it."""
    own: dict[str, Any] = {"engine": engine}
    if ENGINES[engine].program.tokenizer_fields:
        own |= {f"data.{name}": "file" for name in ENGINES[engine].program.tokenizer_fields}
    given = {path: value for path, value in fields.items() if "." not in path}
    dotted = {path: value for path, value in fields.items() if "." in path}
    return with_fields({**BASE, **given}, {**own, **dotted})


def different(before: Experiment, after: Experiment) -> Iterator[str]:
    """Fields that differ: of a preset those that it gives."""
    for path in leaves(Experiment):
        section, _, name = path.rpartition(".")
        pair = [getattr(getattr(one, section) if section else one, name) for one in (before, after)]
        if pair[0] != pair[1]:
            yield path if section else f"experiment.{name}"


def accepted(engine: str, path: str) -> tuple[Experiment, Experiment]:
    """The experiment without and with the field changed; of its surroundings what the engine does not refuse.

    Where Megatron v1.1.5's own data parallelism cannot do it, DeepSpeed's can.
    """
    value, needs = CHANGED[path]
    fields = ENGINES[engine].rules.fields
    needs = {other: given for other, given in needs.items() if not isinstance(declared(fields, other), Refused)}
    before, after = experiment(engine, needs), experiment(engine, {**needs, path: value})
    if layout_problems(after, 8):
        return experiment(engine, {**needs, **ZERO}), experiment(engine, {**needs, **ZERO, path: value})
    return before, after


def program(given: Experiment) -> RankProgram:
    return rank_program(given, make_plan(given, {"a": range(8)}, "e.yaml"), "id", "/workspace/runs/id")


def imported(module: str) -> Iterator[Path]:
    """The files of ``train`` and ``data`` that a rank's program imports, wherever it does, and its checks of inputs."""
    seen: set[Path] = set()
    waiting = [module, f"{module}.__main__"]
    while waiting:
        name = waiting.pop()
        file = ROOT / (name.replace(".", "/") + ".py")
        file = file if file.is_file() else file.with_suffix("") / "__init__.py"
        rooms = ("tridock.train", "tridock.data", "tridock.experiment.inputs", "tridock.experiment.training")
        if not f"{name}.".startswith(tuple(f"{room}." for room in rooms)) or file in seen or not file.is_file():
            continue
        if module != "tridock.train" and name.startswith(tuple(OF_TORCH)):
            continue
        seen.add(file)
        for node in nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module:
                waiting += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    yield from seen


@functools.cache
def functions(section: str) -> dict[str, ast.FunctionDef]:
    file = {"model": "model", "data": "data_sets"}.get(section)
    found = nodes(ROOT / f"tridock/experiment/{file}.py") if file else []
    return {node.name: node for node in found if isinstance(node, ast.FunctionDef)}


@functools.cache
def behind(section: str, name: str) -> frozenset[str]:
    """The fields that a property of the model or of the data reads, or the name itself."""
    if not (found := functions(section).get(name)):
        return frozenset({name})
    inner = (node for node in ast.walk(found) if isinstance(node, ast.Attribute))
    return frozenset().union(*(behind(section, node.attr) for node in inner if getattr(node.value, "id", "") == "self"))


@functools.cache
def fields_read(module: str) -> frozenset[str]:
    """Fields that the program of a rank reads, or (with no module) those who launch it, as ``section.name``.

    Read is an attribute of something that is called like its section, as in ``experiment.train.seed``, or ``settings``.
    """
    rooms = (path for room in LAUNCH for path in (ROOT / "tridock" / room).rglob("*.py"))
    read_by = (node for path in (imported(module) if module else rooms) for node in nodes(path))
    found = (node for node in read_by if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load))
    owners = ((node.value, node.attr) for node in found)
    named = ((getattr(owner, "attr", getattr(owner, "id", "")), name) for owner, name in owners)
    read = {(section, field) for section, name in named for field in behind(section, name)}
    fields = (path.rpartition(".") for path in leaves(Experiment))
    return frozenset(
        f"{section or 'experiment'}.{name}"
        for section, _, name in fields
        if {(section or "experiment", name), ("settings", name)} & read
    )


def test_every_field_has_another_value_here() -> None:
    assert list(CHANGED) == list(leaves(Experiment))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_declares_fields_of_the_schema(engine: str) -> None:
    paths = {*leaves(Experiment), *Experiment.model_fields}
    assert set(ENGINES[engine].rules.fields) <= paths


@pytest.mark.parametrize("path", CHANGED)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_field_is_what_the_engine_declares(engine: str, path: str) -> None:
    if path in ("engine", "program"):  # tests/unit/plan/test_other_programs.py
        return
    what = declared(ENGINES[engine].rules.fields, path)
    where = path
    if path in ("model.img_h", "model.img_w", "model.num_classes") and not ENGINES[engine].rules.trains_images:
        where, what = "model.preset", Refused()
    if isinstance(what, Refused):
        value, needs = CHANGED[path]
        changed = experiment(engine, {**needs, path: value})
        assert where in {problem.where for problem in layout_problems(changed, 8)}
        return
    before, after = accepted(engine, path)
    assert before != after
    assert where not in {problem.where for problem in layout_problems(after, 8)}
    started = program(before)
    rows = [ENGINES[engine].rules.padded_vocab_size(50, one) for one in (before, after)]
    is_changed = started != program(after) or rows[0] != rows[1]
    differing = set(different(before, after))
    is_read = bool(differing & fields_read(started.module))
    if path.split(".")[0] in ("name", "launch", "restart", "trackers", "notify"):
        is_read = bool(differing & fields_read(""))
    if isinstance(what, Unused):
        assert not is_changed
        assert not is_read
    else:
        assert isinstance(what, Honoured)
        assert is_changed or is_read
