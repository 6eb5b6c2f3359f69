"""Data to the hosts where something goes wrong on the way: what was cut off, what is damaged, a disk that is full."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.ops.conftest import LARGE, Lab, brought
from tridock.errors import ClusterError, Problem
from tridock.ops.sync import choose, sync, transfer
from tridock.ops.sync.files import DataFile, fingerprint

ROOT = Path(__file__).parents[3]


def cut_at(monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
    whole = transfer._chunks

    def cut(file: DataFile, offset: int) -> Any:
        for number, chunk in enumerate(whole(file, offset)):
            if number == chunks:
                raise ClusterError(Problem("cable", "was pulled", "", "plug it in"))
            yield chunk

    monkeypatch.setattr(transfer, "_chunks", cut)


def test_a_transfer_that_was_cut_off_is_resumed(
    lab: Lab, pair: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        cut_at(patch, 2)
        synced = sync(lab.session, choose(lab.project, ["data/x.bin"]))
        assert synced.failure is not None
        assert [row.failed for row in synced.rows] == [True, True]
    (name,) = lab.below("node-1")
    assert re.fullmatch(r"data/\.x\.bin\.[0-9a-f]{16}\.part", name)
    sent: list[int] = []
    chunks = transfer._chunks
    monkeypatch.setattr(transfer, "_chunks", lambda file, offset: (sent.append(offset), chunks(file, offset))[1])
    brought(lab, "data/x.bin")
    assert len(sent) == 2
    assert all(0 < offset <= 2 << 20 for offset in sent)
    assert lab.below("node-1") == {"data/x.bin": LARGE}


def test_a_damaged_part_is_sent_again(lab: Lab, pair: dict[str, bytes]) -> None:
    (file,) = (it for it in _files(lab, "data/x.bin"))
    part = lab.workspace("node-1") / transfer.part_name(file)
    part.parent.mkdir(parents=True)
    part.write_bytes(b"garbage")
    old = part.with_name(".x.bin.0123456789abcdef.part")
    old.write_bytes(b"of older data")
    brought(lab, "data/x")
    assert lab.below("node-1") == pair


def test_a_part_that_somebody_writes_is_left_to_them(lab: Lab, pair: dict[str, bytes]) -> None:
    (file,) = _files(lab, "data/x.bin")
    part = lab.workspace("node-1") / transfer.part_name(file)
    part.parent.mkdir(parents=True)
    with part.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        writer.write(b"half")
        writer.flush()
        brought(lab, "data/x")
        left = part.relative_to(lab.workspace("node-1")).as_posix()
        assert lab.below("node-1") == {**pair, left: b"half"}


def _files(lab: Lab, *paths: str) -> tuple[DataFile, ...]:
    return fingerprint(lab.project, choose(lab.project, paths), lambda _: None)


def refused(lab: Lab, *paths: str) -> tuple[list[str], int]:
    synced = sync(lab.session, choose(lab.project, paths))
    assert synced.failure is not None
    return str(synced.failure).splitlines(), synced.failure.exit_code


def test_there_is_no_room(lab: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One host's df says so; the other gets its data."""
    lab.write("data/x.bin", bytes(2_000_000))
    (tmp_path / "bin").mkdir()
    df = tmp_path / "bin" / "df"
    df.write_text(
        "#!/bin/sh\ncase $3 in *node-2*) free=1000;; *) free=9000000;; esac\n"
        "echo Filesystem 1024-blocks Used Available Capacity Mounted\necho a disk 1 1 $free 50% /some where\n"
    )
    df.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    lines, code = refused(lab, "data")
    assert lines == [
        "node-2: has too little disk space for the data; "
        f"got 2.0 MB to send, 1.0 MB free in {lab.workspace('node-2')}/data; "
        "free some space there, or choose another folder (workdir in the settings)",
        "node-1: no problem here; fix the others",
    ]
    assert code == 3
    assert (len(lab.below("node-1")), lab.below("node-2")) == (1, {})


def test_a_folder_in_the_way(lab: Lab, pair: dict[str, bytes]) -> None:
    (lab.workspace("node-1") / "data/x.bin").mkdir(parents=True)
    lines, code = refused(lab, "data/x.bin")
    assert lines[0] == (
        "node-1: has something else where a file of the data belongs; "
        f"got {lab.workspace('node-1')}/data/x.bin; remove it there"
    )
    assert code == 3


@pytest.mark.parametrize("size", [100, transfer.SMALL])
def test_what_changes_while_it_is_sent_does_not_appear(lab: Lab, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    path = lab.write("data/x.txt", bytes(size))
    send = transfer.send

    def late(*given: Any) -> None:
        path.write_bytes(bytes(size - 1))
        send(*given)

    monkeypatch.setattr("tridock.ops.sync.operation.send", late)
    lines, _ = refused(lab, "data/x.txt")
    assert lines == ["data/x.txt: changed while it was sent; wait until it is written, then try again"]
    assert "data/x.txt" not in lab.below("node-1")


def test_what_arrives_damaged_does_not_appear(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.write("data/x.txt", b"good")
    chunks = transfer._chunks

    def flip(file: DataFile, offset: int) -> Any:
        yield from (chunk.replace(b"good", b"evil") for chunk in chunks(file, offset))

    monkeypatch.setattr(transfer, "_chunks", flip)
    lines, code = refused(lab, "data/x.txt")
    assert lines[0] == (
        f"node-1: `write into {lab.workspace('node-1')}/data` failed with exit code 65; "
        "got data/x.txt arrived damaged; see whether the connection is sound, then try again"
    )
    assert (code, lab.below("node-1")) == (3, {})
