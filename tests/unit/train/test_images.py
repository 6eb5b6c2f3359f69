"""Images by number: each once an epoch, the same ones on any number of ranks, and arrays that are not what is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.experiment.test_resnet import experiment
from tridock.contracts.images import ImageArrays, read_arrays
from tridock.errors import RequestError
from tridock.experiment.inputs import image_problems
from tridock.train.data.images import ImageSamples, load_images
from tridock.train.models.resnet import ResNet

SMALL = {"model.img_h": 2, "model.img_w": 3, "model.num_classes": 5, "data.split": "80,20,0"}


def saved(folder: Path, images: Any = None, labels: Any = None) -> Path:
    """30 images, each full of its number."""
    (folder / "data").mkdir()
    numbers = np.arange(30)
    full = np.broadcast_to(numbers[:, None, None, None], (30, 3, 2, 3)).astype(np.uint8)
    np.save(folder / "data/x_images.npy", full if images is None else images)
    np.save(folder / "data/x_labels.npy", numbers % 5 if labels is None else labels)
    return folder


def loaded(folder: Path, **fields: Any) -> dict[str, ImageSamples]:
    return load_images(experiment(**{**SMALL, **fields}), folder)


def test_every_image_comes_once_an_epoch_with_its_label(tmp_path: Path) -> None:
    splits = loaded(saved(tmp_path))
    assert {name: split.per_epoch for name, split in splits.items()} == {"train": 24, "valid": 6, "test": 0}
    epochs = [[int(splits["train"][place][0][0, 0, 0]) for place in range(first, first + 24)] for first in (0, 24)]
    validation = {int(splits["valid"][place][0][0, 0, 0]) for place in range(6)}
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(set(range(30)) - validation)
    assert epochs[0] != epochs[1]
    assert all(int(label) == int(image[0, 0, 0]) % 5 for image, label in map(splits["train"].__getitem__, range(24)))
    assert splits["train"].description == "24 training images of 2 x 3"


def test_ranks_share_a_batch_out(tmp_path: Path) -> None:
    train = loaded(saved(tmp_path))["train"]
    whole = [image for images, _ in train.batches(8, 8, 2, 0, 1) for image in images]
    by_rank = [list(train.batches(8, 8, 2, rank, 2)) for rank in range(2)]
    all_ranks = [image for turn in zip(*by_rank, strict=True) for images, _ in turn for image in images]
    assert np.array_equal(whole, all_ranks)
    images, labels = by_rank[0][0]
    assert (images.dtype, images.shape, labels.dtype, labels.shape) == (np.uint8, (2, 3, 2, 3), np.int64, (2,))


def test_every_second_training_image_is_turned(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.arange(3, dtype=np.uint8), (30, 3, 2, 3))
    splits = loaded(saved(tmp_path, images=ramp))
    turned = [bool(splits["train"][place][0][0, 0, 0]) for place in range(240)]
    assert 90 < sum(turned) < 150
    assert not any(splits["valid"][place][0][0, 0, 0] for place in range(60))


@pytest.mark.parametrize(
    ("images", "labels", "said"),
    [
        (
            np.zeros((30, 3, 2, 2), np.uint8),
            None,
            "{}_images.npy: must be uint8 of [N, 3, 2, 3]; got uint8 of [30, 3, 2, 2]; set model.img_h and "
            "model.img_w, or correct it",
        ),
        (
            None,
            np.zeros(29, np.int64),
            "{}_labels.npy: must be int64 of [30]; got int64 of [29]; create it again, with one label per image",
        ),
        (
            None,
            np.full(30, 5),
            "{}_labels.npy: has labels outside 0 to 4; got 5 to 5; raise model.num_classes",
        ),
    ],
)
def test_arrays_of_another_kind(tmp_path: Path, images: Any, labels: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        loaded(saved(tmp_path, images, labels))
    assert str(caught.value) == said.format(tmp_path / "data/x")
    arrays = read_arrays(tmp_path / "data/x")  # as a node reads them before a launch
    assert [*map(str, image_problems(experiment(**SMALL), f"{tmp_path}/data/x", arrays))] == [str(caught.value)]


def test_a_node_reads_what_numpy_wrote(tmp_path: Path) -> None:
    saved(tmp_path)
    assert read_arrays(tmp_path / "data/x") == ImageArrays(("|u1", (30, 3, 2, 3)), ("<i8", (30,)), (0, 4))
    np.lib.format.write_array((tmp_path / "data/x_labels.npy").open("wb"), np.array([7, -2]), version=(3, 0))
    assert read_arrays(tmp_path / "data/x").label_range == (-2, 7)
    np.save(tmp_path / "data/x_labels.npy", np.zeros(0, np.int64))
    assert read_arrays(tmp_path / "data/x").label_range is None
    for content in (b"", b"PK", b"\x93NUMPY\x01\x00\x05\x00{'a':", b"\x93NUMPY\x01\x00\x02\x00{}"):
        (tmp_path / "data/x_images.npy").write_bytes(content)
        with pytest.raises(RequestError, match=r"x_images\.npy: cannot be read as an array of numpy"):
            read_arrays(tmp_path / "data/x")


def test_arrays_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        loaded(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/data/x_images.npy: cannot be read as an array of numpy; got No such file or directory; save it "
        "with numpy.save, or set data.data_path to what stands before the ending"
    )


def test_a_split_without_an_image(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        loaded(saved(tmp_path), **{"train.eval_interval": 1, "data.split": "1,0,0"})
    assert str(caught.value) == (
        "data.split: leaves the valid split no image; got 30 images in all; give it a larger share"
    )


def test_the_model_has_the_parameters_of_the_literature() -> None:
    with torch.device("meta"):
        model = ResNet(experiment().model)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
