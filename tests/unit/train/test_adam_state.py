"""Optimizer states before and after a load, on a GPU that torch's fake tensors stand for."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from tridock.train.checkpoints import sharded
from tridock.train.checkpoints.adam_state import fresh_state


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    with FakeTensorMode():
        yield torch.device("cuda", 0)


def optimizer(device: torch.device, **options: Any) -> torch.optim.AdamW:
    weight = nn.Parameter(torch.zeros(4, 3, device=device))
    weight.grad = torch.zeros(4, 3, device=device)
    return torch.optim.AdamW([weight], **options)


def kinds(made: torch.optim.AdamW) -> dict[str, tuple[torch.device, torch.dtype, torch.Size]]:
    (state,) = made.state.values()
    return {name: (value.device, value.dtype, value.shape) for name, value in state.items()}


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": False}])
def test_states_are_those_of_the_first_step(gpu: torch.device, options: dict[str, Any]) -> None:
    stepped, loaded = optimizer(gpu, **options), optimizer(gpu, **options)
    stepped.step()
    (weight,) = loaded.param_groups[0]["params"]
    loaded.state[weight] = fresh_state(loaded, weight)
    assert kinds(loaded) == kinds(stepped)


def test_a_sharded_run_resumes_on_a_gpu(gpu: torch.device) -> None:
    made = optimizer(gpu, fused=True)
    tensors = sharded.tensors_of([("weight", made.param_groups[0]["params"][0])], {}, made)
    assert {name: tensor.device for name, tensor in tensors.items()} == dict.fromkeys(tensors, gpu)
    assert len(tensors) == 4
    made.step()


def test_ddp_resumes_on_a_gpu(gpu: torch.device) -> None:
    saved, loaded = optimizer(gpu, fused=True), optimizer(gpu, fused=True)
    saved.step()
    loaded.load_state_dict(saved.state_dict())
    assert kinds(loaded) == kinds(saved)
    loaded.step()
