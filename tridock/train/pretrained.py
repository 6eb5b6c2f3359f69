"""Opens the weights that a run starts from (``train.load: FORMAT:DIR``) and checks that they fit its model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch import Tensor

from tridock.contracts.megatron_weights import megatron_folder, megatron_sizes
from tridock.contracts.pretrained import (
    DEEPSPEED,
    HF,
    MEGATRON,
    config_folder,
    deepspeed_folder,
    listed,
    one_model_rank,
    shape_text,
    stored_sizes,
)
from tridock.errors import Problem, RequestError
from tridock.experiment.inputs import weights_problems
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.checkpoints.megatron_lm import MegatronWeights
from tridock.train.huggingface.weights import (
    TOKEN_TABLE,
    Pretrained,
    Weights,
    checked_model,
    exported,
    names_of,
    weights_on_meta,
)


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
    sizes = replace(stored_sizes(stored.shapes), parameters=None)  # every weight is compared below
    if problems := list(weights_problems(experiment, sizes, tokens)):
        raise RequestError(problems)
    found = Pretrained(stored, model)
    if problems := list(_differences(found, stored, tokens)):
        raise RequestError(problems)
    return found


def _differences(found: Pretrained, stored: DeepSpeedWeights, tokens: int) -> Iterator[Problem]:
    """Yields weights that are missing, of another shape, or not of the model."""
    where, todo = str(stored.folder), "change the model's fields, or use train.load: hf:DIR after save_pretrained"
    expected = _expected_shapes(found.model, tokens)
    names = {target: found.renamed(target) for target in expected}
    missing = [target for target, name in names.items() if name not in stored.names]
    if missing:
        yield Problem(where, "lacks weights of the experiment's model", listed(missing), todo)
        return
    for target, name in names.items():
        if stored.shapes[name] != expected[target]:
            got = f"{shape_text(stored.shapes[name])}, not {shape_text(expected[target])}"
            yield Problem(f"{where}: {name}", "has another shape than in the experiment's model", got, todo)
    used = [stored.aliases.get(name, name) for name in names.values()]
    if len({*used}) < len(used):
        what, to = "the checkpoint has one matrix for both", "set it to false"
        yield Problem("model.untie_embeddings_and_output_weights", f"{what}, in {where}", "true", to)
    if odd := sorted({stored.aliases.get(name, name) for name in stored.names} - {*used}):
        yield Problem(where, "holds weights that the experiment's model lacks", listed(odd), todo)


def _of_megatron(folder: Path, experiment: Experiment, tokens: int) -> Weights:
    checkpoint = megatron_folder(folder)
    model = experiment.model.model_copy(update={"vocab_size": tokens})
    stored = MegatronWeights(checkpoint, model)
    sizes = megatron_sizes(checkpoint, stored.shapes, stored.ranks, stored.arguments)
    if problems := list(weights_problems(experiment, sizes, tokens)):
        raise RequestError(problems)
    rows = {name: tuple(it.shape) for name, it in weights_on_meta(model, sizes.rows or tokens).items()}
    if problems := list(stored.differences(rows)):
        raise RequestError(problems)
    return _Megatron(stored, model, tokens)


class _Megatron(Weights):
    """Weights of Megatron-LM v1.1.5 (``megatron:DIR``)."""

    def __init__(self, stored: MegatronWeights, model: Model, tokens: int) -> None:
        self.model, self.names = model, names_of(model)
        self._stored, self._tokens = stored, tokens

    def read(self, name: str) -> Tensor:
        weight = self._stored.read(name)
        return weight[: self._tokens] if name == TOKEN_TABLE else weight

    def close(self) -> None:
        del self._stored


def _expected_shapes(model: Model, tokens: int) -> dict[str, tuple[int, ...]]:
    weights = weights_on_meta(model, tokens)
    return {target: tuple(tensor.shape) for target, tensor in exported(model, tokens, weights.__getitem__)}


_OPEN: Final[Mapping[str, Callable[[Path, Experiment, int], Weights]]] = {
    HF: Pretrained.of,
    DEEPSPEED: _of_deepspeed,
    MEGATRON: _of_megatron,
}
