"""What a rank of engine megatron-deepspeed refuses before Megatron is imported."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tridock.errors import RequestError
from tridock.train.megatron_lm.pretrain_gpt2 import check_files, source_folder


def argv(folder: Path, *more: str) -> list[str]:
    files = {"--data-path": "x", "--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    return [word for option, name in files.items() for word in (option, str(folder / name))] + list(more)


def refused(given: list[str]) -> list[str]:
    with pytest.raises(RequestError) as caught:
        check_files(given)
    return str(caught.value).splitlines()


def test_all_that_is_missing_at_once(tmp_path: Path) -> None:
    todo = "copy the data here: tridock data sync, or make it: tridock data preprocess"
    assert refused(argv(tmp_path, "--load", f"{tmp_path}/none")) == [
        f"data.data_path: no such file; got {tmp_path}/x.bin; {todo}",
        f"data.data_path: no such file; got {tmp_path}/x.idx; {todo}",
        f"data.vocab_file: no such file; got {tmp_path}/vocab.json; {todo}",
        f"data.merge_file: no such file; got {tmp_path}/merges.txt; {todo}",
        f"train.load: holds no checkpoint of Megatron-LM v1.1.5; got {tmp_path}/none; "
        "give the checkpoints folder of a run of this engine",
    ]


def test_the_folder_to_save_in_may_hold_no_checkpoint_yet(tmp_path: Path) -> None:
    for name in ("x.bin", "x.idx", "vocab.json", "merges.txt"):
        (tmp_path / name).touch()
    saved, other = f"{tmp_path}/saved", f"{tmp_path}/other"
    check_files(argv(tmp_path, "--save", saved, "--load", saved))
    assert len(refused(argv(tmp_path, "--save", saved, "--load", other))) == 1


def test_an_image_without_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDOCK_MEGATRON", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        source_folder()
    assert str(caught.value) == (
        f"engine: Megatron-LM v1.1.5 is not installed; got {tmp_path}; build the image with its source "
        "(tridock image --megatron WHERE), or name its folder in TRIDOCK_MEGATRON"
    )
