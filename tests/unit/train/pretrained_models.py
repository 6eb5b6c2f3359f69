"""What the tests of ``train.load: FORMAT:DIR`` share: models, and what a launch and the ranks say of their weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.train.test_huggingface import TOKENS, experiment
from tridock.contracts.codec import decode, encode
from tridock.contracts.pretrained import StoredWeights
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.experiment.inputs import weights_problems
from tridock.experiment.model import Model
from tridock.node.probes.pretrained import stored_weights
from tridock.train.huggingface.weights import exported
from tridock.train.models.gpt import GPT, Shape
from tridock.train.pretrained import pretrained_weights


def gpt_of(fields: Mapping[str, Any]) -> GPT:
    torch.manual_seed(1)
    model = GPT(Shape.of(Model.model_validate(fields), TOKENS))
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms, too
            weight += 0.2 * torch.randn_like(weight)
    return model


def names_and_weights(gpt: GPT) -> dict[str, Tensor]:
    """Its weights by transformers' names."""
    weights = dict(gpt.named_parameters())
    return {name: it.detach().clone() for name, it in exported(gpt.shape.model, TOKENS, weights.__getitem__)}


def part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    share = math.ceil(tensor.numel() / ranks)
    padded = torch.cat([tensor.flatten(), torch.full((share * ranks - tensor.numel(),), math.nan)])
    return padded[rank * share : (rank + 1) * share].clone()


def loading(folder: Path, fields: Mapping[str, Any], kind: str = "deepspeed") -> Experiment:
    found: Experiment = experiment(**fields)
    train = found.train.model_copy(update={"load": f"{kind}:{folder}"})
    return found.model_copy(update={"train": train})


def loaded(folder: Path, fields: Mapping[str, Any], kind: str = "deepspeed") -> dict[str, Tensor]:
    weights = pretrained_weights(loading(folder, fields, kind), Path("/"), TOKENS)
    assert weights is not None
    return dict(weights.items())


def assert_equal(found: Mapping[str, Tensor], gpt: GPT) -> None:
    own = {name: it[: len(found[name])] for name, it in gpt.named_parameters()}
    assert found.keys() == own.keys()
    assert [name for name in own if not torch.equal(found[name], own[name])] == []
    assert len(found["token_embedding.weight"]) == TOKENS


def preflight(folder: Path, fields: Mapping[str, Any], kind: str = "deepspeed") -> list[Problem]:
    """What a launch says before a rank starts: a node reads the folder without torch, the operator compares."""
    stored = decode(StoredWeights, encode(stored_weights(kind, folder)))
    if stored.problem is not None:
        return [stored.problem]
    try:
        return list(weights_problems(loading(folder, fields, kind).model, stored, TOKENS))
    except RequestError as error:
        return list(error.problems)


def refusal(folder: Path, fields: Mapping[str, Any], kind: str = "deepspeed") -> str:
    """What the ranks say."""
    with pytest.raises(RequestError) as error:
        loaded(folder, fields, kind)
    return re.sub(rf"{folder}\S*/", "", str(error.value)).replace(str(folder), "DIR")


def before_and_in_ranks(folder: Path, fields: Mapping[str, Any], kind: str = "deepspeed") -> str:
    """What the ranks say of a model that does not fit, which a launch says before they start."""
    with pytest.raises(RequestError) as error:
        loaded(folder, fields, kind)
    assert preflight(folder, fields, kind) == list(error.value.problems)
    return refusal(folder, fields, kind)
