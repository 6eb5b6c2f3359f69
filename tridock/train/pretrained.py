"""Opens the weights that a run starts from (``train.load: FORMAT:DIR``) and checks that they fit its model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from tridock.contracts.megatron_weights import megatron_folder, megatron_sizes
from tridock.contracts.pretrained import (
    DEEPSPEED,
    HF,
    MEGATRON,
    StoredWeights,
    config_folder,
    deepspeed_folder,
    one_model_rank,
    shown_sizes,
)
from tridock.errors import RequestError
from tridock.experiment.inputs import weights_problems
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_weights import VOCABULARY
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.checkpoints.megatron_lm import MegatronWeights
from tridock.train.huggingface.weights import Pretrained, Weights, checked_model, names_of


def pretrained_weights(experiment: Experiment, workspace: Path, tokens: int) -> Weights | None:
    """Returns the weights of ``train.load: FORMAT:DIR``; None without it.

    Raises :class:`RequestError` with everything that does not fit a model with ``tokens`` in its vocabulary.
    """
    if experiment.train.pretrained is None:
        return None
    kind, folder = experiment.train.pretrained
    return _OPEN[kind](workspace / folder, experiment, tokens)


def _of_deepspeed(folder: Path, experiment: Experiment, tokens: int) -> Pretrained:
    checkpoint = deepspeed_folder(folder)
    config = config_folder(folder, checkpoint)
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    if config is not None:
        model = checked_model(config, experiment, tokens)
    stored = DeepSpeedWeights(checkpoint, one_model_rank(checkpoint))
    sizes = StoredWeights(None, str(checkpoint), stored.shapes, stored.aliases, fields=shown_sizes(stored.shapes))
    if problems := list(weights_problems(experiment, sizes, tokens)):
        raise RequestError(problems)
    return Pretrained(stored, model)


def _of_megatron(folder: Path, experiment: Experiment, tokens: int) -> Weights:
    checkpoint = megatron_folder(folder)
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    stored = MegatronWeights(checkpoint, model)
    sizes = megatron_sizes(checkpoint, stored.parts, stored.arguments)
    if problems := list(weights_problems(experiment, sizes, tokens)):
        raise RequestError(problems)
    return _Megatron(stored, model, tokens)


class _Megatron(Weights):
    """Weights of Megatron-LM v1.1.5 (``megatron:DIR``)."""

    def __init__(self, stored: MegatronWeights, model: Model, tokens: int) -> None:
        self.model, self.names = model, names_of(model)
        self._stored, self._tokens = stored, tokens

    def read(self, name: str) -> Tensor:
        weight = self._stored.read(name)
        return weight[: self._tokens] if name in VOCABULARY else weight

    def close(self) -> None:
        del self._stored


_OPEN: Final[Mapping[str, Callable[[Path, Experiment, int], Weights]]] = {
    HF: Pretrained.of,
    DEEPSPEED: _of_deepspeed,
    MEGATRON: _of_megatron,
}
