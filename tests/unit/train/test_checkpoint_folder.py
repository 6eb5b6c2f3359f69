"""Finding a checkpoint and judging whether it fits, before anything is loaded."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.unit.train.experiments import experiment
from tridock.errors import RequestError
from tridock.train.checkpoint import (
    LATEST_OF_MEGATRON,
    Checkpoints,
    Progress,
    check_fit,
    check_shared,
    find_checkpoint,
    pointed,
    read_progress,
)
from tridock.train.process_group import Consequence, Ranks, join, leave

RANKS = Ranks(0, 0, 2, torch.device("cpu"))
ZERO = {"parallel.strategy": "zero", "parallel.zero_stage": 2}


def progress(**fields: object) -> Progress:
    return Progress.of(experiment(**fields), RANKS, padded_vocab_size=128)


def make_checkpoint(folder: Path, saved: Progress) -> Path:
    folder.mkdir(parents=True)
    (folder / "tridock.json").write_text(json.dumps(asdict(saved)))
    return folder


def test_the_latest_or_a_named_one(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "iter_0000005", replace(progress(), iteration=5, consumed_samples=40))
    make_checkpoint(tmp_path / "iter_0000010", replace(progress(), iteration=10, consumed_samples=80))
    (tmp_path / "latest").write_text("iter_0000010")
    assert find_checkpoint(tmp_path).name == "iter_0000010"
    assert find_checkpoint(first) == first
    read = read_progress(first)
    assert (read.iteration, read.consumed_samples, read.data_parallel_size) == (5, 40, 2)


def test_no_checkpoint(tmp_path: Path) -> None:
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    for source, got in ((tmp_path / "none", "no such folder"), (tmp_path, "no file named latest in it")):
        with pytest.raises(RequestError) as caught:
            find_checkpoint(source)
        assert str(caught.value) == f"train.load: no checkpoint lies at {source}; got {got}; {todo}"


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file or directory"),
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ('{"a": 1}', "Progress.__init__() got an unexpected keyword argument 'a'"),
    ],
)
def test_half_a_checkpoint(tmp_path: Path, content: str | None, got: str) -> None:
    if content is not None:
        (tmp_path / "tridock.json").write_text(content)
    with pytest.raises(RequestError) as caught:
        read_progress(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}/tridock.json: cannot be read; got {got}; use another checkpoint: this one is not whole"
    )


def test_every_difference_is_named(tmp_path: Path) -> None:
    saved = replace(progress(**ZERO), data_parallel_size=4)
    wanted = progress(**{"model.hidden_size": 32, "model.seq_length": 64, **ZERO, "parallel.zero_stage": 1})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="fp32"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start anew"
    assert str(caught.value).splitlines() == [
        f"model.hidden_size: {where} 16; got 32; {todo}",
        f"model.max_position_embeddings: {where} 8; got 64; {todo}",
        f"parallel.zero_stage: {where} 2; got 1; {todo}",
        f"precision: {where} bf16; got fp32; {todo}",
        f"data parallel size: {where} 4; got 2; {todo}",
    ]


def test_ddp_may_change_what_does_not_matter_to_it(tmp_path: Path) -> None:
    ddp = {"parallel.strategy": "ddp"}
    saved = replace(progress(**ddp, precision="fp32"), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**ddp))
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(**ZERO))
    assert str(caught.value).startswith(f"parallel.strategy: the checkpoint {tmp_path} was saved with ddp; got zero; ")


def test_megatrons_pointer_names_an_iteration(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "iter_0000010", replace(progress(), iteration=10))
    (tmp_path / LATEST_OF_MEGATRON).write_text(pointed(LATEST_OF_MEGATRON, 10))
    assert (tmp_path / LATEST_OF_MEGATRON).read_text() == "10"
    assert find_checkpoint(tmp_path, LATEST_OF_MEGATRON).name == "iter_0000010"
    (tmp_path / LATEST_OF_MEGATRON).write_text("release")
    with pytest.raises(RequestError) as caught:
        find_checkpoint(tmp_path, LATEST_OF_MEGATRON)
    assert str(caught.value) == (
        f"train.load: no checkpoint lies at {tmp_path}; got 'release' in {LATEST_OF_MEGATRON}; "
        "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    )


def test_megatron_core_may_change_its_layout_and_not_its_optimizer(tmp_path: Path) -> None:
    core = {"engine": "megatron-core", "precision": "fp16"}
    saved = replace(progress(**core), data_parallel_size=8)
    check_fit(tmp_path, saved, progress(**core, **{"parallel.tensor_model_parallel_size": 2}))
    wanted = progress(**core, **{"parallel.use_distributed_optimizer": True})
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, replace(wanted, precision="bf16"))
    where, todo = f"the checkpoint {tmp_path} was saved with", "use the same, or start anew"
    assert str(caught.value).splitlines() == [
        f"precision: {where} fp16; got bf16; {todo}",
        f"parallel.use_distributed_optimizer: {where} False; got True; {todo}",
    ]


def test_a_checkpoint_of_another_engine(tmp_path: Path) -> None:
    saved = progress(**{"parallel.strategy": "ddp"}, precision="fp32")
    with pytest.raises(RequestError) as caught:
        check_fit(tmp_path, saved, progress(engine="megatron-core", precision="fp32"))
    assert str(caught.value) == (
        f"engine: the checkpoint {tmp_path} was saved with torch; got megatron-core; use the same, or start anew"
    )


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    check_shared(tmp_path, 0)
    with pytest.raises(RequestError) as caught:
        check_shared(tmp_path, 4)
    assert str(caught.value) == (
        "train.save: checkpoints of this engine lie in one folder that all nodes share; "
        f"got a folder of rank 4's node alone: {tmp_path}; mount a shared file system there, or set it to false"
    )


class Gone:
    """A strategy that writes while another rank, which failed, removes the folder."""

    def save(self, folder: Path, *, writes_shared: bool) -> None:
        assert writes_shared
        shutil.rmtree(folder)
        torch.save({}, folder / "part.pt")


def test_a_checkpoint_that_another_rank_gave_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ranks = join()
    try:
        with pytest.raises(Consequence) as caught:
            Checkpoints(tmp_path, ranks).save(Gone(), progress())  # type: ignore[arg-type]
    finally:
        leave()
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints/iter_0000000: another rank gave the checkpoint up; "
        "look for its message in logs/rank-<N>.log"
    )
