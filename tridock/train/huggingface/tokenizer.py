"""Finds the tokenizer of a run: that of its pretrained weights, or the one that made its data."""

from pathlib import Path

from tridock.contracts.pretrained import HF
from tridock.contracts.tokenizers import TOKENIZER, sha256s_in
from tridock.experiment import Experiment
from tridock.experiment.inputs import tokenizer_folders


def tokenizer_of(
    experiment: Experiment, workspace: Path, sha256: str | None, fetched: Path | None = None
) -> Path | None:
    """Returns the folder of the tokenizer that made the data: that of the pretrained weights, or beside the data.

    ``sha256`` identifies the one beside the data. ``fetched``: where a fetched run has a copy, which is used if the
    workspace has none.
    """
    folders = [workspace / folder for folder in tokenizer_folders(experiment)]
    if fetched is not None:
        folders = [*filter(Path.exists, folders), fetched]
    if experiment.train.pretrained is not None and experiment.train.pretrained[0] == HF:
        return folders[0]
    places = (place for place in folders if (place / TOKENIZER).is_file())
    return next((place for place in places if sha256 in sha256s_in(place)), None)
