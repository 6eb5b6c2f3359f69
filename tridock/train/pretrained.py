"""Opens the weights that a run starts from (``train.load: FORMAT:DIR``) and checks that they fit its model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from tridock.contracts import pretrained
from tridock.contracts.megatron_weights import megatron_folder, megatron_sizes
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.experiment.transformers_weights import VOCABULARY
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.checkpoints.megatron_lm import MegatronWeights
from tridock.train.huggingface.weights import Pretrained, Weights, checked_model, finite, names_of


def pretrained_weights(experiment: Experiment, workspace: Path, tokens: int) -> Weights | None:
    """Returns the weights of ``train.load: FORMAT:DIR``; None without it.

    Raises :class:`RequestError` with everything that does not fit a model with ``tokens`` in its vocabulary.
    """
    if experiment.train.pretrained is None:
        return None
    kind, folder = experiment.train.pretrained
    return _OPEN[kind](workspace / folder, experiment, tokens)


def _of_deepspeed(folder: Path, experiment: Experiment, tokens: int) -> Pretrained:
    checkpoint = pretrained.deepspeed_folder(folder)
    place = pretrained.config_folder(folder, checkpoint)
    config = None if place is None else pretrained.read_config(place)
    stored = DeepSpeedWeights(checkpoint, pretrained.one_model_rank(checkpoint))
    given = stored.shapes, stored.aliases, config, str(place or ""), pretrained.shown_sizes(stored.shapes)
    sizes = pretrained.StoredWeights(None, str(checkpoint), *given, other_dtypes=stored.other_dtypes)
    return Pretrained(stored, checked_model(experiment.model, sizes, tokens))


def _of_megatron(folder: Path, experiment: Experiment, tokens: int) -> Weights:
    checkpoint = megatron_folder(folder)
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    stored = MegatronWeights(checkpoint, model)
    sizes = megatron_sizes(checkpoint, stored.parts, stored.arguments, stored.other_dtypes)
    return _Megatron(stored, checked_model(model, sizes, tokens), tokens, checkpoint)


class _Megatron(Weights):
    """Weights of Megatron-LM v1.1.5 (``megatron:DIR``)."""

    def __init__(self, stored: MegatronWeights, model: Model, tokens: int, folder: Path) -> None:
        self.model, self.names = model, names_of(model)
        self._stored, self._tokens, self._folder = stored, tokens, folder

    def read(self, name: str) -> Tensor:
        weight = finite(self._stored.read(name), name, self._folder)
        return weight[: self._tokens] if name in VOCABULARY else weight

    def close(self) -> None:
        del self._stored


_OPEN: Final[Mapping[str, Callable[[Path, Experiment, int], Weights]]] = {
    pretrained.HF: Pretrained.of,
    pretrained.DEEPSPEED: _of_deepspeed,
    pretrained.MEGATRON: _of_megatron,
}
