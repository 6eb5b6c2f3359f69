"""What a checkpoint can hold besides tensors runs nothing, whoever reads it; also with older versions of torch."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from tridock.errors import RequestError
from tridock.train.checkpoints.pickles import ForeignObjectError, only_weights, safe_distributed_load, safe_torch_load
from tridock.train.data.images import _mapped
from tridock.train.huggingface.saved import weights_in


def object_array(content: object) -> bytes:
    written = io.BytesIO()
    np.save(written, np.array([content], dtype=object), allow_pickle=True)
    return written.getvalue()


LOADS = [only_weights, safe_torch_load, safe_distributed_load]


class Evil:
    """Does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "done"


def tar_of_2016(file: Path, content: object) -> Path:
    """As torch.save wrote it then: no storages, no tensors, and a pickle of anything."""
    folder = file.with_suffix("")
    folder.mkdir()
    for name, it in (("storages", 0), ("tensors", 0), ("pickle", content)):
        (folder / name).write_bytes(pickle.dumps(it, protocol=2))
    with tarfile.open(file, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name in ("storages", "tensors", "pickle"):
            tar.add(folder / name, name)
    return file


@pytest.mark.parametrize("safely", LOADS, ids=lambda load: load.__name__)
@pytest.mark.parametrize("asked", [{}, {"weights_only": False}, {"weights_only": True}], ids=str)
def test_whoever_asks_for_more_gets_only_weights(
    tmp_path: Path, mark: Path, safely: Callable[[], AbstractContextManager[None]], asked: dict[str, bool]
) -> None:
    torch.save(torch.ones(2), tmp_path / "good.pt")
    torch.save({"model": Evil(mark)}, tmp_path / "bad.pt")
    with safely():
        assert torch.load(tmp_path / "good.pt", **asked).tolist() == [1, 1]
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(tmp_path / "bad.pt", **asked)
    assert not mark.exists()


@pytest.mark.parametrize("safely", LOADS, ids=lambda load: load.__name__)
def test_a_tar_archive_is_not_read(
    tmp_path: Path, mark: Path, safely: Callable[[], AbstractContextManager[None]]
) -> None:
    """Until 2.6 torch unpickled it whole, with ``weights_only`` too."""
    file = tar_of_2016(tmp_path / "old.pt", Evil(mark))
    with safely(), pytest.raises(ForeignObjectError, match=f"^{file} is a tar archive, which can hold any object$"):
        torch.load(str(file))
    assert not mark.exists()


def test_nor_is_one_among_the_files_of_a_checkpoint(tmp_path: Path, mark: Path) -> None:
    tar_of_2016(tmp_path / "ddp.pt", {"model": Evil(mark)})
    model: Any = None
    with pytest.raises(ForeignObjectError, match="is a tar archive"):
        weights_in(tmp_path, model)
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_distributed_checkpoint_holds_tensors_alone(tmp_path: Path, mark: Path) -> None:
    """torch loads whatever ``.metadata`` calls no tensor with ``weights_only=False``."""
    dcp.save({"a": torch.ones(2), "b": Evil(mark)}, checkpoint_id=str(tmp_path), no_dist=True)
    with safe_distributed_load(), pytest.raises(dcp.CheckpointException, match="BytesStorageMetadata does not belong"):
        dcp.load({"b": torch.zeros(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    assert not mark.exists()


def test_a_newer_torchs_metadata_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 pickles other properties of a tensor than 2.13 unpacks."""
    written = TensorProperties.__getstate__
    with monkeypatch.context() as newer:
        newer.setattr(TensorProperties, "__getstate__", lambda self: (*written(self), None))
        dcp.save({"a": torch.zeros(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    with (
        pytest.raises(RequestError, match=r"is not what torch \S+ reads; got too many values"),
        safe_distributed_load(),
    ):
        dcp.load({"a": torch.zeros(2)}, checkpoint_id=str(tmp_path), no_dist=True)
    with pytest.raises(RequestError, match=r"is not what torch"), safe_distributed_load():
        dcp.FileSystemReader(tmp_path).read_metadata()


@pytest.mark.parametrize("content", [pickle.dumps, object_array], ids=["pickle", "array of objects"])
def test_images_are_arrays_of_numbers(tmp_path: Path, mark: Path, content: Callable[[object], bytes]) -> None:
    (tmp_path / "x.npy").write_bytes(content(Evil(mark)))
    with pytest.raises(RequestError, match="cannot be read as an array of numpy"):
        _mapped(tmp_path / "x.npy")
    assert not mark.exists()
