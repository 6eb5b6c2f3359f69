"""What a rank of engine megatron-deepspeed refuses before Megatron is imported."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tridock.contracts.prerequisites import megatron_source
from tridock.errors import RequestError
from tridock.train.megatron_lm.files import check_files, loads


def argv(folder: Path, *more: str) -> list[str]:
    files = {"--data-path": "x", "--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    return [word for option, name in files.items() for word in (option, str(folder / name))] + list(more)


def refused(given: list[str]) -> list[str]:
    with pytest.raises(RequestError) as caught:
        check_files(given)
    return str(caught.value).splitlines()


def test_all_that_is_missing_at_once(tmp_path: Path) -> None:
    todo = "copy the data here: tridock data sync, or make it: tridock data preprocess"
    assert refused(argv(tmp_path)) == [
        f"data.data_path: no such file; got {tmp_path}/x.bin; {todo}",
        f"data.data_path: no such file; got {tmp_path}/x.idx; {todo}",
        f"data.vocab_file: no such file; got {tmp_path}/vocab.json; {todo}",
        f"data.merge_file: no such file; got {tmp_path}/merges.txt; {todo}",
    ]


def test_whether_a_node_has_the_checkpoint(tmp_path: Path) -> None:
    saved, other = f"{tmp_path}/saved", f"{tmp_path}/other"
    assert loads(argv(tmp_path))
    assert loads(argv(tmp_path, "--save", saved, "--load", saved))  # it may hold none yet
    assert not loads(argv(tmp_path, "--save", saved, "--load", other))
    (tmp_path / "other/iter_0000002").mkdir(parents=True)
    (tmp_path / "other/iter_0000002/files.json").touch()
    assert loads(argv(tmp_path, "--save", saved, "--load", other))


def test_an_image_without_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDOCK_MEGATRON", str(tmp_path))
    with pytest.raises(RequestError) as caught:
        megatron_source()
    assert str(caught.value) == (
        f"engine: Megatron-LM v1.1.5 is not installed; got {tmp_path}; build the image with its source "
        "(tridock image --megatron WHERE), or name its folder in TRIDOCK_MEGATRON"
    )
