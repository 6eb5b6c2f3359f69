"""ResNet-50 on CPU ranks: the shipped experiment in a tiny form, with DDP and FSDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import thinned
from tests.distributed.ranks import ROOT, Trained, events, losses, metrics, run
from tridock.experiment import dump_experiment, load_experiment
from tridock.report.summary import rows_of, summarize

pytestmark = pytest.mark.distributed

TOLERANCE = 2e-4
"""Absolute, over 4 steps in fp32: normalization over the few pixels of a tiny image makes the most of roundings."""
TINY = {
    "model.img_h": 48,
    "model.img_w": 48,
    "model.num_classes": 4,
    "batch.micro_batch_size": 4,
    "batch.global_batch_size": 8,
    "data.data_path": "data/tiny",
    "data.split": '"80,20,0"',
    "optimizer.lr_warmup_iters": 2,
    "precision": "fp32",
    "train.train_iters": 4,
    "train.log_interval": 1,
    "train.eval_interval": 2,
    "train.eval_iters": 1,
    "train.save_interval": 0,
    "train.save": "false",
    "train.tensorboard": "false",
}


def make_images(workspace: Path) -> None:
    """60 images of four kinds, each brighter in a corner of its own, sorted by kind."""
    random = np.random.default_rng(1)
    labels = np.repeat(np.arange(4, dtype=np.int64), 15)
    images = random.integers(0, 120, (60, 3, 48, 48), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        rows, columns = divmod(int(label), 2)
        image[:, 24 * rows : 24 * rows + 24, 24 * columns : 24 * columns + 24] += 120
    (workspace / "data").mkdir()
    np.save(workspace / "data/tiny_images.npy", images)
    np.save(workspace / "data/tiny_labels.npy", labels)


def make_run(workspace: Path, name: str, **fields: Any) -> Path:
    arguments = [f"{field}={value}" for field, value in {**TINY, **fields}.items()]
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(dump_experiment(load_experiment(ROOT / "configs/resnet50.yaml", arguments)))
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    make_images(folder)
    return folder


@pytest.fixture(scope="module")
def runs(workspace: Path) -> Trained:
    """On one rank, which works through the micro-batches of both, and on two."""
    fsdp, saved = {"parallel.strategy": "fsdp"}, {"train.save": "true", "train.save_interval": 2}
    two = {
        "ddp": make_run(workspace, "ddp", **saved),
        "fsdp": make_run(workspace, "fsdp", **fsdp, **saved),
        "ddp-resumed": make_run(workspace, "ddp-resumed", **{"train.load": "runs/ddp/checkpoints/iter_0000002"}),
        "fsdp-resumed": make_run(
            workspace, "fsdp-resumed", **fsdp, **{"train.load": "runs/fsdp/checkpoints/iter_0000002"}
        ),
    }
    # CPUs convolve bf16 slowly.
    few = {"precision": "bf16", "train.train_iters": 2, "train.eval_interval": 0}
    short = {"ddp-bf16": few, "fsdp-bf16": few | fsdp}
    return Trained(
        (1, {"alone": make_run(workspace, "alone")}),
        (2, two),
        *((2, {name: make_run(workspace, name, **fields)}) for name, fields in short.items()),
    )


def trained(folder: Path) -> dict[tuple[int, str], float]:
    return {place: loss for place, loss in losses(folder).items() if place[1] == "train"}


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_the_losses_of_a_single_process(runs: Trained, name: str) -> None:
    """Every micro-batch is normalized by itself, wherever it is. The running statistics see them in another order."""
    assert trained(runs[name]) == pytest.approx(trained(runs["alone"]), abs=TOLERANCE, rel=0)
    assert losses(runs["fsdp"]) == pytest.approx(losses(runs["ddp"]), abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", thinned(["ddp", "fsdp"], ["fsdp"]))
def test_short_formats_follow_fp32(runs: Trained, name: str) -> None:
    first = {place: loss for place, loss in trained(runs[name]).items() if place[0] <= 2}
    assert trained(runs[f"{name}-bf16"]) == pytest.approx(first, abs=0.1, rel=0)


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_a_run_continues_from_its_checkpoint(runs: Trained, name: str) -> None:
    """Bit for bit: with the running statistics, which evaluations need."""
    rest = {place: loss for place, loss in losses(runs[name]).items() if place[0] > 2}
    assert losses(runs[f"{name}-resumed"]) == rest


def test_throughput_counts_images(runs: Trained) -> None:
    record = metrics(runs["ddp"])[2, "train"]
    assert record["samples_per_second"] == pytest.approx(8 / record["step_time_s"])
    assert "tokens_per_second" not in record
    rows = dict(rows_of(summarize(runs["ddp"])))
    assert rows["model"] == "ResNet-50, images of 48 x 48, 4 classes, fp32"
    assert rows["trained"] == "4 of 4 iterations, 32 images"
    assert float(rows["images/s (median)"].replace(",", "")) > 0


def test_images_of_another_size(workspace: Path) -> None:
    folder = make_run(workspace, "size", **{"model.img_h": 32, "model.num_classes": 3})
    finished = run(folder, 1)
    assert finished.codes == [2]
    data = workspace / "data"
    assert finished.out[0].splitlines()[-2:] == [
        f"{data}/tiny_images.npy: must be uint8 of [N, 3, 32, 48]; got uint8 of [60, 3, 48, 48]; set model.img_h and "
        "model.img_w, or correct it",
        f"{data}/tiny_labels.npy: has labels outside 0 to 2; got 0 to 3; raise model.num_classes",
    ]
    assert "model_built" not in events(folder)
