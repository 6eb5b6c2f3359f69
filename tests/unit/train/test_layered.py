"""Initial weights that come module by module are those of a model that is built at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.unit.experiment.test_resnet import experiment as of_images
from tests.unit.train.experiments import experiment
from tridock.train.models.gpt import GPT, Shape
from tridock.train.models.layered import LayeredModel, draw_weights
from tridock.train.models.resnet import ResNet


def gpt() -> LayeredModel:
    return GPT(Shape.of(experiment(**{"model.hidden_size": 18}).model, 300))


def resnet() -> LayeredModel:
    return ResNet(of_images().model)


def tensors(model: LayeredModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("build", [gpt, resnet])
def test_the_weights_of_the_constructor(build: Callable[[], LayeredModel]) -> None:
    torch.manual_seed(5)
    expected = tensors(build())
    after = torch.rand(1)
    torch.manual_seed(5)
    with torch.device("meta"):
        model = build()
    drawn: list[tuple[str, Tensor]] = []
    draw_weights(model, lambda name, weight: drawn.append((name, weight)))
    assert torch.equal(torch.rand(1), after)
    assert all(tensor.is_meta for tensor in tensors(model).values())
    assert sorted(name for name, _ in drawn) == sorted(expected)  # each once
    for name, weight in drawn:
        assert torch.equal(weight, expected[name]), name
