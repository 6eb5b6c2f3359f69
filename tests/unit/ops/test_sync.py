"""Data to the hosts, between folders of this machine: what is sent, in which order, and what is refused."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.conftest import LARGE, Lab, brought, counts
from tridock.errors import ClusterError, RequestError, TridockError
from tridock.experiment import load_experiment
from tridock.ops.runs.preflight import data_files
from tridock.ops.sync import choose, of_experiment, sync, transfer
from tridock.ops.sync.files import DataFile, fingerprint
from tridock.ops.sync.shared import OPERATOR
from tridock.remote import LocalHost

ROOT = Path(__file__).parents[3]


def test_what_is_missing_is_sent_and_nothing_twice(lab: Lab, pair: dict[str, bytes]) -> None:
    size = sum(map(len, pair.values()))
    assert counts(brought(lab, "data/x")) == [(3, 0, size)] * 2
    assert lab.below("node-1") == lab.below("node-2") == pair
    inode = (lab.workspace("node-1") / "data/x.bin").stat().st_ino
    (lab.workspace("node-2") / "data/x.idx").unlink()
    assert counts(brought(lab, "data/x")) == [(0, 3, 0), (1, 2, 5)]
    assert (lab.workspace("node-1") / "data/x.bin").stat().st_ino == inode
    assert lab.below("node-2") == pair
    assert [path.name for path in (lab.project / "data").iterdir() if path.name.startswith(".")] == []


def test_a_byte_that_differs_is_found_by_its_hash_and_mended(lab: Lab, pair: dict[str, bytes]) -> None:
    brought(lab, "data/x")
    path = lab.workspace("node-2") / "data/x.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([LARGE[1000] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # it looks as it did
    assert counts(brought(lab, "data/x")) == [(0, 3, 0), (1, 2, len(LARGE))]
    assert lab.below("node-2") == pair


def test_a_run_continues_to_read_the_file_that_is_replaced(lab: Lab, pair: dict[str, bytes]) -> None:
    brought(lab, "data/x")
    with (lab.workspace("node-1") / "data/x.bin").open("rb") as opened:
        lab.write("data/x.bin", b"other")
        brought(lab, "data/x")
        assert opened.read() == LARGE
    assert lab.below("node-1")["data/x.bin"] == b"other"


def test_a_second_look_reads_no_file_that_stayed_as_it_was(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The hosts' sha256sum is replaced by one that fails: none is called."""
    past = time.time() - 100
    os.utime(lab.project / "data/x.bin", (past, past))
    brought(lab, "data/x")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sha256sum").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "sha256sum").chmod(0o755)
    assert counts(brought(lab, "data/x")) == [(0, 3, 0)] * 2
    (lab.workspace("node-1") / "data/x.idx").write_bytes(b"12345")
    synced = sync(lab.session, choose(lab.project, ["data/x"]))
    assert [row.failed for row in synced.rows] == [True, False]
    assert str(synced.failure).startswith("node-1: `look at its data` failed with exit code 9; ")


def test_a_hash_of_this_machine_is_kept_only_of_what_has_settled(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, kept = choose(lab.project, ["data/x.bin"]), lab.project / ".tridock" / "data-hashes.json"
    first = fingerprint(lab.project, chosen, lambda _: None)
    assert not kept.exists()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**10)
    assert fingerprint(lab.project, chosen, lambda _: None) == first
    assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    counted: list[int] = []
    assert fingerprint(lab.project, chosen, counted.append) == first
    assert counted == [len(LARGE)]  # at once: it was not read
    (lab.project / "data/x.bin").write_bytes(LARGE[::-1])
    kept_before = kept.read_bytes()
    (again,) = fingerprint(lab.project, chosen, lambda _: None)
    assert again.sha256 != first[0].sha256
    assert kept.read_bytes() != kept_before
    kept.write_text("no JSON")
    assert fingerprint(lab.project, chosen, lambda _: None) == (again,)


def test_a_hash_of_a_host_is_kept_only_of_what_has_settled(lab: Lab, pair: dict[str, bytes]) -> None:
    brought(lab, "data/x.idx")
    cache = Path(f"{lab.workspace('node-1')}.hashes")
    (lab.workspace("node-1") / "data/x.idx").write_bytes(b"index")  # new times, equal content
    before = cache.read_text()
    assert counts(brought(lab, "data/x.idx"))[0] == (0, 1, 0)
    assert cache.read_text() == before


def test_the_index_comes_last_and_an_old_one_goes_first(lab: Lab, pair: dict[str, bytes]) -> None:
    def file(name: str, size: int) -> DataFile:
        return DataFile(name, lab.project / name, "data", size, 0, "")

    names = ["data/b.idx", "data/a.idx", "data/a.bin", "data/b.bin", "data/sub/c.json", "data/a.json"]
    large = file("data/big.bin", transfer.SMALL)
    steps = transfer.steps([*(file(name, 1) for name in names), large, file("data/big.idx", transfer.SMALL)])
    assert [[file.name for file in step] for step in steps] == [
        ["data/a.bin", "data/a.json", "data/b.bin"], ["data/big.bin"], ["data/sub/c.json"],
        ["data/a.idx", "data/b.idx"], ["data/big.idx"],
    ]  # fmt: skip


def test_between_two_data_sets_of_one_name_there_is_none(lab: Lab, pair: dict[str, bytes]) -> None:
    """New tokens under the old index would be a data set that looks whole: cut off there, it has no index."""
    brought(lab, "data/x")
    lab.write("data/x.bin", LARGE[::-1])
    lab.write("data/x.idx", b"other")
    seen: list[list[str]] = []
    pipe = LocalHost.pipe

    def watch(self: LocalHost, *given: Any, **named: Any) -> Any:
        done = pipe(self, *given, **named)
        seen.append(sorted(lab.below("node-1")))
        return done

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalHost, "pipe", watch)
        brought(lab, "data/x", only=("node-1",))
    assert ["data/x.bin", "data/x.json"] in seen
    assert lab.below("node-1")["data/x.idx"] == b"other"


# ---- shared folders ------------------------------------------------------------------------------


def probes(lab: Lab) -> list[Path]:
    return list(lab.project.parent.rglob(".tridock-probe-*"))


def test_hosts_that_share_their_workspace_get_one_copy(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.workspace("node-1").mkdir(parents=True)
    lab.workspace("node-2").parent.mkdir(parents=True)
    lab.workspace("node-2").symlink_to(lab.workspace("node-1"))
    first, second = brought(lab, "data/x")
    assert (first.sent, first.shared_with) == (3, ())
    assert (second.sent + second.there, second.shared_with) == (0, ("node-1",))
    assert lab.below("node-1") == pair
    assert probes(lab) == []


def test_only_the_folder_of_the_data_is_shared(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.write("vocab/v.json", b"v")
    lab.workspace("node-1").mkdir(parents=True)
    lab.workspace("node-2").mkdir(parents=True)
    (lab.workspace("node-1") / "data").mkdir()
    (lab.workspace("node-2") / "data").symlink_to(lab.workspace("node-1") / "data")
    first, second = brought(lab, "data/x", "vocab")
    assert (first.sent, second.sent, second.shared_with) == (4, 1, ("node-1",))
    assert (lab.workspace("node-2") / "vocab/v.json").read_bytes() == b"v"


@pytest.mark.parametrize("writable", [True, False])
def test_a_workspace_that_is_the_projects_own_folder_has_it_all(
    lab: Lab, pair: dict[str, bytes], writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.workspace("node-1").parent.mkdir(parents=True)
    lab.workspace("node-1").symlink_to(lab.project)
    if not writable:  # for the operator; the host writes there

        def refuse(path: Path, **_: Any) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "touch", refuse)
    first, second = brought(lab, "data/x")
    assert (first.sent + first.there, first.shared_with) == (0, (OPERATOR,))
    assert (second.sent, second.shared_with) == (3, ())
    assert probes(lab) == []


def test_a_probe_that_a_killed_one_left_goes_after_an_hour(lab: Lab, pair: dict[str, bytes]) -> None:
    folder = lab.workspace("node-1") / "data"
    folder.mkdir(parents=True)
    for name, age in (("old", 7200), ("new", 60)):
        (folder / f".tridock-probe-{name}").touch()
        os.utime(folder / f".tridock-probe-{name}", (time.time() - age,) * 2)
    brought(lab, "data/x.idx")
    assert [path.name for path in probes(lab)] == [".tridock-probe-new"]


def test_a_dry_run_tells_and_leaves_nothing(lab: Lab, pair: dict[str, bytes]) -> None:
    rows = brought(lab, "data/x", dry_run=True)
    assert counts(rows) == [(3, 0, sum(map(len, pair.values())))] * 2
    assert not (lab.project.parent / "node-1").exists()
    assert all(row.free for row in rows)


def test_a_host_that_fails_does_not_stop_the_others(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state: Callable[..., Any] = lab.session.read_state

    def down(node: str, host: Any) -> Any:
        if node == "node-1":
            raise ClusterError(RequestError([]).problems)
        return read_state(node, host)

    monkeypatch.setattr(lab.session, "read_state", down)
    synced = sync(lab.session, choose(lab.project, ["data/x"]))
    assert [row.failed for row in synced.rows] == [True, False]
    assert isinstance(synced.failure, ClusterError)
    assert lab.below("node-2") == pair


# ---- what is asked for ---------------------------------------------------------------------------


def names(lab: Lab, *paths: str) -> list[str]:
    return [item.name for item in choose(lab.project, paths)]


def test_a_prefix_a_file_a_folder(lab: Lab, pair: dict[str, bytes]) -> None:
    for name in (".unfinished/x", ".hidden", "x_train_indexmap_8ns_4sl_1s_doc_idx.npy", "x_indexmap.sha256", "sub/y"):
        lab.write(f"data/{name}", b"")
    assert names(lab, "data/x") == ["data/x.bin", "data/x.idx", "data/x.json"]
    assert names(lab, "data/x.idx", "data/x") == ["data/x.idx", "data/x.bin", "data/x.json"]
    assert names(lab, "data") == ["data/x.bin", "data/x.idx", "data/x.json", "data/sub/y"]
    assert names(lab, str(lab.project / "data/sub")) == ["data/sub/y"]
    assert names(lab, "data/x_indexmap.sha256") == ["data/x_indexmap.sha256"]


def test_a_data_set_of_images(lab: Lab) -> None:
    both = {"data/photos_images.npy": b"pixels" * 1000, "data/photos_labels.npy": b"labels"}
    for name, content in both.items():
        lab.write(name, content)
    assert names(lab, "data/photos") == list(both)
    experiment = load_experiment(ROOT / "configs" / "resnet50.yaml", ["data.data_path=data/photos"])
    chosen = of_experiment(lab.project, Path("e.yaml"), "data/photos", data_files(experiment))
    assert [item.name for item in chosen] == list(both)
    assert [row.sent for row in sync(lab.session, chosen).rows] == [2, 2]
    assert lab.below("node-1") == lab.below("node-2") == both


def test_links_are_followed_and_not_round_and_round(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "x.bin").write_bytes(b"1")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "disk")
    (lab.project / "data").symlink_to(tmp_path / "disk")
    assert names(lab, "data") == ["data/x.bin"]


def test_all_that_is_wrong_with_the_paths_at_once(lab: Lab) -> None:
    lab.write("data/x.bin", b"")
    lab.write("tabs/a\tb", b"")
    lab.write("data/photos_images.npy", b"")
    (lab.project / "empty").mkdir()
    (lab.project / "links").mkdir()
    (lab.project / "links" / "a").symlink_to("nowhere")
    make = "make it first (tridock data preprocess, or tridock data demo), or give another"
    outside = f"give a file, a folder or a data set's prefix below {lab.project}"
    with pytest.raises(RequestError) as caught:
        choose(lab.project, ["..", ".", "data/none", "data/x", "data/photos", "empty", "tabs", "links"])
    assert str(caught.value).splitlines() == [
        f"--path: is outside the project folder; got ..; {outside}",
        f"--path: is outside the project folder; got .; {outside}",
        f"--path: is not here; got data/none; {make}",
        f"--path: is half of a data set: there is no .idx; got data/x; {make}",
        f"--path: is half of a data set: there is no _labels.npy; got data/photos; {make}",
        f"--path: holds no file; got empty; {make}",
        "--path: has a file with a tab or a line break in its name; got 'tabs/a\\tb'; rename it",
        "--path: has a dangling link, or something that is not a file; got links/a; remove it or fix it",
    ]


def test_a_file_that_may_not_be_read(lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(RequestError) as caught:
            choose(lab.project, ["data/x.idx"])
    assert str(caught.value) == "--path: cannot be read; got data/x.idx; make it readable"
    chosen = choose(lab.project, ["data/x.idx"])
    (lab.project / "data/x.idx").unlink()
    (lab.project / "data/x.idx").mkdir()
    with pytest.raises(TridockError) as caught_late:
        sync(lab.session, chosen)
    assert str(caught_late.value) == "data/x.idx: cannot be read; got Is a directory; make it readable"


def test_damage_does_not_spread(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.write("data/x.json", b'{"bin_sha256": "00", "idx_sha256": null}')
    with pytest.raises(RequestError) as caught:
        sync(lab.session, choose(lab.project, ["data/x"]))
    assert re.fullmatch(
        r"data/x\.bin: is not what x\.json beside it says, which has SHA-256 00; got [0-9a-f]{64}; "
        "make the data again, or remove that manifest if it is of other data",
        str(caught.value),
    )
    assert not (lab.project.parent / "node-1").exists()


def test_names_that_a_shell_would_take_apart(lab: Lab) -> None:
    files = {
        f"data/{name}": name.encode()
        for name in ("a b", "$(id)", "-rf", "it's", 'say "x"', "ä\\n", "*", "a\x0b\u2028b")
    }
    for name, content in files.items():
        lab.write(name, content)
    lab.write("data/ b.idx", LARGE)
    assert [row.sent for row in brought(lab, "data")] == [9, 9]
    assert lab.below("node-1") == {**files, "data/ b.idx": LARGE}
    assert [row.there for row in brought(lab, "data")] == [9, 9]
