"""Opens the weights that a run starts from (``train.load: FORMAT:DIR``) and checks that they fit its model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.contracts.pretrained import (
    DEEPSPEED,
    HF,
    config_folder,
    deepspeed_folder,
    one_model_rank,
    stored_sizes,
)
from tridock.errors import Problem, RequestError
from tridock.experiment.inputs import weights_problems
from tridock.experiment.model import Model
from tridock.experiment.schema import Experiment
from tridock.train.checkpoints.deepspeed import DeepSpeedWeights
from tridock.train.huggingface.weights import Pretrained, Weights, checked_model, exported, weights_on_meta

_MOST: Final = 5
"""Weights that an error lists."""


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
        yield Problem(where, "lacks weights of the experiment's model", _listed(missing), todo)
        return
    for target, name in names.items():
        if stored.shapes[name] != expected[target]:
            got = f"{_text(stored.shapes[name])}, not {_text(expected[target])}"
            yield Problem(f"{where}: {name}", "has another shape than in the experiment's model", got, todo)
    used = [stored.aliases.get(name, name) for name in names.values()]
    if len({*used}) < len(used):
        what, to = "the checkpoint has one matrix for both", "set it to false"
        yield Problem("model.untie_embeddings_and_output_weights", f"{what}, in {where}", "true", to)
    if odd := sorted({stored.aliases.get(name, name) for name in stored.names} - {*used}):
        yield Problem(where, "holds weights that the experiment's model lacks", _listed(odd), todo)


def _expected_shapes(model: Model, tokens: int) -> dict[str, tuple[int, ...]]:
    weights = weights_on_meta(model, tokens)
    return {target: tuple(tensor.shape) for target, tensor in exported(model, tokens, weights.__getitem__)}


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


_OPEN: Final[Mapping[str, Callable[[Path, Experiment, int], Weights]]] = {HF: Pretrained.of, DEEPSPEED: _of_deepspeed}
