"""The contents of a run's checkpoint, or of a transformers folder: model, vocabulary, weights, tokenizer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tridock.contracts.checkpoints import PROGRESS, newest, saved_in
from tridock.contracts.pretrained import CONFIG, read_config
from tridock.contracts.run_folder import CHECKPOINTS, EXPERIMENT
from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, load_experiment
from tridock.experiment.families import model_fields
from tridock.experiment.model import Model
from tridock.train.checkpoints.files import damage
from tridock.train.checkpoints.files import read_manifest as read_manifest_of_files
from tridock.train.checkpoints.progress import read_progress
from tridock.train.checkpoints.weights import weights_in
from tridock.train.huggingface.stored import Safetensors
from tridock.train.huggingface.tokenizer import tokenizer_of
from tridock.train.huggingface.weights import Pretrained, Read

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
    temporary: tempfile.TemporaryDirectory[str] | None = None
    """Folder of the tokenizer, if its files had to be written."""

    @classmethod
    def open(cls, path: Path, iteration: int | None = None) -> Saved:
        """Opens the newest checkpoint of a run, that of an iteration, or a transformers folder.

        Raises :class:`RequestError` if there is none.
        """
        if (path / CONFIG).is_file():
            fields = model_fields(read_config(path), str(path / CONFIG))
            model = Model.model_validate({"seq_length": fields["max_position_embeddings"], **fields})
            return cls(model, fields["vocab_size"], Pretrained(Safetensors(path), model).read, path, str(path))
        experiment = load_experiment(path / EXPERIMENT)
        workspace = path.absolute().parent.parent
        folder = workspace / (experiment.train.checkpoint_folder or path.absolute() / CHECKPOINTS)
        checkpoint = _checkpoint(folder, iteration)
        _check_whole(checkpoint)
        model, vocabulary, tokenizer = experiment.model, None, tokenizer_of(experiment, workspace)
        files = _gpt2_files(experiment, workspace)
        if files is not None and not (checkpoint / PROGRESS).is_file():
            vocabulary = BytePairTokenizer.from_gpt2(*files)
            tokens: int | None = vocabulary.vocab_size
        else:
            tokens = read_progress(checkpoint).vocab_size
        if tokens is None or model.is_vision:
            todo = "name a run that trains a language model"
            raise RequestError(Problem(str(checkpoint), "cannot be exported", experiment.engine, todo))
        description = f"{checkpoint}, {model.num_layers} layers"
        if vocabulary is not None:
            gelu = "gelu_tanh" if _TANH.intersection(experiment.megatron_args) else "gelu"
            model = model.model_copy(update={"activation_func": gelu})
        found = cls(model, tokens, weights_in(checkpoint, model), tokenizer, description)
        if tokenizer is not None or vocabulary is None:
            return found
        place = tempfile.TemporaryDirectory(prefix="tridock-tokenizer-")
        vocabulary.save(Path(place.name))
        return replace(found, tokenizer=Path(place.name), temporary=place)


def _checkpoint(folder: Path, iteration: int | None) -> Path:
    if iteration is not None:
        there = saved_in(folder)
        if iteration not in there:
            todo = f"there: {', '.join(map(str, sorted(there))) or 'none'}"
            raise RequestError(Problem("--iteration", f"has no checkpoint in {folder}", str(iteration), todo))
        return there[iteration]
    if (last := newest(folder)) is None:
        todo = "name a run that has saved, or a folder with config.json and model.safetensors"
        raise RequestError(Problem(str(folder), "contains no complete checkpoint", "", todo))
    return last[1]


def _check_whole(checkpoint: Path) -> None:
    """Raises :class:`RequestError` if a file of a checkpoint is missing or cut short."""
    manifest = read_manifest_of_files(checkpoint)
    problems = [manifest] if isinstance(manifest, Problem) else damage(checkpoint, manifest, manifest, read=False)
    if found := list(problems):
        raise RequestError(found)


def _gpt2_files(experiment: Experiment, workspace: Path) -> tuple[Path, Path] | None:
    """Returns the vocabulary and merges files that Megatron v1.1.5's ranks read, if the experiment names them."""
    vocabulary, merges = experiment.data.vocab_file, experiment.data.merge_file
    return None if vocabulary is None or merges is None else (workspace / vocabulary, workspace / merges)
