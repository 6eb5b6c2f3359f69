"""Copies of a state that are written while it changes."""

import io
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tridock.train.checkpoints.snapshot import state_on_host, write_by_torch_save


def saved(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_a_copy_is_written_as_the_original_and_does_not_change_with_it() -> None:
    flat = torch.arange(12.0)
    state = {
        "views": [flat[:4], flat[4:].view(2, 4).t()],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "shape": flat.shape,
        "inner": OrderedDict(step=torch.tensor(3.0), scale=2.0, nothing=torch.empty(0)),
    }
    original, copied = saved(state), state_on_host(state)
    assert saved(copied) == original
    flat.zero_()
    assert saved(copied) == original != saved(state)


def test_what_torch_would_save_is_copied_and_written_later(tmp_path: Path) -> None:
    state = {"weight": torch.ones(2)}
    write = write_by_torch_save(lambda: torch.save(state, tmp_path / "model.pt"), from_copy=True)
    assert list(tmp_path.iterdir()) == []
    state["weight"].zero_()
    write()
    assert torch.load(tmp_path / "model.pt")["weight"].tolist() == [1.0, 1.0]


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_shard_of_a_rank_is_copied(mesh: DeviceMesh) -> None:
    weight = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    copied = state_on_host({"weight": weight})["weight"]
    weight.to_local().zero_()
    assert copied.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert (copied.placements, copied.device_mesh, copied.shape) == (weight.placements, mesh, weight.shape)
