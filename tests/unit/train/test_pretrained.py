"""Checkpoints of DeepSpeed that other programs wrote: their weights, and what a node says of them without torch."""

from __future__ import annotations

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train.pretrained_models import (
    assert_equal,
    before_and_in_ranks,
    gpt_of,
    loaded,
    names_and_weights,
    part,
    preflight,
    refusal,
)
from tests.unit.train.test_huggingface import GPT2, KINDS, LLAMA, TOKENS, UNTIED
from tridock.contracts.pretrained import DEEPSPEED_CLASSES, MEGATRON_CLASSES, NAMES, foreign_class
from tridock.errors import RequestError
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import config_of
from tridock.node.probes.pretrained import format_of, stored_weights
from tridock.node.probes.torch_files import read_shapes
from tridock.train.checkpoints.pickles import megatron_classes

TODO = "change the model's fields, or use train.load: hf:DIR after save_pretrained"
DENSE = [name for name, fields in KINDS.items() if "num_moe_experts" not in fields]


def zero_checkpoint(
    folder: Path,
    weights: Mapping[str, Tensor],
    stage: int,
    ranks: int = 2,
    frozen: tuple[str, ...] = (),
    names_stage: bool = True,
    **more: Any,
) -> Path:
    """Writes what DeepSpeed 0.19 writes of a model with these weights (fp32 ones and, in the model, bf16)."""
    checkpoint = folder / "global_step7"
    checkpoint.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    trained = {name: it for name, it in weights.items() if name not in frozen}
    groups = [{n: it for n, it in trained.items() if (it.dim() > 1) == matrices} for matrices in (True, False)]
    module: dict[str, Any] = {name: it.bfloat16() for name, it in weights.items()}
    shared = {}
    if not any(name.endswith("lm_head.weight") for name in weights):
        table, *_ = (name for name in weights if name.endswith(("wte.weight", "embed_tokens.weight")))
        module["lm_head.weight"], shared = module[table], {"lm_head.weight": table}
    buffer, values = buffer_of(weights)
    for rank in range(ranks):
        parts = {name: part(it, rank, ranks) for name, it in weights.items()}
        kept = {name: (parts if stage == 3 else weights)[name] for name in frozen}
        state = {
            "module": {name: torch.empty(0) for name in module} if stage == 3 else module,
            "buffer_names": [buffer],
            "param_shapes": [{name: it.shape for name, it in group.items()} for group in groups] if stage else None,
            "frozen_param_shapes": {name: weights[name].shape for name in frozen} if stage > 1 else None,
            "frozen_param_fragments": kept if stage > 1 else None,
            "shared_params": shared if stage else None,
            "ds_version": "0.19.8",
            **more,
        }
        state["module"] |= {buffer: values}
        if rank == 0 or stage == 3:
            prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            torch.save(state, checkpoint / f"{prefix}mp_rank_00_model_states.pt")
        if stage:
            flats = [flat_of(group, stage, rank, ranks) for group in groups]
            key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
            optimizer = {"partition_count": ranks if stage == 3 else [ranks] * 2, key: flats}
            optimizer |= {"zero_stage": stage} if names_stage else {}
            file = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            torch.save({"optimizer_state_dict": optimizer}, checkpoint / file)
    return folder


def buffer_of(weights: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    """A buffer that transformers before 4.32 saved: a table of rotations, or a causal mask."""
    for name, weight in weights.items():
        if name.endswith(".0.self_attn.q_proj.weight"):
            return name.replace("q_proj.weight", "rotary_emb.inv_freq"), torch.ones(len(weight) // 4 // 2)
        if name.endswith(".0.attn.c_attn.weight") or name == "h.0.attn.c_attn.weight":
            return name.replace("c_attn.weight", "bias"), torch.ones(16, 16).tril().view(1, 1, 16, 16).bool()
    raise AssertionError(f"no attention in {[*weights]}")


def flat_of(group: Mapping[str, Tensor], stage: int, rank: int, ranks: int) -> Tensor:
    if stage == 3:
        return torch.cat([part(it, rank, ranks) for it in group.values()])
    joined = torch.cat([it.flatten() for it in group.values()])
    aligned = math.ceil(len(joined) / (2 * ranks)) * 2 * ranks  # as ZeRO-2 pads it
    return part(torch.cat([joined, torch.full((aligned - len(joined),), math.nan)]), rank, ranks)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", DENSE)
def test_fp32_weights_come_from_the_partitions_of_all_ranks(tmp_path: Path, kind: str, stage: int) -> None:
    gpt = gpt_of(KINDS[kind])
    folder = zero_checkpoint(tmp_path / "ck", names_and_weights(gpt), stage, ranks=3)
    assert_equal(loaded(folder, KINDS[kind]), gpt)
    assert_equal(loaded(folder / "global_step7", KINDS[kind]), gpt)
    assert preflight(folder, KINDS[kind]) == []


def test_deepspeeds_bf16_optimizer_names_no_stage(tmp_path: Path) -> None:
    gpt = gpt_of(LLAMA)
    folder = zero_checkpoint(tmp_path / "ck", names_and_weights(gpt), 1, ranks=3, names_stage=False)
    assert_equal(loaded(folder, LLAMA), gpt)
    (folder / "global_step7/zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert "; got 2 of 3 *_optim_states.pt; " in refusal(folder, LLAMA)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_weights_are_loaded_too(tmp_path: Path, stage: int, ranks: int) -> None:
    gpt = gpt_of(LLAMA)
    weights = names_and_weights(gpt)
    frozen = tuple(name for name in weights if ".0." in name)
    found = loaded(zero_checkpoint(tmp_path / "ck", weights, stage, ranks, frozen), LLAMA)
    in_zero_1 = {name: it.bfloat16() for name, it in gpt.named_parameters() if name.startswith("layers.0.")}
    wanted = {**dict(gpt.named_parameters()), **(in_zero_1 if stage == 1 else {})}
    assert [name for name in found if not torch.equal(found[name], wanted[name][: len(found[name])])] == []
    assert preflight(tmp_path / "ck", LLAMA) == []


def test_without_zero_the_weights_are_the_models_own(tmp_path: Path) -> None:
    gpt = gpt_of(GPT2)
    found = loaded(zero_checkpoint(tmp_path / "ck", names_and_weights(gpt), 0), GPT2)
    assert all(torch.equal(it, dict(gpt.named_parameters())[name][: len(it)].bfloat16()) for name, it in found.items())
    assert stored_weights("deepspeed", tmp_path / "ck").fields["num_layers"] == 2
    assert preflight(tmp_path / "ck", GPT2) == []


@pytest.mark.parametrize("renamed", ["module.{}", "actor.model.{}", "{base}"])
def test_a_model_inside_another_or_without_its_head_has_other_names(tmp_path: Path, renamed: str) -> None:
    gpt = gpt_of(GPT2)
    weights = names_and_weights(gpt)
    named = {renamed.format(name, base=name.removeprefix("transformer.")): it for name, it in weights.items()}
    assert_equal(loaded(zero_checkpoint(tmp_path / "ck", named, 3), GPT2), gpt)
    assert preflight(tmp_path / "ck", GPT2) == []


def test_no_copy_of_all_weights_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = gpt_of(GPT2)
    most = max(weight.numel() for weight in gpt.parameters())
    for stage in (2, 3):
        folder = zero_checkpoint(tmp_path / f"{stage}", names_and_weights(gpt), stage)
        made, cat, load = [], torch.cat, torch.load

        def joined(*given: Any, made: list[Tensor] = made, cat: Callable[..., Tensor] = cat, **named: Any) -> Tensor:
            made.append(cat(*given, **named))
            return made[-1]

        def mapped(*given: Any, load: Callable[..., Any] = load, **named: Any) -> Any:
            assert named["mmap"]
            assert named["weights_only"]
            return load(*given, **named)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", joined)
            patch.setattr(torch, "load", mapped)
            loaded(folder, GPT2)
        assert max(it.numel() for it in made if it.device.type != "meta") <= most


def test_a_model_of_other_sizes_is_refused(tmp_path: Path) -> None:
    folder = zero_checkpoint(tmp_path / "ck", names_and_weights(gpt_of(LLAMA)), 2)
    for name, there, here in (("num_layers", 2, 3), ("ffn_hidden_size", 48, 64)):
        wanted = f"model.{name}: the weights of train.load have {there}; got {here}; set it to {there}"
        assert before_and_in_ranks(folder, {**LLAMA, name: here}) == wanted
    assert before_and_in_ranks(folder, {**LLAMA, "qk_layernorm": True}) == (
        "train.load: global_step7 lacks weights of the experiment's model; got model.layers.0.self_attn.q_norm.weight,"
        " model.layers.0.self_attn.k_norm.weight, model.layers.1.self_attn.q_norm.weight,"
        f" model.layers.1.self_attn.k_norm.weight; {TODO}"
    )
    (folder / "config.json").write_text(json.dumps(config_of(Model.model_validate(LLAMA), TOKENS, "float32", None)))
    assert before_and_in_ranks(folder, {**LLAMA, "norm_epsilon": 1e-5}) == (
        f"model.norm_epsilon: the model in {folder} has 1e-06; got 1e-05; set it to 1e-06".replace(str(folder), "DIR")
    )
    assert stored_weights("deepspeed", folder).has_config


def test_weights_that_are_not_the_models_are_refused(tmp_path: Path) -> None:
    weights = names_and_weights(gpt_of(LLAMA))
    lora = {**weights, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(2, 3)}
    without = {name: it for name, it in weights.items() if not name.startswith("model.norm")}
    odd = {**without, "model.last.weight": weights["model.norm.weight"]}
    swapped = {**weights, "model.layers.0.mlp.up_proj.weight": weights["model.layers.0.mlp.up_proj.weight"].t()}
    wanted = {
        "a": "train.load: global_step7 holds weights that the experiment's model lacks; got"
        f" model.layers.0.self_attn.q_proj.lora_A.weight; {TODO}",
        "b": f"train.load: global_step7 lacks weights of the experiment's model; got model.norm.weight; {TODO}\n"
        f"train.load: global_step7 holds weights that the experiment's model lacks; got model.last.weight; {TODO}",
        "c": "train.load: model.layers.0.mlp.up_proj.weight in global_step7 has another shape than in the"
        f" experiment's model; got 32 x 48, not 48 x 32; {TODO}",
    }
    found = {
        name: before_and_in_ranks(zero_checkpoint(tmp_path / name, given, 2), LLAMA)
        for name, given in zip("abc", (lora, odd, swapped), strict=True)
    }
    assert found == wanted
    tied = before_and_in_ranks(zero_checkpoint(tmp_path / "e", weights, 0), {**LLAMA, **UNTIED})
    assert tied == (
        "model.untie_embeddings_and_output_weights: the checkpoint has one matrix for both, in"
        " global_step7; got true; set it to false"
    )
    two = {**weights, **{f"reference.{name}": it for name, it in weights.items()}}
    assert before_and_in_ranks(zero_checkpoint(tmp_path / "f", two, 0), LLAMA) == (
        "train.load: global_step7 holds several models; got model.embed_tokens.weight,"
        " reference.model.embed_tokens.weight; save one of the models alone"
    )


def both(folder: Path, fields: Mapping[str, Any] = LLAMA) -> str:
    """What a rank and a node say, which is the same."""
    with pytest.raises(RequestError) as error:
        loaded(folder, fields)
    (problem,) = error.value.problems
    assert stored_weights("deepspeed", folder).problem == problem
    return str(problem).replace(str(folder), "DIR")


def test_missing_files_are_named_by_node_and_rank(tmp_path: Path) -> None:
    weights = names_and_weights(gpt_of(LLAMA))
    todo = "name the folder that was given to save_checkpoint, or one checkpoint in it"
    (tmp_path / "none").mkdir()
    assert both(tmp_path / "none") == (
        f"DIR: holds no checkpoint of DeepSpeed; got neither latest nor *_model_states.pt; {todo}"
    )
    folder = zero_checkpoint(tmp_path / "ck", weights, 3, ranks=3)
    step = folder / "global_step7"
    (folder / "latest").write_text("global_step9\n")
    assert both(folder) == (
        "DIR/latest: names a checkpoint that is not there, or has no *_model_states.pt; got global_step9; " + todo
    )
    (folder / "latest").write_text("global_step7\n")
    (step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    copy = "copy the files of all ranks into this one folder"
    assert both(folder) == (
        "DIR/global_step7: lacks the files of ranks; there is zero_pp_rank_0_mp_rank_00_optim_states.pt; got none of"
        f" rank 1; {copy}"
    )
    (step / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert both(folder) == (
        "DIR/global_step7: has another number of *_optim_states.pt than of *_model_states.pt; got 1 and 3; " + copy
    )
    (step / "mp_rank_01_model_states.pt").touch()
    (step / "mp_rank_00_model_states.pt").touch()
    parallel = zero_checkpoint(tmp_path / "tp", weights, 1)
    (parallel / "global_step7/mp_rank_01_model_states.pt").touch()
    assert both(parallel).startswith(
        "DIR/global_step7: is of a pipeline, of model parallel ranks, or of a mixture of experts, which deepspeed:"
        " does not read; got 2 model parallel ranks; "
    )
    (parallel / "global_step7/layer_00-model_00-model_states.pt").touch()
    assert "; got layer_00-model_00-model_states.pt; " in both(parallel)


def test_a_checkpoint_without_files_of_some_ranks_is_refused(tmp_path: Path) -> None:
    folder = zero_checkpoint(tmp_path / "ck", names_and_weights(gpt_of(LLAMA)), 2, ranks=3)
    (folder / "global_step7/zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    assert str(stored_weights("deepspeed", folder).problem) == (
        f"{folder}/global_step7: was written by 3 ranks and lacks files of some; got 2 *_optim_states.pt;"
        " copy the files of all ranks into this one folder"
    )
    assert refusal(folder, LLAMA).startswith(
        "global_step7: is no checkpoint that zero_to_fp32 reads; got Expected 3 of '*_optim_states.pt'"
    )


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    folder = zero_checkpoint(tmp_path / "ck", names_and_weights(gpt_of(LLAMA)), 2)
    file = folder / "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    os.truncate(file, 2000)
    assert str(stored_weights("deepspeed", folder).problem) == f"{file}: is cut short; got 2,000 bytes; copy it again"
    assert refusal(folder, LLAMA).startswith("zero_pp_rank_1_mp_rank_00_optim_states.pt: cannot be read; got ")


class Code:
    """An object whose unpickling writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (os.mkdir, (str(self.file),))


def test_no_code_of_a_pickle_runs(tmp_path: Path) -> None:
    weights = names_and_weights(gpt_of(LLAMA))
    mark = tmp_path / "ran"
    folder = zero_checkpoint(tmp_path / "ck", weights, 2, trainer=Code(mark))
    wanted = (
        "mp_rank_00_model_states.pt: holds an object that is not loaded, because a pickle can run any code; got"
        " posix.mkdir; convert the checkpoint where you trust it (zero_to_fp32.py), or copy it again"
    )
    assert refusal(folder, LLAMA) == wanted
    assert str(stored_weights("deepspeed", folder).problem) == f"{folder}/global_step7/{wanted}"
    assert not mark.exists()
    last = zero_checkpoint(tmp_path / "last", weights, 2)
    file = last / "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({**torch.load(file), "trainer": Code(mark)}, file)
    assert str(stored_weights("deepspeed", last).problem).startswith(f"{file}: holds an object that is not loaded, ")


def test_a_node_refuses_no_class_that_the_ranks_load() -> None:
    import numpy as np
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch._weights_only_unpickler import _get_allowed_globals

    def named(found: Any) -> str:
        return found[1] if isinstance(found, tuple) else f"{found.__module__}.{found.__qualname__}"

    of_torch = [name for name in _get_allowed_globals() if not name.startswith("torch.serialization.add_safe")]
    assert len(of_torch) > 100
    of_deepspeed = [named(it) for it in (DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address)]
    assert foreign_class([*of_torch, *of_deepspeed, "__builtin__.set"], DEEPSPEED_CLASSES) is None
    # A pickle names the arrays' types by strings, not by their classes.
    of_megatron = [named(it) for it in megatron_classes() if it not in map(type, map(np.dtype, ("u4", "i8", "f8")))]
    assert foreign_class([*of_torch, *of_deepspeed, *of_megatron], MEGATRON_CLASSES) is None
    others = (
        "os.system",
        "builtins.eval",
        "builtins.exec",
        "torch.nn.modules.linear.Linear",
        "torch.hub.load",
        "torchx",
    )
    assert [foreign_class([name], MEGATRON_CLASSES) for name in others] == [*others]


def test_a_folder_of_another_format_is_named(tmp_path: Path) -> None:
    gpt = gpt_of(LLAMA)
    zero = zero_checkpoint(tmp_path / "zero", names_and_weights(gpt), 2)
    model = tmp_path / "model"
    own = tmp_path / "checkpoints"
    megatron, staged = tmp_path / "megatron", tmp_path / "staged"
    for file in (
        *(model / name for name in ("config.json", "model.safetensors")),
        *(own / name for name in ("latest", "iter_0000003/tridock.json", "iter_0000003/mp_rank_00_model_states.pt")),
        *(megatron / name for name in ("x", "iter_0000003/mp_rank_00/model_optim_rng.pt")),
        *(staged / name for name in ("latest_checkpointed_iteration.txt", "global_step3/mp_rank_00_model_states.pt")),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    folders = {"hf": model, "deepspeed": zero, "megatron": megatron, "": own}
    assert {kind: format_of(folder) for kind, folder in folders.items()} == {kind: kind for kind in folders}
    assert format_of(staged) == "megatron"
    assert format_of(tmp_path) is None
    for given in ("hf", "deepspeed", "megatron"):
        for there, folder in folders.items():
            if there != given:
                assert str(stored_weights(given, folder).problem) == (
                    f"{folder}: is a {NAMES[there]}, no {NAMES[given]}; use train.load: "
                    f"{there + ':' if there else ''}{folder}"
                )
    # Nothing but the names of its weights tells a folder that DeepSpeed wrote for Megatron from another.
    weights = {f"language_model.{name}": it for name, it in names_and_weights(gpt).items()}
    odd = zero_checkpoint(tmp_path / "odd", weights, 2)
    assert str(stored_weights("deepspeed", odd).problem) == (
        f"{odd}: is a checkpoint of Megatron-LM, no checkpoint of DeepSpeed; use train.load: megatron:{odd}"
    )


@pytest.mark.parametrize("content", [[1, 2], {"module": 7}, {"module": {}, "param_shapes": [7]}, torch.ones(2)])
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, content: Any) -> None:
    (tmp_path / "a/mp_rank_00").mkdir(parents=True)
    torch.save(content, tmp_path / "a/mp_rank_00_model_states.pt")
    torch.save({"model": content}, tmp_path / "a/mp_rank_00/model_optim_rng.pt")
    found = stored_weights("megatron", tmp_path / "a").problem
    assert found is not None
    assert found.where == f"{tmp_path}/a"
    (tmp_path / "a/mp_rank_00/model_optim_rng.pt").unlink()
    found = stored_weights("deepspeed", tmp_path / "a").problem
    assert found is not None
    assert found.what == "holds something else than a checkpoint of DeepSpeed"


def test_the_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "mp_rank_00_model_states.pt").mkdir()
    assert str(stored_weights("deepspeed", tmp_path).problem) == (
        f"{tmp_path}/mp_rank_00_model_states.pt: cannot be read; got Is a directory; check the file's owner"
    )


@pytest.mark.parametrize("legacy", [False, True])
def test_shapes_are_read_without_torch(tmp_path: Path, legacy: bool) -> None:
    import numpy as np

    given = {
        "weights": {"a": torch.ones(2, 3), "b": torch.nn.Parameter(torch.ones(4).half())},
        "random": np.random.default_rng(1).bit_generator.state,
        "args": Namespace(layers=2, name="x"),
        "table": np.arange(5),
    }
    torch.save(given, tmp_path / "file.pt", _use_new_zipfile_serialization=not legacy)
    found = read_shapes(tmp_path / "file.pt")
    assert found["weights"] == {"a": (2, 3), "b": (4,)}
    assert found["args"].state == {"layers": 2, "name": "x"}
    (tmp_path / "text").write_text("not of torch.save")
    with pytest.raises(RequestError, match=r"text: is no complete file of torch\.save; got "):
        read_shapes(tmp_path / "text")
