"""One rank saves and chooses checkpoints."""

import errno
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tridock.contracts.checkpoint_files import is_complete
from tridock.contracts.checkpoints import newest
from tridock.contracts.events import Event, events_of
from tridock.contracts.run_folder import write_atomic
from tridock.train.checkpoints.checkpoint import Checkpoints
from tridock.train.checkpoints.choice import choose as chosen
from tridock.train.checkpoints.files import MEGATRON, TORCH, Names
from tridock.train.checkpoints.snapshot import Write
from tridock.train.rank.process_group import AgreedError, Ranks, join, leave

RANKS = Ranks(0, 0, 2, torch.device("cpu"))


TODO = "restore it, or continue from another checkpoint"
Reasons = dict[str, list[str]]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A world of this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield join()
    leave()


def save(checkpoints: Checkpoints, iteration: int, keep: int | None = None) -> Path:
    def prepare(folder: Path, leaders: Sequence[int], background: object) -> Write:
        assert (list(leaders), background) == ([0], None)
        return lambda: write_atomic(folder / "model.pt", bytes([iteration]) * 100)

    return checkpoints.start(prepare, iteration, {"tridock.json": b"{}"}, ["model.pt", "tridock.json"], keep)()


def choose(checkpoints: Checkpoints, source: Path) -> tuple[str, Reasons]:
    """Returns what is chosen, and what the run's events say of the others."""
    with tempfile.TemporaryDirectory() as run:
        needed = lambda *_: iter([["model.pt"]])  # noqa: E731
        found = chosen(source, checkpoints.names, checkpoints.ranks, needed, Path(run))
        events = events_of(Path(run), Event.CHECKPOINT_REJECTED)
    return found.name, {Path(it["folder"]).name: it["reasons"] for it in events}


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("names", "pointer", "word"), [
    (TORCH, "latest", "iter_0000009"), (MEGATRON, "latest_checkpointed_iteration.txt", "9"),
])  # fmt: skip
def test_the_latest_or_a_named_one(tmp_path: Path, ranks: Ranks, names: Names, pointer: str, word: str) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, names)
    first = save(checkpoints, 5)
    assert save(checkpoints, 9) == tmp_path / "iter_0000009"
    assert listing(tmp_path) == ["iter_0000005", "iter_0000009", pointer]
    assert listing(first) == ["files.json", "model.pt", "tridock.json"]
    assert (tmp_path / pointer).read_text() == word
    assert choose(checkpoints, tmp_path) == ("iter_0000009", {})
    assert choose(checkpoints, first) == ("iter_0000005", {})
    # A pointer that lags behind hides nothing.
    (tmp_path / pointer).write_text(word.replace("9", "5") + "\n")
    todo = f"to continue from the older one, set train.load to {first}"
    lags = f"{tmp_path / pointer}: names an older checkpoint than iter_0000009; got iter_0000005; {todo}"
    assert choose(checkpoints, tmp_path) == ("iter_0000009", {pointer: [lags]})


@pytest.mark.parametrize("spoiled", [b"\0garbage", b"\xff\xfe", b"", None])
def test_the_newest_is_found_whatever_the_pointer_holds(tmp_path: Path, ranks: Ranks, spoiled: bytes | None) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (5, 9):
        save(checkpoints, iteration)
    (tmp_path / "latest").unlink()
    if spoiled is not None:
        (tmp_path / "latest").write_bytes(spoiled)
    assert choose(checkpoints, tmp_path)[0] == "iter_0000009"
    assert newest(tmp_path) == (9, tmp_path / "iter_0000009")
    assert newest(tmp_path, since=time.time() + 60) is None


def test_checkpoints_of_another_history_are_set_aside(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    folders = [save(checkpoints, iteration) for iteration in (2, 4, 6)]
    assert checkpoints.set_aside_after(6, folders[2]) == []
    aside = ["iter_0000004.set-aside-1", "iter_0000006.set-aside-1"]
    assert checkpoints.set_aside_after(2, folders[0]) == aside
    assert (tmp_path / "latest").read_text() == "iter_0000002"
    assert is_complete(tmp_path / aside[1])
    save(checkpoints, 4)
    elsewhere = tmp_path / "other" / "iter_0000004"
    assert checkpoints.set_aside_after(4, elsewhere) == ["iter_0000004.set-aside-2"]
    assert listing(tmp_path) == ["iter_0000002", aside[0], "iter_0000004.set-aside-2", aside[1]]
    assert newest(tmp_path) == (2, tmp_path / "iter_0000002")


def test_what_is_not_whole_is_passed_over(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2, 3, 4):
        save(checkpoints, iteration)
    (tmp_path / "iter_0000004/model.pt").write_bytes(b"")
    (tmp_path / "iter_0000003/files.json").unlink()
    (tmp_path / "iter_0000002").rename(tmp_path / "gone")
    (tmp_path / "latest").write_text("")
    got = "got ''; the newest complete one is used"
    assert choose(checkpoints, tmp_path) == (
        "iter_0000001",
        {
            "latest": [f"{tmp_path}/latest: names no checkpoint; {got}"],
            "iter_0000004": [f"{tmp_path}/iter_0000004/model.pt: is cut short; got 0 bytes instead of 100; {TODO}"],
            "iter_0000003": [
                f"{tmp_path}/iter_0000003/files.json: is missing: the save did not come to its end; {TODO}"
            ],
        },
    )


def test_the_pointers_checkpoint_is_missed(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    save(checkpoints, 1)
    shutil.rmtree(save(checkpoints, 2))
    name, passed_over = choose(checkpoints, tmp_path)
    assert (name, passed_over) == ("iter_0000001", {"iter_0000002": [f"{tmp_path}/iter_0000002: is missing; {TODO}"]})


def test_none_is_whole(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2):
        (save(checkpoints, iteration) / "model.pt").unlink()
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    for source, names in ((tmp_path, ("iter_0000002", "iter_0000001")), (tmp_path / "iter_0000001", ("iter_0000001",))):
        with pytest.raises(AgreedError) as caught:
            choose(checkpoints, source)
        assert caught.value.error.exit_code == 2
        parent = source if source == tmp_path else source.parent
        assert str(caught.value).splitlines() == [
            f"train.load: no complete checkpoint is in {source}; {todo}",
            *(f"{parent}/{name}/model.pt: is missing; {TODO}" for name in names),
        ]


def test_no_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    todo = "give runs/<run-id>/checkpoints of a run that has saved, or one iter_… folder in it"
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for source, got in ((tmp_path / "none", "no such folder"), (tmp_path, "no checkpoint's folder in it")):
        with pytest.raises(AgreedError) as caught:
            choose(checkpoints, source)
        assert str(caught.value) == f"train.load: there is no checkpoint in {source}; got {got}; {todo}"


def test_the_newest_stay(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    for iteration in (1, 2, 3):
        save(checkpoints, iteration)
    (tmp_path / "iter_0000003/model.pt").unlink()  # does not count
    save(checkpoints, 4, keep=2)
    assert listing(tmp_path) == ["iter_0000002", "iter_0000003", "iter_0000004", "latest"]
    save(checkpoints, 5, keep=1)
    assert listing(tmp_path) == ["iter_0000005", "latest"]


def test_a_save_that_was_cut_short_leaves_the_one_before(tmp_path: Path, ranks: Ranks) -> None:
    """What a kill leaves behind: half a folder; or one that was put aside for another of its name."""
    whole = save(Checkpoints(tmp_path, ranks, TORCH), 1)
    (tmp_path / ".iter_0000002.part/iter_0000002").mkdir(parents=True)
    whole.rename(tmp_path / ".iter_0000001.old")
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    assert is_complete(whole)
    assert choose(checkpoints, tmp_path) == ("iter_0000001", {})
    save(checkpoints, 2)
    assert listing(tmp_path) == ["iter_0000001", "iter_0000002", "latest"]
    shutil.copytree(whole, tmp_path / ".iter_0000001.old")
    Checkpoints(tmp_path, ranks, TORCH)
    assert listing(tmp_path) == ["iter_0000001", "iter_0000002", "latest"]


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events: each comes before the change."""


class Kills:
    """What a kill before each change of a folder would leave: copies of it, in order."""

    def __init__(self, folder: Path, states: Path) -> None:
        self.folder, self.states = folder, states
        self.whole: set[int] = set()
        """What the next kill has to leave: one of these iterations is the newest complete one."""
        self.left: list[tuple[Path, frozenset[int]]] = []
        self._listens = True
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if self._listens and event in CHANGES and not (event == "open" and not int(str(args[2])) & os.O_CREAT):
            self._listens = False
            self.left.append((self.states / str(len(self.left)), frozenset(self.whole)))
            shutil.copytree(self.folder, self.left[-1][0], symlinks=True)
            self._listens = True

    def end(self) -> None:
        self._listens = False


def test_a_kill_at_any_operation_leaves_a_checkpoint_and_stops_no_save(tmp_path: Path, ranks: Ranks) -> None:
    """Of one rank: saves, two of one name, the removal of old checkpoints, and checkpoints that are set aside."""
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, ranks, TORCH)
    save(checkpoints, 1)
    kills = Kills(folder, tmp_path / "states")
    for iteration, before in ((2, 1), (3, 2), (3, 3), (4, 3)):
        kills.whole = {before, iteration}
        save(checkpoints, iteration, keep=2)
    checkpoints.set_aside_after(3, folder / "iter_0000003")
    kills.whole = {3, 4}
    save(Checkpoints(folder, ranks, TORCH), 4, keep=2)
    kills.end()
    assert len(kills.left) > 60
    for state, whole in kills.left:
        after = Checkpoints(state, ranks, TORCH)
        name, _ = choose(after, state)
        assert int(name[-1]) in whole, state
        assert is_complete(state / name)
        save(after, 9)
        assert not [one for one in listing(state) if one.startswith(".")], state
        assert choose(after, state) == ("iter_0000009", {})


def test_a_killed_write_of_the_pointer_ends_no_later_save(tmp_path: Path, ranks: Ranks) -> None:
    """As do kills while ranks find out whether they share the folder, and while a checkpoint is removed."""
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    (tmp_path / ".latest.4242.0a1b2c3d.part").write_text("iter_0000002")
    (tmp_path / ".ranks.7.0a1b2c3d.part").touch()
    save(checkpoints, 1).rename(tmp_path / ".iter_0000001.part")
    save(checkpoints, 2)
    assert listing(tmp_path) == ["iter_0000002", "latest"]


OTHERS = (".latest.part", ".latest.1.0a1b2c3.part", ".mine.1.0a1b2c3d.part", ".mine.part", ".mine.old", ".old", ".part")


@pytest.mark.parametrize("kind", ["file", "folder", "link", "dangling link"])
def test_what_is_not_of_a_save_stays(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    """Nor is a link followed, or anything of another type than Tridock's taken for its own."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder.mkdir()
    names = [*OTHERS, *((".latest.1.0a1b2c3d.part",) if kind != "file" else ())]
    names += [".iter_0000001.part", ".iter_0000001.old"] if kind != "folder" else []
    for name in names:
        put(folder / name, kind, elsewhere)
    before = snapshot(folder)
    checkpoints = Checkpoints(folder, ranks, TORCH)
    assert snapshot(folder) == before
    for iteration in (2, 3, 4):
        save(checkpoints, iteration, keep=2)
    assert sorted(set(listing(folder)) - set(names)) == ["iter_0000003", "iter_0000004", "latest"]
    assert {name: what for name, what in snapshot(folder).items() if name in names} == before
    assert listing(elsewhere) == ["kept"]


def put(path: Path, kind: str, elsewhere: Path) -> None:
    """Puts there something that Tridock has not made."""
    if kind == "file":
        path.write_text("somebody's own")
    elif kind == "folder":
        path.mkdir()
        (path / "somebody's own").touch()
    else:
        path.symlink_to(elsewhere if kind == "link" else elsewhere / "none")


def snapshot(folder: Path) -> dict[str, object]:
    """What each name in a folder is."""
    return {
        it.name: it.readlink() if it.is_symlink() else sorted(it.rglob("*")) if it.is_dir() else it.read_bytes()
        for it in folder.iterdir()
    }


@pytest.mark.parametrize(("name", "kind", "got"), [
    (".iter_0000002.part", "file", "File exists"),
    (".iter_0000002.part", "link", "File exists"),
    (".iter_0000002.part", "dangling link", "File exists"),
    ("iter_0000002", "file", "Not a directory"),
    ("iter_0000002", "link", "Not a directory"),
    ("iter_0000002", "dangling link", "Not a directory"),
    ("latest", "folder", "Is a directory"),
])  # fmt: skip
def test_what_is_in_the_way_of_a_save_is_named(tmp_path: Path, ranks: Ranks, name: str, kind: str, got: str) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    elsewhere.mkdir()
    checkpoints = Checkpoints(folder, ranks, TORCH)
    save(checkpoints, 1)
    if name == "latest":
        (folder / name).unlink()
    put(folder / name, kind, elsewhere)
    with pytest.raises(AgreedError) as caught:
        save(checkpoints, 2)
    todo = "move it away or remove it; resume the last complete one with train.load"
    assert str(caught.value) == f"{folder / name}: is in the way of iter_0000002; got {got}; {todo}"
    assert listing(elsewhere) == []
    (folder / name).rename(folder / "moved")
    save(checkpoints, 3)
    assert [one for one in listing(folder) if one.startswith(".")] == []
    assert choose(checkpoints, folder)[0] == "iter_0000003"


def test_a_linked_checkpoint_is_loaded_and_never_removed(tmp_path: Path, ranks: Ranks) -> None:
    """It was moved to another disk."""
    folder, other_disk = tmp_path / "checkpoints", tmp_path / "other disk"
    checkpoints = Checkpoints(folder, ranks, TORCH)
    save(checkpoints, 1).rename(other_disk)
    (folder / "iter_0000001").symlink_to(other_disk)
    assert choose(checkpoints, folder) == ("iter_0000001", {})
    for iteration in (2, 3):
        save(checkpoints, iteration, keep=1)
    assert listing(folder) == ["iter_0000001", "iter_0000003", "latest"]
    assert is_complete(other_disk)


def test_a_checkpoint_that_was_replaced_is_not_lost_for_a_file_of_its_name(tmp_path: Path, ranks: Ranks) -> None:
    whole = save(Checkpoints(tmp_path, ranks, TORCH), 1)
    whole.rename(tmp_path / ".iter_0000001.old")
    whole.touch()
    Checkpoints(tmp_path, ranks, TORCH)
    assert is_complete(tmp_path / ".iter_0000001.old")
    whole.unlink()
    Checkpoints(tmp_path, ranks, TORCH)
    assert is_complete(whole)


def test_a_checkpoint_is_replaced_by_another_of_its_name(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    (save(checkpoints, 3) / "model.pt").write_bytes(b"old")
    assert (save(checkpoints, 3) / "model.pt").stat().st_size == 100
    assert listing(tmp_path) == ["iter_0000003", "latest"]


@pytest.mark.parametrize(("error", "got"), [
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    (RuntimeError("[enforce fail at inline_container.cc:664]"), "a file cut short (is the disk full?)"),
])  # fmt: skip
def test_a_failed_save_leaves_the_one_before(tmp_path: Path, ranks: Ranks, error: Exception, got: str) -> None:
    checkpoints = Checkpoints(tmp_path, ranks, TORCH)
    save(checkpoints, 1)

    def prepare(folder: Path, _leaders: Sequence[int], _background: object) -> Write:
        def write() -> None:
            (folder / "model.pt").write_bytes(b"half")
            raise error

        return write

    write = checkpoints.start(prepare, 2, {})
    with pytest.raises(AgreedError) as caught:
        write()
    assert caught.value.error.exit_code == 4
    assert str(caught.value) == (
        f"{tmp_path}/iter_0000002: the checkpoint could not be written; got {got}; "
        "free space there or fix its permissions; resume the last complete one with train.load"
    )
    assert listing(tmp_path) == ["iter_0000001", "latest"]
    assert choose(checkpoints, tmp_path) == ("iter_0000001", {})


def test_a_checkpoint_without_a_file_that_is_needed(tmp_path: Path, ranks: Ranks) -> None:
    """Another rank could not write it, and said so."""
    with pytest.raises(AgreedError) as caught:
        Checkpoints(tmp_path, ranks, TORCH).start(lambda *_: lambda: None, 2, {}, ["ddp.pt"])()
    assert str(caught.value) == (
        f"{tmp_path}/iter_0000002: the checkpoint lacks a file; got ddp.pt; "
        "look for another rank's message in logs/rank-<N>.log"
    )
    assert listing(tmp_path) == []
