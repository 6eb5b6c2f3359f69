"""The contents of a run's checkpoint, or of a transformers folder: model, vocabulary, weights, tokenizer."""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tridock.contracts.checkpoint_files import Manifest, damage
from tridock.contracts.checkpoint_files import read_manifest as read_manifest_of_files
from tridock.contracts.checkpoints import PROGRESS, newest, saved_in
from tridock.contracts.pretrained import CONFIG, HF, one_model_rank
from tridock.contracts.run_folder import CHECKPOINTS, FETCHED_TOKENIZER
from tridock.contracts.tokenizers import read_json, sha256_of_data, sha256s_in
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.engines.progress import read_progress
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, recorded_experiment
from tridock.experiment.generation_config import GENERATION_CONFIG, of_config
from tridock.experiment.model import Model
from tridock.experiment.transformers_config import Config, model_fields
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.checkpoints.megatron_lm import megatron_lm_weights
from tridock.train.checkpoints.pickles import only_weights, safe_distributed_load, safe_torch_load
from tridock.train.huggingface.tokenizer import tokenizer_of
from tridock.train.huggingface.weights import Pretrained, Read, Safetensors, checked_model
from tridock.train.megatron_core.names import expert_of, half_of, key_of

_MODEL: Final = "mp_rank_00_model_states.pt"


def weights_in(folder: Path, model: Model) -> Callable[[str], Tensor]:
    """Returns a function that reads a weight of the checkpoint in ``folder`` by its name in engine torch's model.

    Files are memory-mapped, or read tensor by tensor.
    """
    if (folder / "ddp.pt").is_file():
        with only_weights():
            state = torch.load(folder / "ddp.pt", map_location="cpu", mmap=True, weights_only=True)["model"]
        return lambda name: state[name]
    if (folder / ".metadata").is_file():
        read = _distributed(folder)
        is_megatrons = (folder / "common.pt").is_file()
        return _parts(model, read) if is_megatrons else lambda name: read(f"model.{name}")
    if (of_megatron := megatron_lm_weights(folder, model)) is not None:
        return of_megatron
    if (folder / _MODEL).is_file():
        with safe_torch_load():
            module = torch.load(folder / _MODEL, map_location="cpu", mmap=True, weights_only=True)["module"]
        return lambda name: module[name]
    return DeepSpeedWeights(folder, one_model_rank(folder)).read


def _distributed(folder: Path) -> Callable[[str], Tensor]:
    with safe_distributed_load():
        known: Mapping[str, Any] = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata

    def read(key: str) -> Tensor:
        tensor = torch.empty(known[key].size, dtype=known[key].properties.dtype)
        with safe_distributed_load(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load({key: tensor}, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
        return tensor

    return read


def _parts(model: Model, read: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    """Reads megatron-core's weights. A layer's experts are two tensors, kept until the next layer is read."""
    of_experts = lru_cache(maxsize=2)(read)

    def part(name: str) -> Tensor:
        expert, key = expert_of(name), key_of(model, name)
        return _part(model, name, read(key) if expert is None else of_experts(key)[expert])

    return part


def _part(model: Model, name: str, whole: Tensor) -> Tensor:
    half = half_of(model, name)
    return whole if half is None else whole.chunk(2)[half]


_TANH: Final = frozenset(("--bias-gelu-fusion", "--openai-gelu"))
"""Options of Megatron-LM v1.1.5 that make its GELU the tanh approximation."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A model with its weights."""

    model: Model
    tokens: int
    """Size of the vocabulary, without padding."""
    read: Read
    tokenizer: Path | None
    """Folder of its tokenizer, if known."""
    description: str
    made_with: str | None = None
    """SHA-256 of the tokenizer that made its data, if known."""
    is_transformers: bool = False
    """Whether the folder of the tokenizer is that of the weights, or of those that the run started from."""
    temporary: tempfile.TemporaryDirectory[str] | None = None
    """Folder of the tokenizer, if its files had to be written."""

    @classmethod
    def open(cls, path: Path, iteration: int | None = None) -> Saved:
        """Opens the newest checkpoint of a run, that of an iteration, or a transformers folder.

        Raises :class:`RequestError` if there is none.
        """
        if (path / CONFIG).is_file():
            stored = Safetensors(path)
            fields = model_fields(stored.found.config or {}, str(path / CONFIG))
            given = Model.model_validate({"seq_length": fields["max_position_embeddings"], **fields})
            model = checked_model(given, stored.found, fields["vocab_size"])
            weights = Pretrained(stored, model)
            return cls(model, fields["vocab_size"], weights.read, path, str(path), is_transformers=True)
        experiment = recorded_experiment(path)
        workspace = path.absolute().parent.parent
        folder = path.absolute() / CHECKPOINTS
        if not folder.is_dir():  # one that was fetched is in the run's own folder
            folder = workspace / (experiment.train.checkpoint_folder or folder)
        checkpoint = _checkpoint(folder, iteration)
        _check_whole(checkpoint)
        model, vocabulary = experiment.model, None
        made_with = sha256_of_data(workspace / experiment.data.prefix)
        files = _gpt2_files(experiment, workspace, path / FETCHED_TOKENIZER)
        if files is not None and not (checkpoint / PROGRESS).is_file():
            vocabulary = BytePairTokenizer.from_gpt2(*files)
            tokens: int | None = vocabulary.vocab_size
        else:
            progress = read_progress(checkpoint)
            tokens, made_with = progress.vocab_size, progress.tokenizer_sha256 or made_with
        if tokens is None or model.is_vision:
            todo = "name a run that trains a language model"
            raise RequestError(Problem(str(checkpoint), "cannot be exported", experiment.engine, todo))
        description = f"{checkpoint}, {model.num_layers} layers"
        if vocabulary is not None:
            gelu = "gelu_tanh" if _TANH.intersection(experiment.megatron_args) else "gelu"
            model = model.model_copy(update={"activation_func": gelu})
        tokenizer = tokenizer_of(experiment, workspace, made_with, path / FETCHED_TOKENIZER)
        read, is_hf = weights_in(checkpoint, model), (experiment.train.pretrained or "")[:1] == (HF,)
        found = cls(model, tokens, read, tokenizer, description, made_with, is_hf)
        if tokenizer is not None or vocabulary is None:
            return found
        place = tempfile.TemporaryDirectory(prefix="tridock-tokenizer-")
        vocabulary.save(Path(place.name))
        return replace(found, tokenizer=Path(place.name), temporary=place)

    def tokenizer_in(self, given: Path | None) -> Path | None:
        """Returns the folder of the tokenizer; warns if the ``given`` one is not that of the data."""
        if given is not None and self.made_with is not None and self.made_with not in (known := sha256s_in(given)):
            what = f"is not the tokenizer that made the data, whose sha256 is {self.made_with}"
            got = f"{given} with {known[0] if known else 'none'}"
            problem = Problem("--tokenizer", what, got, "leave the option out, if ids mean something else there")
            print(f"warning: {problem}", file=sys.stderr)
        return given or self.tokenizer

    def special(self, tokenizer: HuggingFaceTokenizer | None, folder: Path | None) -> tuple[Config, Config]:
        """Returns the tokens that begin and end a text, as in ``config.json``, and a ``generation_config.json``.

        They are those of a transformers folder, else what the tokenizer says.
        """
        ids = {"bos_token_id": tokenizer and tokenizer.begin, "eos_token_id": tokenizer and tokenizer.end_of_document}
        if not self.is_transformers or folder is None:
            return ids, ids
        config, given = (read_json(folder / name) or {} for name in (CONFIG, GENERATION_CONFIG))
        own = {**ids, **{name: config[name] for name in (*ids, "pad_token_id") if config.get(name) is not None}}
        return own, given or {**own, **of_config(config)}


def _checkpoint(folder: Path, iteration: int | None) -> Path:
    if iteration is not None:
        there = saved_in(folder)
        if iteration not in there:
            todo = f"there: {', '.join(map(str, sorted(there))) or 'none'}"
            raise RequestError(Problem("--iteration", f"has no checkpoint in {folder}", str(iteration), todo))
        return there[iteration]
    if (last := newest(folder)) is None:
        todo = "name a run that has saved, or a folder with config.json and model.safetensors; for a run of a cluster,"
        todo += " add --hosts HOSTFILE"
        raise RequestError(Problem(str(folder), "contains no complete checkpoint", "", todo))
    return last[1]


def _check_whole(checkpoint: Path) -> None:
    """Raises :class:`RequestError` if a file of a checkpoint is missing or cut short."""
    manifest = read_manifest_of_files(checkpoint)
    problems = (
        [manifest] if isinstance(manifest, Problem) else damage(checkpoint, manifest.here, manifest.here, read=False)
    )
    RequestError.raise_for(problems)
    if isinstance(manifest, Manifest) and manifest.elsewhere:
        what, todo = "is a part: other nodes have the rest", "bring it together: add --hosts HOSTFILE"
        raise RequestError(Problem(str(checkpoint), what, ", ".join(sorted(manifest.elsewhere)[:3]), todo))


def _gpt2_files(experiment: Experiment, workspace: Path, fetched: Path) -> tuple[Path, Path] | None:
    """Returns the vocabulary and merges files that Megatron v1.1.5's ranks read, if the experiment names them.

    ``fetched``: where a fetched run has copies, which are used if the workspace has none.
    """

    def found(name: str) -> Path:
        own = workspace / name
        return own if own.is_file() else fetched / own.name

    vocabulary, merges = experiment.data.vocab_file, experiment.data.merge_file
    return None if vocabulary is None or merges is None else (found(vocabulary), found(merges))
