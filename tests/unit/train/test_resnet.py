"""What ResNet-50 keeps for its backward pass, tensor by tensor, beside what the planner counts."""

from __future__ import annotations

import pytest
import torch

from tests.unit.experiment.test_resnet import experiment
from tridock.engines import cost_model_of
from tridock.layout.shape import total_bytes
from tridock.train.models.resnet import ResNet


@pytest.mark.parametrize(
    ("height", "width", "images", "precision"),
    [
        pytest.param(128, 128, 2, "fp32", marks=pytest.mark.full),
        pytest.param(96, 160, 3, "fp32", marks=pytest.mark.full),
        (128, 96, 4, "bf16"),
    ],
)
def test_what_is_kept_is_what_the_planner_counts(height: int, width: int, images: int, precision: str) -> None:
    of = experiment(
        **{"model.img_h": height, "model.img_w": width, "batch.micro_batch_size": images, "precision": precision}
    )
    model = ResNet(of.model)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    pixels = torch.randint(0, 256, (images, 3, height, width), dtype=torch.uint8)
    cast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        loss = model(pixels, torch.zeros(images, dtype=torch.long))
    assert loss.requires_grad
    assert sum(kept.values()) == pytest.approx(
        total_bytes(cost_model_of(of).activation_terms(of, 0, 1, None)), rel=0.02
    )
