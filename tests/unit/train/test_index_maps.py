"""Megatron v1.1.5's index maps go when they are of other data or another split, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.train.megatron_lm.files import remove_stale


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    for name in ("x.idx", "x_train_indexmap_8ns_4sl_1s_doc_idx.npy", "x_test_indexmap_8ns_4sl_1s_doc_idx.npy"):
        (tmp_path / name).write_text(name)
    for other in ("y_train_indexmap_8ns_4sl_1s_doc_idx.npy", "x_train_indexmap_notes.txt", "x.bin"):
        (tmp_path / other).write_text("")
    return tmp_path / "x"


def maps(prefix: Path) -> list[str]:
    return sorted(path.name for path in prefix.parent.glob("*.npy"))


def make(prefix: Path) -> None:
    prefix.with_name("x_train_indexmap_8ns_4sl_1s_doc_idx.npy").touch()


def test_maps_of_unknown_origin_go_and_those_of_this_data_stay(prefix: Path) -> None:
    assert remove_stale(prefix, "9,1,0") == 2
    assert maps(prefix) == ["y_train_indexmap_8ns_4sl_1s_doc_idx.npy"]
    make(prefix)
    assert remove_stale(prefix, "9,1,0") == 0
    assert len(maps(prefix)) == 2


@pytest.mark.parametrize("change", ["data", "split"])
def test_other_data_or_another_split(prefix: Path, change: str) -> None:
    remove_stale(prefix, "9,1,0")
    make(prefix)
    if change == "data":
        prefix.with_name("x.idx").write_text("rebuilt")
    assert remove_stale(prefix, "9,1,0" if change == "data" else "8,2,0") == 1
    assert maps(prefix) == ["y_train_indexmap_8ns_4sl_1s_doc_idx.npy"]
    assert remove_stale(prefix, "9,1,0" if change == "data" else "8,2,0") == 0


def test_a_folder_that_cannot_be_written_is_left_alone(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    assert remove_stale(prefix, "9,1,0") == 0
    assert len(maps(prefix)) == 3
    assert not prefix.with_name("x_indexmap.sha256").exists()
