"""What a run has saved, or a folder of transformers' holds: the model, its vocabulary, its weights, its tokenizer."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tridock.contracts.checkpoints import newest
from tridock.contracts.run_folder import CHECKPOINTS, EXPERIMENT
from tridock.data.dataset.manifest import read_manifest
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.data.tokenize.tokenizer import TOKENIZER, BytePairTokenizer
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, load_experiment
from tridock.experiment.model import Model
from tridock.train.checkpoints.files import damage
from tridock.train.checkpoints.files import read_manifest as read_manifest_of_files
from tridock.train.checkpoints.progress import read_progress
from tridock.train.checkpoints.weights import weights_in
from tridock.train.huggingface.families import model_fields
from tridock.train.huggingface.weights import CONFIG, Pretrained, Read, read_config


@dataclass(frozen=True, slots=True)
class Saved:
    """A model with its weights."""

    model: Model
    tokens: int
    """Of the vocabulary, without padding."""
    read: Read
    tokenizer: Path | None
    """The folder of its tokenizer, if it is known."""
    description: str

    @classmethod
    def open(cls, path: Path, iteration: int | None = None) -> Saved:
        """The newest checkpoint of a run, or that of an iteration; or a folder of transformers'.

        Raises :class:`RequestError` if there is none.
        """
        if (path / CONFIG).is_file():
            fields = model_fields(read_config(path), str(path / CONFIG))
            model = Model.model_validate({"seq_length": fields["max_position_embeddings"], **fields})
            return cls(model, fields["vocab_size"], Pretrained(path, model).read, path, str(path))
        experiment = load_experiment(path / EXPERIMENT)
        workspace = path.absolute().parent.parent
        folder = workspace / (experiment.train.checkpoint_folder or path.absolute() / CHECKPOINTS)
        checkpoint = _checkpoint(folder, iteration)
        _check_whole(checkpoint)
        tokens = read_progress(checkpoint).vocab_size
        if tokens is None or experiment.model.is_vision:
            todo = "name a run of engine torch or megatron-core that trains a language model"
            raise RequestError(Problem(str(checkpoint), "cannot be exported", experiment.engine, todo))
        model = experiment.model
        description = f"{checkpoint}, {model.num_layers} layers"
        return cls(model, tokens, weights_in(checkpoint, model), _tokenizer_of(experiment, workspace), description)


def _checkpoint(folder: Path, iteration: int | None) -> Path:
    if iteration is not None:
        found = folder / f"iter_{iteration:07d}"
        if not found.is_dir():
            names = ", ".join(sorted(path.name for path in folder.glob("iter_*"))) or "none"
            todo = f"there: {names}"
            raise RequestError(Problem("--iteration", f"has no checkpoint in {folder}", str(iteration), todo))
        return found
    if (last := newest(folder)) is None:
        todo = "name a run that has saved, or a folder with config.json and model.safetensors"
        raise RequestError(Problem(str(folder), "holds no whole checkpoint", "", todo))
    return last[1]


def _check_whole(checkpoint: Path) -> None:
    """Raises :class:`RequestError` if a file of a checkpoint is missing or cut short."""
    manifest = read_manifest_of_files(checkpoint)
    problems = [manifest] if isinstance(manifest, Problem) else damage(checkpoint, manifest, manifest, read=False)
    if found := list(problems):
        raise RequestError(found)


def _tokenizer_of(experiment: Experiment, workspace: Path) -> Path | None:
    """The folder of the tokenizer that made the data: where the weights came from, or beside the data."""
    if experiment.train.pretrained_folder is not None:
        return workspace / experiment.train.pretrained_folder
    prefix = workspace / experiment.data.data_path
    manifest = read_manifest(prefix)
    places = (place for place in (prefix.parent, prefix.parent / "tokenizer") if (place / TOKENIZER).is_file())
    return next((place for place in places if manifest is not None and _made(place, manifest.tokenizer_sha256)), None)


def _made(folder: Path, sha256: str) -> bool:
    """Whether the tokenizer in a folder has this hash in a data set's manifest."""
    for kind in (BytePairTokenizer.load, HuggingFaceTokenizer):
        with suppress(RequestError):
            if kind(folder).sha256 == sha256:
                return True
    return False
