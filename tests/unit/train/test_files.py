"""What makes a checkpoint whole, which one a load takes and which one a save removes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tridock.contracts.checkpoint_files import Entry, Manifest, damage, is_complete, read_manifest
from tridock.contracts.checkpoints import MANIFEST
from tridock.errors import Problem
from tridock.train.checkpoints.files import DEEPSPEED, MEGATRON, TORCH, Names, assign_to_ranks, sizes_in, to_remove

ITERATIONS = st.integers(0, 40)
TODO = "restore it, or continue from another checkpoint"


@given(st.sampled_from([TORCH, MEGATRON, DEEPSPEED]), st.integers(0, 10**9))
def test_names_are_read_as_they_are_written(names: Names, iteration: int) -> None:
    assert names.iteration(names.folder(iteration)) == iteration
    assert names.pointed(names.pointers[-1][1].format(iteration) + "\n") == iteration


@pytest.mark.parametrize("name", ["iter_10", "iter_", ".iter_0000010.part", "iter_00000x0", "global_step", "zero", ""])
def test_other_names_are_no_checkpoints(name: str) -> None:
    assert [names.iteration(name) for names in (TORCH, MEGATRON, DEEPSPEED)] == [None] * 3


@pytest.mark.parametrize("text", ["release", "", "-1", "12x", "iter_0000010"])
def test_a_pointer_that_names_none(text: str) -> None:
    assert MEGATRON.pointed(text) is None


@given(st.dictionaries(ITERATIONS, st.booleans()), st.none() | st.integers(1, 5), ITERATIONS)
def test_the_newest_whole_ones_stay(whole: dict[int, bool], keep: int | None, newest: int) -> None:
    whole[newest] = True  # it was saved just now
    removed = to_remove(whole, keep, newest)
    assert newest not in removed
    assert all(iteration < newest for iteration in removed)
    kept = [iteration for iteration in whole if iteration not in removed and iteration <= newest and whole[iteration]]
    good = [iteration for iteration in whole if whole[iteration] and iteration <= newest]
    if keep is None or len(good) < keep:
        assert removed == []
    else:
        assert sorted(kept) == sorted(good)[-keep:]
        assert set(removed) == {iteration for iteration in whole if iteration < min(kept)}


@given(st.dictionaries(ITERATIONS, st.just(False)), st.integers(1, 5), ITERATIONS)
def test_without_a_whole_one_nothing_is_removed(whole: dict[int, bool], keep: int, newest: int) -> None:
    assert to_remove(whole, keep, newest) == []


@given(st.dictionaries(ITERATIONS, st.sampled_from(["whole", "cut", "ill"])), st.integers(1, 5), ITERATIONS)
def test_one_in_ill_health_replaces_none(kinds: dict[int, str], keep: int, newest: int) -> None:
    kinds[newest] = "ill"  # it was saved just now
    complete = {iteration: kind != "cut" for iteration, kind in kinds.items()}
    ill = [iteration for iteration, kind in kinds.items() if kind == "ill"]
    removed = to_remove(complete, keep, newest, ill)
    healthy = sorted(iteration for iteration, kind in kinds.items() if kind == "whole" and iteration <= newest)
    assert not {*healthy[-keep:]} & {*removed}
    assert {*healthy[:-keep]} <= {*removed}
    assert newest not in removed
    assert len([iteration for iteration in ill if iteration <= newest and iteration not in removed]) <= keep


NAMES = st.one_of(
    st.builds("bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt".format, st.integers(0, 9)),
    st.builds("__{}_0.distcp".format, st.integers(0, 9)),
    st.builds("layer_{:02d}-model_00-model_states.pt".format, st.integers(0, 9)),
)


@given(
    st.dictionaries(NAMES, st.integers(0, 1000)),
    st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True),
)
def test_every_file_is_dealt_to_one_rank(sizes: dict[str, int], ranks: list[int]) -> None:
    shares = assign_to_ranks(sizes, ranks)
    assert list(shares) == ranks
    assert sorted(name for share in shares.values() for name in share) == sorted(sizes)
    for rank, share in shares.items():
        for name in share:
            owner = (
                next((int(part) for part in name.split("_") if part.isdigit()), None) if "layer" not in name else None
            )
            assert owner is None or owner == rank or owner not in ranks
    assert assign_to_ranks(sizes, ranks) == assign_to_ranks(dict(reversed(sizes.items())), ranks)


def test_what_no_rank_owns_is_divided_by_size() -> None:
    shares = assign_to_ranks({"a": 5, "b": 4, "c": 3, "d": 2}, [3, 7])
    assert shares == {3: ["a", "d"], 7: ["b", "c"]}


def make_whole(folder: Path) -> dict[str, Entry]:
    (folder / "mp_rank_00").mkdir(parents=True)
    (folder / "tridock.json").write_text("{}")
    (folder / "mp_rank_00/model.pt").write_bytes(bytes(range(200)))
    entries = {name: Entry.of(folder / name, sync=True) for name in sizes_in(folder)}
    (folder / MANIFEST).write_bytes(Manifest(entries).to_bytes())
    return entries


def found(folder: Path, *, read: bool = True) -> list[str]:
    manifest = read_manifest(folder)
    if isinstance(manifest, Problem):
        return [str(manifest)]
    return [str(problem) for problem in damage(folder, manifest.here, manifest.here, read=read)]


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    entries = make_whole(tmp_path)
    assert read_manifest(tmp_path) == Manifest(entries)
    assert sorted(entries) == ["mp_rank_00/model.pt", "tridock.json"]
    assert found(tmp_path) == []
    assert is_complete(tmp_path)
    (tmp_path / "notes.txt").write_text("of a user")
    assert is_complete(tmp_path)


def test_what_other_nodes_have_is_listed_beside(tmp_path: Path) -> None:
    entries = make_whole(tmp_path)
    listed = Manifest(entries, {"__1_0.distcp": Entry(9, "ab")})
    (tmp_path / MANIFEST).write_bytes(listed.to_bytes())
    assert read_manifest(tmp_path) == listed
    assert is_complete(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd", "../model.pt", "a/../../b", ""])
def test_names_outside_the_checkpoint_are_refused(tmp_path: Path, name: str) -> None:
    for listed in (Manifest({name: Entry(0, "")}), Manifest({}, {name: Entry(0, "")})):
        (tmp_path / MANIFEST).write_bytes(listed.to_bytes())
        assert found(tmp_path) == [f"{tmp_path}/{MANIFEST}: does not list the checkpoint's files; {TODO}"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "said", "by_size"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is cut short; got 199 bytes instead of 200", True),
        (lambda path: path.write_bytes(bytes(201)), "is longer than it was; got 201 bytes instead of 200", True),
        (lambda path: path.unlink(), "is missing", True),
        (flip, "has changed since it was saved; got sha256 {}… instead of 1901da1c9f69…", False),
    ],
)
def test_every_damage_is_found(tmp_path: Path, spoil: Callable[[Path], None], said: str, by_size: bool) -> None:
    make_whole(tmp_path)
    path = tmp_path / "mp_rank_00/model.pt"
    spoil(path)
    digest = Entry.of(path).sha256[:12] if path.exists() else ""
    message = f"{path}: {said.format(digest)}; {TODO}"
    assert found(tmp_path) == [message]
    assert found(tmp_path, read=False) == ([message] if by_size else [])
    assert is_complete(tmp_path) != by_size


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    make_whole(tmp_path)
    (tmp_path / "tridock.json").unlink()
    (tmp_path / "tridock.json").symlink_to("tridock.json")
    assert found(tmp_path) == [
        f"{tmp_path}/tridock.json: cannot be read; got Too many levels of symbolic links; {TODO}"
    ]


def test_a_file_that_the_manifest_does_not_know(tmp_path: Path) -> None:
    """What a rank needs is on no list of this node's: it was saved elsewhere."""
    entries = make_whole(tmp_path)
    (problem,) = damage(tmp_path, entries, ["ddp.pt"], read=False)
    assert str(problem) == f"{tmp_path}/ddp.pt: is missing; {TODO}"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"files": 3}', b'{"files": {"a": 1}}', b"\xff"])
def test_a_manifest_that_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    assert found(tmp_path) == [f"{tmp_path}/files.json: does not list the checkpoint's files; {TODO}"]


def test_a_manifest_that_is_not_there(tmp_path: Path) -> None:
    assert found(tmp_path) == [f"{tmp_path}/files.json: is missing: the save did not come to its end; {TODO}"]
    assert found(tmp_path / "none") == [f"{tmp_path}/none: is missing; {TODO}"]
    (tmp_path / MANIFEST).mkdir()
    assert found(tmp_path) == [f"{tmp_path}/files.json: cannot be read; got Is a directory; {TODO}"]
    assert not is_complete(tmp_path)
