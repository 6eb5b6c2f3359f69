"""Data to the nodes, between folders of this machine: what is sent, how it appears, and what is refused."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import STEP_S
from tests.unit.ops.conftest import LARGE, Lab, brought, counts, program
from tridock.errors import ClusterError, RequestError, TridockError
from tridock.experiment import load_experiment
from tridock.ops.hosts import facts as host_facts
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.sync import rsync
from tridock.ops.sync.files import choose, of_experiment
from tridock.ops.sync.operation import sync
from tridock.ops.sync.rsync import OPERATOR

ROOT = Path(__file__).parents[3]


def refused(lab: Lab, *paths: str) -> tuple[list[str], int]:
    failure = sync(lab.hosts, choose(lab.project, paths)).nodes.failure()
    assert failure is not None
    return str(failure).splitlines(), failure.exit_code


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


def test_a_file_of_equal_size_that_was_written_just_after_the_first_is_sent(lab: Lab) -> None:
    path = lab.write("data/x", b"a")
    os.utime(path, ns=(0, 5))
    brought(lab, "data/x")
    path.write_bytes(b"b")
    os.utime(path, ns=(0, 6))
    assert counts(brought(lab, "data/x")) == [(1, 0, 1)] * 2
    assert lab.below("node-2") == {"data/x": b"b"}


def test_a_byte_that_differs_is_found_by_its_content_and_mended(lab: Lab, pair: dict[str, bytes]) -> None:
    brought(lab, "data/x")
    path = lab.workspace("node-2") / "data/x.bin"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(bytes([LARGE[1000] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # it looks as it did
    assert counts(brought(lab, "data/x")) == [(0, 3, 0)] * 2
    first, second = brought(lab, "data/x", checksum=True)
    assert (counts([first]), second.sent, second.there) == ([(0, 3, 0)], 1, 2)
    assert 0 < second.bytes < len(LARGE) / 100
    assert lab.below("node-2") == pair


def test_a_run_continues_to_read_the_file_that_is_replaced(lab: Lab, pair: dict[str, bytes]) -> None:
    brought(lab, "data/x")
    with (lab.workspace("node-1") / "data/x.bin").open("rb") as opened:
        lab.write("data/x.bin", b"other")
        brought(lab, "data/x")
        assert opened.read() == LARGE
    assert lab.below("node-1")["data/x.bin"] == b"other"


HELD = """\
while [ "$1" != tridock-lab ]; do shift; done
shift; cd "$WORKSPACE"
case " $* " in *" flock "*)
  if mkdir ../held 2>/dev/null; then
    mkfifo ../held/pipe
    exec 3<&0
    { dd bs=64K iflag=count_bytes count=2500000; while kill -0 TESTS && ! [ -e ../go ]; do sleep 0.05; done; cat; } \\
      <&3 >../held/pipe 2>/dev/null &
    exec "$@" <../held/pipe
  fi
  touch ../go
esac
exec "$@"
"""
"""The first transfer to a node blocks after 2.5 MB until the next one starts."""


def begun(lab: Lab) -> threading.Thread:
    """Begins to send, and comes further than a quarter on each host."""
    program(lab.bin / "docker", HELD.replace("TESTS", str(os.getpid())))
    chosen = choose(lab.project, ["data/x"])
    thread = threading.Thread(target=lambda: sync(lab.hosts, chosen), daemon=True)
    thread.start()
    places = [lab.workspace(node) / "data" for node in lab.hosts]
    deadline = time.monotonic() + STEP_S
    while not all(any(path.stat().st_size > 1_000_000 for path in it.glob(".x.bin.*")) for it in places):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return thread


def test_what_was_cut_off_is_not_visible_and_is_resumed(lab: Lab, pair: dict[str, bytes]) -> None:
    """The old data set stays whole until the new one is there: no index of the one with tokens of the other."""
    brought(lab, "data/x")
    new = {"data/x.bin": os.urandom(4_000_000), "data/x.idx": b"other", "data/x.json": b"{ }"}
    for name, content in new.items():
        lab.write(name, content)
    thread = begun(lab)
    seen = lab.below("node-1")
    for node, host in lab.hosts.items():
        host.close()
        (lab.workspace(node).parent / "go").touch()
    thread.join()
    for node in lab.hosts:
        assert {name: content for name, content in lab.below(node).items() if "/." not in name} == pair
    assert {name: content for name, content in seen.items() if "/." not in name} == pair
    rows = brought(lab, "data/x")
    assert [(row.sent, row.there) for row in rows] == [(3, 0)] * 2
    assert all(0 < row.bytes < 3_100_000 for row in rows)
    assert lab.below("node-1") == lab.below("node-2") == new


def test_two_at_once(lab: Lab, pair: dict[str, bytes]) -> None:
    first = begun(lab)
    assert counts(brought(lab, "data/x")) == [(3, 0, 0)] * 2  # it waits; then all is there
    first.join()
    assert lab.below("node-1") == lab.below("node-2") == pair


def test_a_node_with_another_image_or_none_that_runs(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    program(lab.bin / "docker", "exit 127")
    up = f"tridock up --hosts {lab.hosts.cluster.hostfile_path}"
    line = f"its image has another version of Tridock; got it has no rsync; run tridock image, then {up}"
    assert refused(lab, "data/x") == ([f"node-1: {line}", f"node-2: {line}"], 3)


def test_a_machine_without_rsync(lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    found = lab.bin / "docker"
    program(found, f"export PATH={os.environ['PATH']}; {found.read_text().partition(chr(10))[2]}")
    (lab.bin / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(lab.bin))
    lines, code = refused(lab, "data/x")
    assert lines == ["this machine: has no rsync; got no rsync on PATH; install it (the package rsync)"]
    assert code == 2


def test_nodes_that_are_not_up_are_brought_up_except_for_a_dry_run(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.up.remove("node-2")
    lines = [row.failed for row in sync(lab.hosts, choose(lab.project, ["data/x"]), dry_run=True).rows]
    assert lines == [False, True]

    def up(hosts: Hosts) -> str:
        lab.up.add("node-2")
        return "id"

    monkeypatch.setattr(rsync, "up", up)
    assert [row.sent for row in brought(lab, "data/x")] == [3, 3]


def test_there_is_no_room(lab: Lab) -> None:
    """One node's df says so; the other gets its data."""
    lab.write("data/x.bin", bytes(2_000_000))
    program(lab.bin / "df", "case $PWD in *node-2*) echo Avail; echo 1000000;; *) echo Avail; echo 9000000000;; esac")
    lines, code = refused(lab, "data")
    assert lines == [
        "node-2: has too little disk space for the data; got 2.0 MB to send, 1.0 MB free in node-2:/workspace/data; "
        "free some space there, or choose another folder (workdir in the settings)",
        "node-1: no problem here; fix the others",
    ]
    assert code == 3
    assert (len(lab.below("node-1")), lab.below("node-2")) == (1, {})


def test_a_folder_in_the_way(lab: Lab, pair: dict[str, bytes]) -> None:
    (lab.workspace("node-1") / "data/x.bin/full").mkdir(parents=True)
    lines, code = refused(lab, "data/x.bin")
    assert lines[0] == (
        "node-1: `rsync data` failed with exit code 23; "
        "got could not make way for new regular file: x.bin; fix that there, then try again"
    )
    assert (code, lab.below("node-2")) == (3, {"data/x.bin": LARGE})


def test_what_changes_while_it_is_sent_is_an_error(lab: Lab, pair: dict[str, bytes]) -> None:
    sh = f"{lab.project}/data/x.bin"
    program(lab.bin / "flock", f'printf x >>"{sh}"; shift; exec "$@"')
    lines, _ = refused(lab, "data/x.bin")
    assert lines == ["data/x.bin: changed while it was sent; wait until it is written, then try again"]


# ---- shared folders ------------------------------------------------------------------------------


def probes(lab: Lab) -> list[Path]:
    return list(lab.project.parent.rglob(".tridock-probe-*"))


def test_hosts_that_share_their_workspace_get_one_copy(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.workspace("node-2").rmdir()
    lab.workspace("node-2").symlink_to(lab.workspace("node-1"))
    first, second = brought(lab, "data/x")
    assert (first.sent, first.shared_with) == (3, ())
    assert (second.sent + second.there, second.shared_with) == (0, ("node-1",))
    assert lab.below("node-1") == pair
    assert probes(lab) == []


def test_only_the_folder_of_the_data_is_shared(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.write("vocab/v.json", b"v")
    (lab.workspace("node-1") / "data").mkdir()
    (lab.workspace("node-2") / "data").symlink_to(lab.workspace("node-1") / "data")
    first, second = brought(lab, "data/x", "vocab")
    assert (first.sent, second.sent, second.shared_with) == (4, 1, ("node-1",))
    assert (lab.workspace("node-2") / "vocab/v.json").read_bytes() == b"v"


@pytest.mark.parametrize("writable", [True, False])
def test_a_workspace_that_is_the_projects_own_folder_has_it_all(
    lab: Lab, pair: dict[str, bytes], writable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.workspace("node-1").rmdir()
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
    folder.mkdir()
    for name, age in (("old", 7200), ("new", 60)):
        (folder / f".tridock-probe-{name}").touch()
        os.utime(folder / f".tridock-probe-{name}", (time.time() - age,) * 2)
    brought(lab, "data/x.idx")
    assert [path.name for path in probes(lab)] == [".tridock-probe-new"]


def test_a_dry_run_tells_and_leaves_nothing(lab: Lab, pair: dict[str, bytes]) -> None:
    rows = brought(lab, "data/x", dry_run=True)
    assert counts(rows) == [(3, 0, sum(map(len, pair.values())))] * 2
    assert list(lab.workspace("node-1").iterdir()) == []
    assert all(row.free for row in rows)
    brought(lab, "data/x.idx")
    assert counts(brought(lab, "data/x", dry_run=True)) == [(2, 1, len(LARGE) + 2)] * 2


def test_a_host_that_fails_does_not_stop_the_others(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_state: Callable[..., Any] = host_facts.read_state

    def down(transport: Any, node: str, host: Any) -> Any:
        if node == "node-1":
            raise ClusterError(RequestError([]).problems)
        return read_state(transport, node, host)

    monkeypatch.setattr(host_facts, "read_state", down)
    synced = sync(lab.hosts, choose(lab.project, ["data/x"]))
    assert [row.failed for row in synced.rows] == [True, False]
    assert isinstance(synced.nodes.failure(), ClusterError)
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


def test_a_checkpoint_has_hidden_files_of_its_own(lab: Lab) -> None:
    for name in ("iter_0000004/files.json", "iter_0000004/.metadata", ".iter_0000008.part/files.json", ".latest.part"):
        lab.write(f"runs/a/checkpoints/{name}", b"{}")
    assert names(lab, "runs/a") == [
        "runs/a/checkpoints/iter_0000004/.metadata", "runs/a/checkpoints/iter_0000004/files.json",
    ]  # fmt: skip


def test_a_data_set_of_images(lab: Lab) -> None:
    both = {"data/photos_images.npy": b"pixels" * 1000, "data/photos_labels.npy": b"labels"}
    for name, content in both.items():
        lab.write(name, content)
    assert names(lab, "data/photos") == list(both)
    experiment = load_experiment(ROOT / "configs" / "resnet50.yaml", ["data.data_path=data/photos"])
    chosen = choose(lab.project, [], of_experiment(lab.project, Path("e.yaml"), experiment)[0])
    assert [item.name for item in chosen] == list(both)
    assert [row.sent for row in sync(lab.hosts, chosen).rows] == [2, 2]
    assert lab.below("node-1") == lab.below("node-2") == both


def test_links_are_followed_and_not_round_and_round(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "x.bin").write_bytes(b"1")
    (tmp_path / "disk" / "back").symlink_to(tmp_path / "disk")
    (lab.project / "data").symlink_to(tmp_path / "disk")
    assert names(lab, "data") == ["data/x.bin"]


def test_what_leads_out_of_a_folder_or_looks_like_a_secret_is_refused_by_name(lab: Lab, tmp_path: Path) -> None:
    for name in ("key", "disk/corpus/x.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    for name in ("data/a.bin", "data/credentials.json", "data/id_rsa.pub"):
        lab.write(name, b"")
    links = {"b.bin": "a.bin", "corpus": "../../disk/corpus", "image.jpg": f"{tmp_path}/key"}
    for name, target in links.items():
        (lab.project / "data" / name).symlink_to(target)
    with pytest.raises(RequestError) as caught:
        choose(lab.project, ["data"])
    here = lab.project / "data"
    assert str(caught.value).splitlines() == [
        f"--path: leads out of its folder by a link; got data/corpus, to {tmp_path}/disk/corpus; "
        f"remove it from {here}, or name it itself: --path data/corpus",
        f"--path: looks like a secret; got data/credentials.json; "
        f"remove it from {here}, or name it itself: --path data/credentials.json",
        f"--path: leads out of its folder by a link; got data/image.jpg, to {tmp_path}/key; "
        f"remove it from {here}, or name it itself: --path data/image.jpg",
    ]
    named = ["data/a.bin", "data/b.bin", "data/corpus", "data/credentials.json"]
    assert names(lab, *named) == ["data/a.bin", "data/b.bin", "data/corpus/x.bin", "data/credentials.json"]


def test_all_that_is_wrong_with_the_paths_at_once(lab: Lab) -> None:
    lab.write("data/x.bin", b"")
    lab.write("data/photos_images.npy", b"")
    (lab.project / "empty").mkdir()
    (lab.project / "links").mkdir()
    (lab.project / "links" / "a").symlink_to("nowhere")
    make = "make it first (tridock data preprocess, or tridock data demo), or give another"
    outside = f"give a file, a folder or a data set's prefix below {lab.project}"
    with pytest.raises(RequestError) as caught:
        choose(lab.project, ["..", ".", "data/none", "data/x", "data/photos", "empty", "links"])
    assert str(caught.value).splitlines() == [
        f"--path: is outside the project folder; got ..; {outside}",
        f"--path: is outside the project folder; got .; {outside}",
        f"--path: is not here; got data/none; {make}",
        f"--path: is half of a data set: there is no .idx; got data/x; {make}",
        f"--path: is half of a data set: there is no _labels.npy; got data/photos; {make}",
        f"--path: holds no file; got empty; {make}",
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
    with pytest.raises(TridockError) as caught_late:
        sync(lab.hosts, chosen)
    assert str(caught_late.value) == "data/x.idx: cannot be read; got No such file or directory; make it readable"


def test_damage_does_not_spread(lab: Lab, pair: dict[str, bytes]) -> None:
    lab.write("data/x.json", b'{"bin_sha256": "00", "idx_sha256": null}')
    with pytest.raises(RequestError) as caught:
        sync(lab.hosts, choose(lab.project, ["data/x"]))
    assert re.fullmatch(
        r"data/x\.bin: is not what x\.json beside it says, which has SHA-256 00; got [0-9a-f]{64}; "
        "make the data again, or remove that manifest if it is of other data",
        str(caught.value),
    )
    assert lab.below("node-1") == {}


def test_names_that_a_shell_would_take_apart(lab: Lab) -> None:
    files = {
        f"data/{name}": os.fsencode(name)
        for name in (
            "a b",
            "$(id)",
            "-rf",
            "it's",
            'say "x"',
            "ä\\n",
            "*",
            "a\x0b\u2028b",
            "a\nb\tc",
            "\\#012",
            "#",
            "\udcff",
            "s p/;x",
        )
    }
    for name, content in files.items():
        lab.write(name, content)
    files["da ta/'\"$x"] = LARGE
    lab.write("da ta/'\"$x", LARGE)
    assert [row.sent for row in brought(lab, "data", "da ta")] == [len(files)] * 2
    assert lab.below("node-1") == files
    assert [row.there for row in brought(lab, "data", "da ta")] == [len(files)] * 2
