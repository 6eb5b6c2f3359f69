"""Folders of weights that a run can start from (``train.load: FORMAT:DIR``): which of their files hold the weights."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tridock.contracts.checkpoints import LATEST
from tridock.contracts.git_lfs import refuse_pointer
from tridock.contracts.run_folder import read_text
from tridock.errors import Problem, RequestError

HF: Final = "hf"
"""A transformers model folder: ``config.json`` and safetensors."""
DEEPSPEED: Final = "deepspeed"
"""A checkpoint that DeepSpeed's ``save_checkpoint`` wrote, of a model with transformers' names."""
MEGATRON: Final = "megatron"
"""A checkpoint of Megatron-LM v1.1.5, with or without DeepSpeed, or of a legacy model of later versions."""
FORMATS: Final = (HF, DEEPSPEED, MEGATRON)
NAMES: Final[Mapping[str, str]] = {
    HF: "transformers model folder",
    DEEPSPEED: "checkpoint of DeepSpeed",
    MEGATRON: "checkpoint of Megatron-LM",
    "": "checkpoint of a run of Tridock",
}
"""What a folder of each format is; an empty one is that of a run that resumes."""
DTYPES: Final = ("float32", "bfloat16", "float16")
"""The types of weights that are read, by torch's names."""
EXTRA_STATE: Final = "_extra_state"
"""How names end of what TransformerEngine adds to a layer: the scales of its past fp8 products."""
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PLAIN_LAYERS: Final[Mapping[str, Any]] = {
    "add_attention_bias": False,
    "use_post_norm": False,
    "no_rope_freq": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": None,
    "logits_scaling": 1.0,
    "qk_layernorm_all_heads": False,
}
"""Fields of an experiment's model with the values that leave a term out, which few models have."""
GPT2_LAYERS: Final[Mapping[str, Any]] = {
    **PLAIN_LAYERS,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "num_moe_experts": None,
}
"""Fields of an experiment's model with the values that GPT-2 has, in transformers and in Megatron-LM v1.1.5."""

_MODEL_STATES: Final = re.compile(r"^(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt$")
_OPTIM_STATES: Final = re.compile(r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
SAVED: Final = "name a folder that transformers' save_pretrained has written, with config.json and model.safetensors"
DOWNLOAD: Final = "download all of the model"
_CONVERT: Final = "or convert it with DeepSpeed's zero_to_fp32.py and transformers, and use train.load: hf:DIR"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The answer about a folder of weights: what is wrong with it, or the model in it."""

    problem: Problem | None = None
    folder: str = ""
    """The folder of the weights, which may be in the given one."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of weights with transformers' names."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of weights that are another weight, with that one's name."""
    config: Mapping[str, Any] | None = None
    """The content of ``config.json``, if there is one."""
    config_folder: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of an experiment's model that the weights show."""
    has_config: bool = False
    """Whether every field of the model is known, by a ``config.json`` or Megatron's arguments."""
    parts: tuple[Mapping[str, tuple[int, ...]], ...] = ()
    """Of a checkpoint of Megatron-LM the shapes of each tensor parallel rank's weights, by v1.1.5's names."""
    rows: int | None = None
    """Rows of the token table with its padding, if it has any."""
    rows_divisible_by: int = 1
    """What the padding makes them a multiple of."""
    other_dtypes: Mapping[str, str] = field(default_factory=dict)
    """By the names of weights, types that are not read: other than fp32, bf16 and fp16."""


@dataclass(frozen=True, slots=True)
class StateFiles:
    """The files that one model parallel rank's data parallel ranks wrote, in their order."""

    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]
    """Empty without ZeRO."""

    @property
    def has_module(self) -> bool:
        """Whether the model's own weights are whole, which ZeRO 3 partitions."""
        return len(self.models) == 1 and not self.models[0].name.startswith("zero_")


def deepspeed_folder(folder: Path) -> Path:
    """Returns the checkpoint in ``folder``: the folder itself, or the one that its ``latest`` names.

    Raises :class:`RequestError` if there is none.
    """
    if any(folder.glob("*_model_states.pt")):
        return folder
    todo = "name the folder that was given to save_checkpoint, or one checkpoint in it"
    name = read_text(folder / LATEST).strip()
    if not name:
        got = f"neither {LATEST} nor *_model_states.pt"
        raise RequestError(Problem(str(folder), "holds no checkpoint of DeepSpeed", got, todo))
    if not any((folder / name).glob("*_model_states.pt")):
        what = "names a checkpoint that is not there, or has no *_model_states.pt"
        raise RequestError(Problem(str(folder / LATEST), what, name, todo))
    return folder / name


def deepspeed_files(folder: Path) -> dict[int, StateFiles]:
    """Returns the files of a checkpoint by model parallel rank. Raises :class:`RequestError` if one is missing."""
    models: dict[int, dict[int, Path]] = {}
    optimizers: dict[int, dict[int, Path]] = {}
    for kind, pattern in ((models, _MODEL_STATES), (optimizers, _OPTIM_STATES)):
        for path in folder.iterdir():
            if match := pattern.match(path.name):
                kind.setdefault(int(match[2]), {})[int(match[1] or 0)] = path
    if not models:
        todo = "name the folder that was given to save_checkpoint, or one checkpoint in it"
        raise RequestError(Problem(str(folder), "holds no checkpoint of DeepSpeed", "no *_model_states.pt", todo))
    for found in (*models.values(), *optimizers.values()):
        _require_all(folder, found)
    _require_all(folder, dict.fromkeys(models, folder / "mp_rank_00_model_states.pt"))
    for rank, own in models.items():
        many = len(optimizers.get(rank, {}))
        if len(own) > 1 and len(own) != many:
            what = "has another number of *_optim_states.pt than of *_model_states.pt"
            raise RequestError(Problem(str(folder), what, f"{many} and {len(own)}", _COPY))
    return {
        rank: StateFiles(_in_order(own), _in_order(optimizers.get(rank, {}))) for rank, own in sorted(models.items())
    }


def _in_order(files: Mapping[int, Path]) -> tuple[Path, ...]:
    return tuple(files[number] for number in sorted(files))


_COPY: Final = "copy the files of all ranks into this one folder"


def _require_all(folder: Path, found: Mapping[int, Path]) -> None:
    missing = sorted({*range(max(found) + 1)} - {*found})
    if missing:
        example = found[min(found)].name
        what = f"lacks the files of ranks; there is {example}"
        raise RequestError(Problem(str(folder), what, f"none of rank {', '.join(map(str, missing))}", _COPY))


def one_model_rank(folder: Path) -> StateFiles:
    """Returns the files of a checkpoint without model parallelism. Raises :class:`RequestError` for another one."""
    odd = sorted(path.name for path in folder.glob("layer_*_states.pt"))
    files = deepspeed_files(folder)
    if odd or len(files) > 1:
        got = odd[0] if odd else f"{len(files)} model parallel ranks"
        what = "is of a pipeline, of model parallel ranks, or of a mixture of experts, which deepspeed: does not read"
        raise RequestError(Problem(str(folder), what, got, f"use the model's own tools, {_CONVERT}"))
    return files[0]


def config_folder(folder: Path, checkpoint: Path) -> Path | None:
    """Returns which of ``folder``, the ``checkpoint`` in it and the folder around that has a ``config.json``."""
    places = (folder, checkpoint, checkpoint.parent)
    return next((place for place in places if (place / CONFIG).is_file()), None)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a transformers folder. Raises :class:`RequestError` if it cannot be read."""
    path = folder / CONFIG
    with RequestError.in_place_of((OSError, RecursionError, ValueError), path, "cannot be read", SAVED):
        content = path.read_bytes()
        refuse_pointer(path, content)
        config = json.loads(content)
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__}, no object")
    return config


def shown_sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Returns the fields of the experiment's model that shapes of weights with transformers' names show."""
    fields: dict[str, int] = {}
    layers = [int(found[1]) for name in shapes if (found := _LAYER.search(name))]
    if layers:
        fields["num_layers"] = 1 + max(layers)
    for name, shape in shapes.items():
        for ending, (dimension, field_) in _SIZES.items():
            if name.endswith(ending) and len(shape) == 2:
                fields[field_] = shape[dimension]
                if field_ == "vocab_size":
                    fields["hidden_size"] = shape[1]
    return fields


def is_token_table(name: str) -> bool:
    return name.endswith(("wte.weight", "embed_tokens.weight"))


_LAYER: Final = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)\.")
_SIZES: Final = {
    "wte.weight": (0, "vocab_size"),
    "embed_tokens.weight": (0, "vocab_size"),
    "wpe.weight": (0, "max_position_embeddings"),
    "mlp.c_fc.weight": (1, "ffn_hidden_size"),
    "mlp.gate_proj.weight": (0, "ffn_hidden_size"),
}
"""By the endings of names, which dimension is the size of which field."""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


# A pickle with another class than these is refused before the ranks start, without importing a class.
FOREIGN: Final = "holds an object that is not loaded, because a pickle can run any code"
DEEPSPEED_TODO: Final = "convert the checkpoint where you trust it (zero_to_fp32.py), or copy it again"
MEGATRON_TODO: Final = (
    "save it again without the object where you trust the file (torch.load, torch.save), or copy it again"
)

DEEPSPEED_CLASSES: Final = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        *("builtins.getattr", "__builtin__.getattr"),  # of members of enums; pickle protocol 2 has Python 2's name
    }
)
LOSS_SCALERS: Final = tuple(
    f"{place}fp16.loss_scaler.{name}" for place in ("megatron.", "") for name in ("LossScaler", "DynamicLossScaler")
)
"""Of Megatron-LM v1.1.5's own fp16 optimizer."""
ENUMS: Final = (
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
)
"""Of arguments of later versions of Megatron-LM."""
ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
"""NumPy has moved it between versions."""
MEGATRON_CLASSES: Final = frozenset(
    {*DEEPSPEED_CLASSES, *LOSS_SCALERS, *ENUMS, *ARRAYS, "argparse.Namespace", "numpy.ndarray", "numpy.dtype"}
)

_PLAIN: Final = re.compile(
    r"_codecs\.encode|collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.(bytearray|complex|set)"
    r"|torch\.((_utils|_tensor|storage|serialization|cuda|sparse|cuda\.sparse|nn\.parameter|distributed\..+)\.)?\w+"
)
"""What torch's ``weights_only`` loads, and other names of the same modules of torch, on which its version decides."""


def foreign_class(named: Iterable[str], known: Collection[str]) -> str | None:
    """Returns the first class that is neither plain nor ``known``."""
    return next((name for name in named if name not in known and not _PLAIN.fullmatch(name)), None)
