"""Checkpoints as Megatron-LM writes them, of v1.1.5 and later versions, for tests."""

from __future__ import annotations

import random
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.unit.train.pretrained_models import part
from tests.unit.train.test_huggingface import GPT2, TOKENS
from tridock.train.models.gpt import GPT

FIELDS = {**GPT2, "activation_func": "gelu"}
ROWS = 64
"""TOKENS with a padding to a multiple of 16 x 2."""
ARGS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
    "make_vocab_size_divisible_by": 16, "layernorm_epsilon": 1e-5, "bias_gelu_fusion": False, "openai_gelu": False,
    "apply_residual_connection_post_layernorm": False, "params_dtype": torch.float32,
}  # fmt: skip
NAMES = {
    "token_embedding": "embedding.word_embeddings",
    "position_embedding": "embedding.position_embeddings",
    "final_norm": "transformer.final_layernorm",
    "input_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query_key_value": "attention.query_key_value",
    "attention.dense": "attention.dense",
    "dense_h_to_4h": "mlp.dense_h_to_4h",
    "dense_4h_to_h": "mlp.dense_4h_to_h",
    "output_layer": "output_layer",
}


def shards(gpt: GPT, ranks: int, version: float = 2.0) -> list[dict[str, Tensor]]:
    """Each tensor parallel rank's weights by v1.1.5's names, ordered as this version's attention expects."""
    found: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    weights = {name: it.detach() for name, it in gpt.named_parameters()}
    for name, weight in weights.items():
        module, _, kind = name.rpartition(".")
        prefix, module = re.match(r"(layers\.\d+\.)?(.*)", module).groups()  # type: ignore[union-attr]
        if module == "gate":
            continue  # in the first matrix of the MLP
        theirs = f"{'transformer.' + prefix if prefix else ''}{NAMES[module]}.{kind}"
        if module in ("token_embedding", "output_layer"):
            weight = torch.cat([weight[:TOKENS], torch.full((ROWS - TOKENS, 32), 7.0)])
        if module in ("token_embedding", "output_layer", "attention.query_key_value", "dense_h_to_4h"):
            parts = list(weight.chunk(ranks))
            if module == "dense_h_to_4h" and (gate := weights.get(f"{prefix}gate.{kind}")) is not None:
                parts = [torch.cat(both) for both in zip(gate.chunk(ranks), parts, strict=True)]
        elif kind == "weight" and module in ("attention.dense", "dense_4h_to_h"):
            parts = list(weight.chunk(ranks, 1))
        else:
            parts = [weight] * ranks
        for rank, one in enumerate(parts):
            if module == "attention.query_key_value" and version == 0:
                one = one.unflatten(0, (-1, 3, 8)).transpose(0, 1).flatten(0, 2)
            elif module == "attention.query_key_value" and version == 1:
                one = one.unflatten(0, (-1, 3, 8)).transpose(1, 2).flatten(0, 2)
            found[rank][f"language_model.{theirs}"] = one.clone()
    return found


def nested(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What ``state_dict_for_save_checkpoint`` makes of them."""
    model: dict[str, Any] = {"embedding": {"word_embeddings": {}, "position_embeddings": {}}, "transformer": {}}
    for name, weight in weights.items():
        _, place, rest = name.split(".", 2)
        if place == "output_layer":
            model[place] = {rest: weight}
        elif place == "embedding":
            table, _, kind = rest.partition(".")
            model[place][table][kind] = weight
        else:
            model[place][rest] = weight
    return {"language_model": model}


def plain(
    folder: Path, gpt: GPT, ranks: int = 2, version: float | None = 2.0, name: str = "iter_0000007", **more: Any
) -> Path:
    """What v1.1.5 saves without DeepSpeed."""
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("release" if name == "release" else "7")
    for rank, weights in enumerate(shards(gpt, ranks, version or 0)):
        place = folder / name / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        state = {
            "args": Namespace(**ARGS, rank=rank),
            "iteration": 7,
            "model": nested(weights),
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            **({} if version is None else {"checkpoint_version": version}),
            **more,
        }
        torch.save(state, place / "model_optim_rng.pt", _use_new_zipfile_serialization=name != "release")
    return folder


def with_deepspeed(folder: Path, gpt: GPT, stage: int, ranks: int = 2) -> Path:
    """What v1.1.5 saves with DeepSpeed, with two data parallel ranks: fp16 and ZeRO's fp32."""
    checkpoint = folder / "global_step7"
    checkpoint.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        halves = {name: weight.half() for name, weight in weights.items()}
        for number in range(2):
            state = {
                "module": nested(halves if stage < 3 else dict.fromkeys(halves, torch.empty(0))),
                "param_shapes": [{name: weight.shape for name, weight in weights.items()}] if stage else None,
                "buffer_names": [],
                "shared_params": {},
                "iteration": 7,
            }
            prefix = f"zero_pp_rank_{number}_" if stage == 3 else ""
            torch.save(state, checkpoint / f"{prefix}mp_rank_{rank:02d}_model_states.pt")
            if stage == 3:
                flat, key = torch.cat([part(it, number, 2) for it in weights.values()]), "fp32_flat_groups"
            else:
                joined = torch.cat([it.flatten() for it in weights.values()])
                flat, key = part(joined, number, 2), "single_partition_of_fp32_groups"
            if stage:
                optimizer = {"zero_stage": stage, "partition_count": 2, key: [flat]}
                file = checkpoint / f"zero_pp_rank_{number}_mp_rank_{rank:02d}_optim_states.pt"
                torch.save({"optimizer_state_dict": optimizer}, file)
    return folder


def pipeline(folder: Path, gpt: GPT, ranks: int = 2) -> Path:
    """What a pipeline saves: a file per module of ``GPT2ModelPipe``."""
    checkpoint = folder / "global_step7"
    checkpoint.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        files: dict[int, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            rest = name.removeprefix("language_model.")
            if rest.startswith("embedding."):
                number, key = 0, rest.removeprefix("embedding.")
            elif layer := re.match(r"transformer\.layers\.(\d+)\.(.*)", rest):
                number, key = int(layer[1]) + 2, layer[2]
            else:
                number, key = 2 + 3, rest.rpartition(".")[2]
            files.setdefault(number, {})[key] = weight
        for number, own in files.items():
            torch.save(own, checkpoint / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        torch.save({"module": None}, checkpoint / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


WRITERS: dict[str, Callable[[Path, GPT], Path]] = {
    "version 2": plain,
    "version 1": lambda folder, gpt: plain(folder, gpt, version=1.0),
    "version 0": lambda folder, gpt: plain(folder, gpt, version=None),
    "torch before 1.6": lambda folder, gpt: plain(folder, gpt, 1, name="release"),
    "ZeRO 1": lambda folder, gpt: with_deepspeed(folder, gpt, 1),
    "ZeRO 2": lambda folder, gpt: with_deepspeed(folder, gpt, 2, 1),
    "ZeRO 3": lambda folder, gpt: with_deepspeed(folder, gpt, 3),
    "pipeline": pipeline,
}


def later(folder: Path, gpt: GPT, ranks: int, stages: int, virtual: int, *, since_2023: bool, **args: Any) -> Path:
    """What Megatron-LM since v2.0 saves of its legacy models (megatron/training/checkpointing.py): a folder for each
    tensor and pipeline parallel rank; the layers are an encoder with self-attention, numbered from 0 in each part of
    the model. Norms have shorter names since the end of 2023."""
    folder.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    for rank, weights in enumerate(shards(gpt, ranks)):
        whole = nested(weights)["language_model"]
        theirs = {name.replace(".attention.", ".self_attention."): it for name, it in whole["transformer"].items()}
        if since_2023:
            theirs = {
                re.sub("(input|post_attention|final)_layernorm", r"\1_norm", name): theirs[name] for name in theirs
            }
        norm = {name: it for name, it in theirs.items() if not name.startswith("layers.")}
        count = gpt.shape.model.num_layers
        each = count // (stages * virtual)
        for stage in range(stages):
            models: list[dict[str, Any]] = []
            for chunk in range(virtual):
                first = chunk * (count // virtual) + stage * each
                own: dict[str, Tensor] = {}
                for number in range(each):
                    prefix = f"layers.{first + number}."
                    found = {name: it for name, it in theirs.items() if name.startswith(prefix)}
                    own |= {name.replace(prefix, f"layers.{number}.", 1): it for name, it in found.items()}
                begins, ends = (chunk, stage) == (0, 0), (chunk, stage) == (virtual - 1, stages - 1)
                language: dict[str, Any] = {"embedding": whole["embedding"]} if begins else {}
                output = {"output_layer": whole["output_layer"]} if ends and "output_layer" in whole else {}
                model: dict[str, Any] = {
                    "language_model": language | {"encoder": own | (norm if ends else {})} | output
                }
                if ends and not begins and not output:
                    model["word_embeddings_for_head"] = {"weight": whole["embedding"]["word_embeddings"]["weight"]}
                models.append(model)
            place = folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            place.mkdir(parents=True)
            given = {"num_layers": count, "ffn_hidden_size": 128, "kv_channels": 8, "add_bias_linear": True}
            given |= {"position_embedding_type": "learned_absolute", "swiglu": False, "num_experts": None}
            state = {
                "args": Namespace(**{**ARGS, **given, **args}, rank=rank),
                "checkpoint_version": 3.0,
                "iteration": 7,
                **({"model": models[0]} if virtual == 1 else {f"model{it}": one for it, one in enumerate(models)}),
                "rng_state": [{"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}],
            }
            torch.save(state, place / "model_optim_rng.pt")
    return folder
