"""Finds the tokenizer of a run: that of its pretrained weights, or the one that made its data."""

from contextlib import suppress
from pathlib import Path

from tridock.contracts.pretrained import HF
from tridock.data.dataset.manifest import read_manifest
from tridock.data.tokenize.huggingface import HuggingFaceTokenizer
from tridock.data.tokenize.tokenizer import TOKENIZER, BytePairTokenizer
from tridock.errors import RequestError
from tridock.experiment import Experiment
from tridock.experiment.inputs import tokenizer_folders


def tokenizer_of(experiment: Experiment, workspace: Path) -> Path | None:
    """Returns the folder of the tokenizer that made the data: that of the pretrained weights, or beside the data."""
    folders = [workspace / folder for folder in tokenizer_folders(experiment)]
    if experiment.train.pretrained is not None and experiment.train.pretrained[0] == HF:
        return folders[0]
    manifest = read_manifest(workspace / experiment.data.data_path)
    places = (place for place in folders if (place / TOKENIZER).is_file())
    return next((place for place in places if manifest is not None and _made(place, manifest.tokenizer_sha256)), None)


def _made(folder: Path, sha256: str) -> bool:
    """Whether the tokenizer in a folder has this hash, taken from a data set's manifest."""
    for kind in (BytePairTokenizer.load, HuggingFaceTokenizer):
        with suppress(RequestError):
            if kind(folder).sha256 == sha256:
                return True
    return False
