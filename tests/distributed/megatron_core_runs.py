"""Layouts of a small GPT on megatron-core, and the runs that train them on CPU ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.distributed.ranks import (
    Finished,
    Started,
    run_several,
)
from tests.experiments import make_plan, with_fields
from tridock.experiment import Experiment, dump_experiment

ITERATIONS = 14
TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
VPP, CP = "parallel.virtual_pipeline_model_parallel_size", "parallel.context_parallel_size"
FIRST, LAST = "parallel.decoder_first_pipeline_num_layers", "parallel.decoder_last_pipeline_num_layers"
SP, DISTRIBUTED = "parallel.sequence_parallel", "parallel.use_distributed_optimizer"
GRANULARITY, METHOD = "model.recompute_granularity", "model.recompute_method"
GROUP = "model.recompute_num_layers"

Layouts = Mapping[str, tuple[int, dict[str, Any]]]
LAYOUTS: Layouts = {
    "one": (1, {}),
    "recompute-full": (1, {GRANULARITY: "full", METHOD: "uniform", GROUP: 2}),
    "recompute-selective": (1, {GRANULARITY: "selective"}),
    "dp2": (2, {}),
    "dp2-distributed-optimizer": (2, {DISTRIBUTED: True}),
    "tp2": (2, {TP: 2}),
    "tp2-sp": (2, {TP: 2, SP: True}),
    "pp2": (2, {PP: 2}),
    "pp2-vpp2": (2, {PP: 2, VPP: 2, GRANULARITY: "full", METHOD: "block", GROUP: 1}),
    "pp2-unequal": (2, {PP: 2, FIRST: 3}),
    "cp2": (2, {CP: 2}),
    "tp2-pp2": (4, {TP: 2, PP: 2}),
    "pp3-unequal": (3, {PP: 3, FIRST: 1, LAST: 1}),
    "tp2-sp-cp2": (4, {TP: 2, SP: True, CP: 2, DISTRIBUTED: True, "batch.micro_batch_size": 4}),
    "pp2-dp2-neighbours": (4, {PP: 2, "parallel.use_tp_pp_dp_mapping": True}),
    "pp2-vpp2-dp2": (4, {PP: 2, VPP: 2, DISTRIBUTED: True}),
}
# With each way to share a model out among them, and the checkpoints that continue on another layout.
SOME = ("one", "dp2-distributed-optimizer", "tp2-pp2", "tp2-sp-cp2")
LLAMA = {
    "model.num_query_groups": 2,
    "model.ffn_hidden_size": 96,
    "model.normalization": "RMSNorm",
    "model.position_embedding_type": "rope",
    "model.use_rope_scaling": True,
    "model.swiglu": True,
    "model.add_bias_linear": False,
}
QWEN3 = {
    **LLAMA,
    "model.kv_channels": 24,
    "model.qk_layernorm": True,
    "model.untie_embeddings_and_output_weights": True,
}
LLAMA_LAYOUTS: Layouts = {
    name: (ranks, {**kind, **layout})
    for kind_name, kind in (("llama", LLAMA), ("qwen3", QWEN3))
    for name, (ranks, layout) in {
        **{f"{kind_name}-{name}": LAYOUTS[name] for name in LAYOUTS if not name.startswith("recompute")},
        f"{kind_name}-tp4": (4, {TP: 4}),  # two ranks have the same query group
        f"{kind_name}-tp2-pp2-vpp2-dp2": (8, {TP: 2, SP: True, PP: 2, VPP: 2, DISTRIBUTED: True}),
    }.items()
}
SOME_LLAMA = ("llama-one", "llama-pp2-vpp2")
EP, ETP = "parallel.expert_model_parallel_size", "parallel.expert_tensor_parallel_size"
MIXTRAL = {
    **{name: value for name, value in LLAMA.items() if name != "model.use_rope_scaling"},
    "model.num_moe_experts": 4,
    "model.moe_aux_loss_coeff": 0.1,
    "model.untie_embeddings_and_output_weights": True,
    "train.save_interval": 5,
}
SHARED = {"model.moe_shared_expert_intermediate_size": 24, "model.moe_shared_expert_gate": True}
GATED = {**SHARED, "model.moe_router_pre_softmax": True, "train.seed": 3}
"""As Qwen 2's. With this seed no token's scores of two experts are so near each other in these steps that rounding
chooses between them."""
MIXTURE_LAYOUTS: Layouts = {
    name: (ranks, {**MIXTRAL, **layout})
    for name, (ranks, layout) in {
        "one": (1, {}),
        "recompute": (1, {GRANULARITY: "full", METHOD: "uniform", GROUP: 1}),
        "dp2": (2, {}),
        "ep2": (2, {EP: 2}),
        "ep2-distributed-optimizer": (2, {EP: 2, DISTRIBUTED: True}),
        "tp2-sp": (2, {TP: 2, SP: True}),
        "tp2-sp-etp1": (2, {TP: 2, SP: True, ETP: 1, DISTRIBUTED: True}),
        "tp2-sp-ep2": (2, {TP: 2, SP: True, EP: 2, ETP: 1}),
        "pp2": (2, {PP: 2}),
        "pp2-vpp2": (2, {PP: 2, VPP: 2}),
        "cp2": (2, {CP: 2}),
        "ep4": (4, {EP: 4}),
        "ep2-dp2": (4, {EP: 2, DISTRIBUTED: True}),
        "tp2-sp-ep2-dp2": (4, {TP: 2, SP: True, EP: 2, DISTRIBUTED: True}),
        "etp2-dp2": (4, {EP: 2, ETP: 2}),
        "pp2-ep2": (4, {PP: 2, EP: 2, DISTRIBUTED: True}),
        "pp2-ep2-neighbours": (4, {PP: 2, TP: 2, SP: True, "parallel.use_tp_pp_dp_mapping": True}),
        "shared-one": (1, SHARED),
        "shared-tp2-sp-ep2": (2, {**SHARED, TP: 2, SP: True, EP: 2, ETP: 1}),
        "gated-one": (1, GATED),
        "gated-ep2": (2, {**GATED, EP: 2, DISTRIBUTED: True}),
        "gated-pp2-vpp2": (2, {**GATED, PP: 2, VPP: 2}),
        "gated-tp2-sp-ep2-dp2": (4, {**GATED, TP: 2, SP: True, EP: 2, DISTRIBUTED: True}),
        "gated-pp2-ep2": (4, {**GATED, PP: 2, EP: 2}),
        "cp2-ep4": (4, {CP: 2, EP: 4}),
        "tp2-pp2-vpp2-ep2-dp2": (8, {TP: 2, SP: True, PP: 2, VPP: 2, EP: 2, DISTRIBUTED: True}),
    }.items()
}
SOME_MIXTURES = ("one", "ep2-distributed-optimizer")
MIXTURES_CHANGED: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "ep2-distributed-optimizer to tp2-sp": ("ep2-distributed-optimizer", 2, {TP: 2, SP: True, DISTRIBUTED: True}),
    "tp2-sp-ep2 to one": ("tp2-sp-ep2", 1, {}),
    "one to pp2-ep2": ("one", 4, {PP: 2, EP: 2}),
    "ep2-dp2 to ep4": ("ep2-dp2", 4, {EP: 4, DISTRIBUTED: True}),
}
SOME_MIXTURES_CHANGED = ("ep2-distributed-optimizer to tp2-sp",)
SHORT: Layouts = {
    "bf16": (1, {"precision": "bf16"}),
    "fp16": (1, {"precision": "fp16", "fp16.initial_scale_power": 12}),
    "fp16-overflow": (1, {"precision": "fp16", "fp16.initial_scale_power": 31, "fp16.hysteresis": 1}),
}
LENGTH = {"train.train_iters": 10, "optimizer.lr_decay_iters": 10, "train.eval_interval": 0}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
DROPPED: Layouts = {
    "kept": (1, {}),
    "full": (1, {GRANULARITY: "full", METHOD: "uniform", GROUP: 1}),
    "selective": (1, {GRANULARITY: "selective"}),
}
CONTINUED: Layouts = {
    "tp2-sp": (2, {TP: 2, SP: True}),
    "pp2-vpp2": (2, {PP: 2, VPP: 2}),
    "cp2-distributed-optimizer": (2, {CP: 2, DISTRIBUTED: True}),
    "dp2-fp16": (2, {"precision": "fp16", DISTRIBUTED: True}),
}
SOME_CONTINUED = ("tp2-sp", "cp2-distributed-optimizer")
CHANGED: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "tp2 to pp2": ("tp2", 2, {PP: 2}),
    "tp2-pp2 to dp2": ("tp2-pp2", 2, {}),
    "one to pp2-vpp2": ("one", 2, {PP: 2, VPP: 2}),
    "pp2-unequal to tp2": ("pp2-unequal", 2, {TP: 2}),
    "dp2-distributed-optimizer to tp2": ("dp2-distributed-optimizer", 2, {TP: 2, DISTRIBUTED: True}),
}
SOME_CHANGED = ("one to pp2-vpp2", "dp2-distributed-optimizer to tp2")


def experiment(**fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "name": "small",
        "engine": "megatron-core",
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 64,
            # 500 tokens: 500 rows on one rank, 600 on two that split them.
            "make_vocab_size_divisible_by": 100,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "data": {"data_path": "data/demo/stdlib_text_document", "split": "80,10,10"},
        "optimizer": {"lr": 2e-3, "min_lr": 1e-4, "lr_warmup_iters": 3},
        "precision": "fp32",
        "train": {
            "train_iters": ITERATIONS,
            "log_interval": 1,
            "eval_interval": 7,
            "eval_iters": 2,
            "save_interval": 6,
            "tensorboard": False,
        },
    }
    return with_fields(base, fields)


def make_run(workspace: Path, name: str, world_size: int, **fields: Any) -> Path:
    folder = workspace / "runs" / name.replace(" ", "-")
    folder.mkdir(parents=True)
    plan = make_plan(experiment(**fields), {"localhost": range(world_size)}, name)
    (folder / "experiment.yaml").write_text(dump_experiment(experiment(**fields).resolved(plan.data_parallel_size)))
    return folder


def start(folder: Path, world_size: int, **env: str) -> Finished:
    argv = ["-m", "tridock.train.megatron_core.pretrain_gpt", "--run-folder", str(folder)]
    with Started(argv, folder, world_size, env, "megatron-core") as started:
        return started.wait()


Runs = Callable[[str], Path]


def trained_together(
    workspace: Path, prefix: str, layouts: Layouts, some: Collection[str] | None = None, **fields: Any
) -> Runs:
    """The run's folder of a layout; those of one world size are trained one after another when first asked for.

    Where they fail, each of them has the error. Layouts beyond ``some`` are those that only `make test-full` asks for.
    """
    default = layouts if some is None else some

    @cache
    def batch(world_size: int, full: bool) -> tuple[dict[str, Path], Exception | None]:
        chosen = {
            name: own for name, (ranks, own) in layouts.items() if ranks == world_size and full == (name not in default)
        }
        folders = {
            name: make_run(workspace, f"{prefix}-{name}", world_size, **fields, **own) for name, own in chosen.items()
        }
        try:
            run_several(list(folders.values()), world_size)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            return folders, error
        return folders, None

    def folder(name: str) -> Path:
        folders, error = batch(layouts[name][0], name not in default)
        if error is not None:
            raise error
        return folders[name]

    return folder
