"""Checkpoints of Megatron-LM: their files, and the model that they show.

Of v1.1.5, with or without DeepSpeed, and of later versions' legacy models in the same files (``--ckpt-format torch``).
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts.checkpoints import LATEST, TRACKER
from tridock.contracts.pretrained import EXTRA_STATE, GPT2_LAYERS, StateFiles, StoredWeights, deepspeed_files, listed
from tridock.contracts.run_folder import read_text
from tridock.errors import Problem, RequestError

PLAIN: Final = "model_optim_rng.pt"
WORDS: Final = "language_model.embedding.word_embeddings.weight"
POSITIONS: Final = "language_model.embedding.position_embeddings.weight"
DIVISIBLE_BY: Final = 128
"""Megatron's default for ``make_vocab_size_divisible_by``."""

_LAYER: Final = re.compile(r"^layer_(\d+)-model_(\d+)-model_states\.pt$")
_RANK: Final = re.compile(r"^mp_rank_(\d+)(?:_(\d+))?$")
_IN_LAYERS: Final = re.compile(r"^language_model\.transformer\.layers\.(\d+)\.")
_PART: Final = re.compile(r"^model\d*$")
_TRANSFORMER: Final = "language_model.transformer."
_LATER_NAMES: Final = {
    "language_model.encoder.": _TRANSFORMER,
    ".self_attention.": ".attention.",
    ".input_norm.": ".input_layernorm.",
    ".post_attention_norm.": ".post_attention_layernorm.",
    ".final_norm.": ".final_layernorm.",
}
"""By names since v2.0, or since the end of 2023 those of norms, v1.1.5's."""
_FOR_HEAD: Final = "word_embeddings_for_head."
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "position_embedding_type": ("learned_absolute", "rope"),
    "rotary_base": (10000,),
    "rotary_seq_len_interpolation_factor": (1,),
    "softmax_type": ("vanilla",),
    "rope_type": ("rope",),
    **dict.fromkeys(("glu_linear_offset", "hybrid_attention_ratio", "hybrid_mlp_ratio"), (0,)),
    **dict.fromkeys(
        (
            *("apply_residual_connection_post_layernorm", "squared_relu", "apply_layernorm_1p", "qk_layernorm"),
            *("num_experts", "retro_add_retriever", "rotary_interleaved", "use_rope_scaling"),
        ),
        (False,),
    ),
}
"""The values of Megatron's arguments that are read. Its legacy models do not pass ``rotary_base`` on: they rotate with
10000 whatever it is (``megatron/legacy/model/language_model.py``)."""
_HONOURED: Final = re.compile(
    "^(?:num_layers|hidden_size|max_position_embeddings|padded_vocab_size|make_vocab_size_divisible_by|ffn_hidden_size"
    "|num_attention_heads|num_query_groups|group_query_attention|kv_channels|(?:layernorm|norm)_epsilon|swiglu"
    "|add_bias_linear|add_qkv_bias|untie_embeddings_and_output_weights|use_rotary_position_embeddings|rotary_percent"
    "|add_position_embedding|bias_gelu_fusion|openai_gelu)$"
)
_WITHOUT_EFFECT: Final = re.compile(
    # Words that begin the names of training, data, parallelism, logging, checkpoints, and of other models' arguments,
    "^(?:DDP|account|accumulate|activations|adam|adlr|align|allow|app|async|auto|barrier|batch|bert|biencoder|block|bf16"
    "|cache|calc|calculate|check|checkpoint|ckpt|classes|clip|clone|config|consumed|context|contigious|cp|cpu|create"
    "|cross_entropy|cuda|curr|data|dataloader|ddp|decode|(?:de|en)coder_(?:first|last|num|pipeline|seq|tensor)|decoupled"
    "|decrease|deepscale|deepspeed|defer|delay|deprecated|deterministic|dino|disable_(?:bf16|chunked|jit|mamba|msc"
    "|straggler|symmetric)|dist|distrib|distribute|distributed|do|dump|dynamic|empty|enable_(?:chunked|cuda"
    "|experimental|ft|full|gloo|msc|one)|end|eod|error|eval|evidence|exit|exp|expert|external|faiss|fake|fim|finetune"
    "|flash|fp16|fp32|fp4|fp8|freeze|fsdp|ft|full_validation|gas|global|grad|gradient|grpo|hierarchical|high|hysteresis"
    "|ict|img|indexer|inference|initial|inprocess|iter|iteration|iterations|keep|kitchen|langrl|lazy|legacy|lion|load"
    "|local|log|logging|logits_(?:load|save)|loss|lr|main|mamba|manual|mask|max_tokens|megatron|memory|merge|micro"
    "|microbatch|mid|min|mla|mmap|mock|moe|mtp|multiple|muon|nccl|no_(?:load|persist|save|weight)|non|num_(?:channels"
    "|classes|dataset|distributed|floating|layers_(?:at|per)|speculative|virtual|workers)|object|offset|one|onnx"
    "|optimizer|outer|overlap|override|params|partition|patch|per|perform|phase|pin|pipe|pipeline|pretrained|profile"
    "|rampup|rank|recompute|record|refit|relative_attention|renormalize|replication|report|rerun|reset|result|retriever"
    "|retro|reuse|rl|run|s3|sample|save|scatter|seed|seq|sequence|sft|sgd|sharp|short|skip|skipped|split|standalone"
    "|start|straggler|strict|suggested|swin|symmetric|synchronize|te|tensor|tensorboard|test|tiktoken|timing|titles"
    "|tokenizer|torch|tp|train|use_(?:checkpoint|cpu|custom|dist|distributed|flash|layer_wise|legacy|mcore|megatron|mp"
    "|one|persistent|precision|pytorch|ring|sharp|tokenizer|torch|tp)|valid|variable|virtual|vision|vocab|wandb|warmup"
    "|weight|wgrad|world|yaml|yarn|zero)(?:_|$)"
    # and other names: how it is computed, and sizes that no option of a legacy model reads.
    "|^(?:apply_(?:query_key_layer_scaling|rope_fusion|wd_to_qk_layernorm)|attention_(?:backend|dropout|softmax_in_fp32)"
    "|bias_(?:dropout|swiglu)_fusion|embedding_(?:init_method_std|path|weights_in_fp32)|first_last_layers_bf16"
    "|head_lr_mult|hidden_dropout|init_(?:method_(?:std|xavier_uniform)|model_with_meta_device)|kv_lora_rank"
    "|masked_softmax_fusion|mlp_chunks_for_prefill|model_(?:parallel_size|type)|mscale(?:_all_dim)?|num_unique_layers"
    "|output_bert_embeddings|param_sharing_style|q_lora_rank|qk_head_dim|qk_pos_emb_head_dim|query_in_block_prob"
    "|rope_scaling_factor|rotary_scaling_factor|scaled_(?:upper_triang_)?masked_softmax_fusion"
    "|transformer_(?:impl|pipeline_model_parallel_size)|v_head_dim)$"
)
"""Arguments that no layer of a legacy model depends on; the weights show what ``transformer_impl`` and
``add_position_embedding`` change. Of v1.1.5 to core_v0.17."""
_TODO: Final = "name the folder of --save, or one checkpoint in it (iter_…, release, global_step…)"
_CONVERT: Final = "convert it with its own tools, and use hf:DIR"
_COPY: Final = "copy the files of all ranks into this one folder"


@dataclass(frozen=True, slots=True)
class MegatronFiles:
    """The files of a checkpoint; one of these is not empty, and each has an item for every tensor parallel rank."""

    plain: tuple[tuple[Path, ...], ...] = ()
    """Megatron's own files: of each tensor parallel rank those of the pipeline's stages. v1.1.5 has one stage."""
    states: tuple[StateFiles, ...] = ()
    """DeepSpeed's, without a pipeline."""
    layers: tuple[Mapping[int, Path], ...] = ()
    """A pipeline's, by the number of the layer in ``GPT2ModelPipe``: 0 has the embeddings, the last the last norm."""

    @property
    def all(self) -> tuple[Path, ...]:
        states = [(*it.models, *it.optimizers) for it in self.states]
        return (
            *(path for it in self.plain for path in it),
            *(path for it in states for path in it),
            *(path for it in self.layers for path in it.values()),
        )


def megatron_folder(folder: Path) -> Path:
    """Returns the checkpoint in ``folder``: the folder itself, or the one that Megatron's or DeepSpeed's pointer names.

    Raises :class:`RequestError` if there is none.
    """
    if holds_checkpoint(folder):
        return folder
    tracker, latest = (read_text(folder / name).strip() for name in (TRACKER, LATEST))
    if not tracker and not latest:
        got = f"neither {TRACKER} nor mp_rank_…/{PLAIN} nor DeepSpeed's files"
        raise RequestError(Problem(str(folder), "holds no checkpoint of Megatron-LM", got, _TODO))
    names = [f"iter_{int(tracker):07d}", f"global_step{tracker}"] if tracker.isdecimal() else [tracker]
    for name in (*names, latest):
        if name and holds_checkpoint(folder / name):
            return folder / name
    what = f"names a checkpoint that is not there; none of {', '.join(filter(None, (*names, latest)))} has files"
    raise RequestError(Problem(str(folder / (TRACKER if tracker else LATEST)), what, tracker or latest, _TODO))


def holds_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint that v1.1.5, or another program with DeepSpeed, may have written."""
    kinds = (f"mp_rank_*/{PLAIN}", "*mp_rank_*_model_states.pt", "layer_*-model_*-model_states.pt")
    return any(any(folder.glob(kind)) for kind in kinds)


def megatron_files(folder: Path) -> MegatronFiles:
    """Returns the files of a checkpoint. Raises :class:`RequestError` if one is missing."""
    layers: dict[int, dict[int, Path]] = {}
    plain: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        if match := _LAYER.match(path.name):
            layers.setdefault(int(match[2]), {})[int(match[1])] = path
        elif (match := _RANK.match(path.name)) and (path / PLAIN).is_file():
            plain[int(match[1]), int(match[2] or 0)] = path / PLAIN
    if layers:
        return MegatronFiles(layers=tuple(_layers_of(folder, layers)))
    if plain:
        ranks, stages = (1 + max(numbers) for numbers in zip(*plain, strict=True))
        names = {place: f"mp_rank_{place[0]:02d}" for place in itertools.product(range(ranks), range(stages))}
        if stages > 1:
            names = {place: f"{name}_{place[1]:03d}" for place, name in names.items()}
        if missing := [f"{name}/{PLAIN}" for place, name in names.items() if place not in plain]:
            raise RequestError(Problem(str(folder), "lacks files of model parallel ranks", ", ".join(missing), _COPY))
        return MegatronFiles(plain=tuple(tuple(plain[rank, it] for it in range(stages)) for rank in range(ranks)))
    return MegatronFiles(states=tuple(deepspeed_files(folder).values()))


def _layers_of(folder: Path, layers: Mapping[int, Mapping[int, Path]]) -> list[Mapping[int, Path]]:
    _require_all(folder, {*layers}, max(layers) + 1, "layer_00-model_{:02d}-model_states.pt")
    last = max(max(own) for own in layers.values())
    wanted = [0, *range(2, last - 1), last]  # functions without weights are between embeddings, layers and last norm
    for rank, own in sorted(layers.items()):
        missing = [f"layer_{number:02d}-model_{rank:02d}-model_states.pt" for number in wanted if number not in own]
        if missing:
            raise RequestError(Problem(str(folder), "lacks files of layers", ", ".join(missing), _COPY))
    return [{number: layers[rank][number] for number in wanted} for rank in sorted(layers)]


def _require_all(folder: Path, found: set[int], count: int, name: str) -> None:
    if missing := [name.format(rank) for rank in range(count) if rank not in found]:
        raise RequestError(Problem(str(folder), "lacks files of tensor parallel ranks", ", ".join(missing), _COPY))


def flat_names(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns what nested dicts hold, by joined names: v1.1.5's own form of its model."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            found |= flat_names(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def joined_stages(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what a tensor parallel rank's files hold of the model, by v1.1.5's names.

    ``states`` are those of the pipeline's stages. A stage numbers its own layers from 0, and with interleaved stages
    has several parts of the model: the first parts of all stages come first. Since v2.0 the layers are the ``encoder``,
    and the last stage has a copy of the token table.
    """
    parts = [name for name in states[0] if _PART.match(name)]
    found: dict[str, Any] = {}
    for part in sorted(parts, key=lambda name: int(name.removeprefix("model") or 0)):
        for state in states:
            before = 1 + max((int(it[1]) for name in found if (it := _IN_LAYERS.match(name))), default=-1)
            for name, value in flat_names(state.get(part) or {}).items():
                if name.startswith(_FOR_HEAD) or name.endswith(EXTRA_STATE):
                    continue
                named = name
                for later, earlier in _LATER_NAMES.items():
                    named = named.replace(later, earlier, 1)
                if layer := _IN_LAYERS.match(named):
                    number = f"{_TRANSFORMER}layers.{before + int(layer[1])}."
                    named = f"{number}{named.removeprefix(layer[0])}"
                found[named] = value
    return found


def name_in_pipeline(number: int, last: int, name: str) -> str:
    """Returns the name in the whole language model of a weight in a pipeline's file number ``number``."""
    if number == 0:
        return f"language_model.embedding.{name}"
    if number == last:
        return f"language_model.transformer.final_layernorm.{name}"
    return f"language_model.transformer.layers.{number - 2}.{name}"


def _is_read(name: str, value: Any) -> bool:
    """Whether an argument of Megatron with this value is understood; one that is not set says nothing."""
    if value is None or value is False:
        return True
    return value in _ONLY[name] if name in _ONLY else bool(_HONOURED.match(name) or _WITHOUT_EFFECT.match(name))


def megatron_sizes(
    folder: Path,
    parts: Sequence[Mapping[str, tuple[int, ...]]],
    arguments: Mapping[str, Any] | None,
    other_dtypes: Mapping[str, str],
) -> StoredWeights:
    """Returns the model that each tensor parallel rank's shapes show, and Megatron's arguments if they are there.

    ``other_dtypes``: see :class:`StoredWeights`. Raises :class:`RequestError` if it is another model than a GPT-2 or a
    Llama, or has an argument that is not understood.
    """
    shapes, ranks, given = parts[0], len(parts), arguments or {}
    if odd := [name for name, value in given.items() if not _is_read(name, value)]:
        wanted = ", ".join(f"its {name} is not {' or '.join(map(str, _ONLY.get(name, ('known',))))}" for name in odd)
        got = ", ".join(str(given[name]) for name in odd)
        raise RequestError(Problem(str(folder), f"is of a model that is not read: {wanted}", got, _CONVERT))
    if other_dtypes:
        got = listed([f"{name} in {dtype}" for name, dtype in other_dtypes.items()])
        raise RequestError(Problem(str(folder), "has weights in a format that is not read", got, _CONVERT))
    is_rotary = bool(given.get("use_rotary_position_embeddings")) or given.get("position_embedding_type") == "rope"
    words, positions = shapes.get(WORDS), shapes.get(POSITIONS)
    layers = [int(found[1]) for name in shapes if (found := _IN_LAYERS.match(name))]
    if words is None or (positions is None and not is_rotary) or not layers:
        got = f"no {WORDS if words is None else 'layers' if not layers else POSITIONS}"
        todo = "name a checkpoint of pretrain_gpt2.py; convert another, or one of Megatron Core, with its own tools"
        raise RequestError(Problem(str(folder), "is of no GPT-2 of Megatron-LM", got, todo))
    sizes = {"num_layers": 1 + max(layers), "hidden_size": words[1]}
    shown = {**sizes, "padded_vocab_size": ranks * words[0], "max_position_embeddings": (positions or [None])[0]}
    if odd := [name for name, size in shown.items() if size is not None and given.get(name) not in (None, size)]:
        got = ", ".join(f"{name} {given[name]}, not {shown[name]}" for name in odd)
        raise RequestError(Problem(str(folder), "has arguments of other sizes than its weights", got, _CONVERT))
    fields: dict[str, Any] = {
        **sizes,
        "ffn_hidden_size": given.get("ffn_hidden_size") or 4 * words[1],
        **GPT2_LAYERS,
        **{name: given[name] for name in ("normalization", "add_bias_linear") if given.get(name) is not None},
        "swiglu": bool(given.get("swiglu")),
        "untie_embeddings_and_output_weights": bool(given.get("untie_embeddings_and_output_weights")),
    }
    if not fields["add_bias_linear"]:  # otherwise Megatron sets it
        fields["add_qkv_bias"] = bool(given.get("add_qkv_bias"))
    if is_rotary:
        rotary = {"rotary_percent": given.get("rotary_percent") or 1.0, "rotary_base": 10000, "use_rope_scaling": False}
        fields |= {"position_embedding_type": "rope", **rotary}
    elif positions is not None:
        fields["max_position_embeddings"] = positions[0]
    if heads := given.get("num_attention_heads"):
        grouped = given.get("num_query_groups") if given.get("group_query_attention") else None
        fields |= {
            "num_attention_heads": heads,
            "num_query_groups": grouped or heads,
            "kv_channels": given.get("kv_channels") or words[1] // heads,
        }
        is_tanh = given.get("bias_gelu_fusion") or given.get("openai_gelu")
        fields |= {} if fields["swiglu"] else {"activation_func": "gelu_tanh" if is_tanh else "gelu"}
        epsilon = given.get("norm_epsilon", given.get("layernorm_epsilon"))
        fields |= {} if epsilon is None else {"norm_epsilon": epsilon}
    multiple = given.get("make_vocab_size_divisible_by", DIVISIBLE_BY)
    return StoredWeights(
        None,
        str(folder),
        fields=fields,
        has_config=bool(given),
        parts=tuple(parts),
        rows=ranks * words[0],
        rows_divisible_by=ranks * multiple,
    )
