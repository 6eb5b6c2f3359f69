"""Files below a folder: no link is followed, whoever made it, and whenever."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest

from tridock.contracts import files_below
from tridock.contracts.files_below import entries, is_below, open_below, write_below
from tridock.errors import RequestError


@pytest.mark.parametrize("name", ["a", "a/b", "./a", ".hidden", "a..b/..c"])
def test_names_below(name: str) -> None:
    assert is_below(name)


@pytest.mark.parametrize("name", ["", ".", "/a", "..", "a/../b", "a/..", "a\0b", "x" * 1025, "a/" * 101])
def test_other_names(tmp_path: Path, name: str) -> None:
    assert not is_below(name)
    for action in (lambda: write_below(tmp_path, name, b""), lambda: open_below(tmp_path, name)):
        with pytest.raises(RequestError, match=r"is not taken; send plain files, by names below the folder$"):
            action()
    assert not list(tmp_path.iterdir())


def test_the_folder_itself_may_be_a_link_and_nothing_below_it(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "outside").mkdir()
    (tmp_path / "disk" / "p").symlink_to("../outside")
    write_below(tmp_path / "runs", "new/file", b"one", 0o755)
    assert (tmp_path / "disk" / "new" / "file").read_bytes() == b"one"
    assert (tmp_path / "disk" / "new" / "file").stat().st_mode & 0o777 == 0o755
    with pytest.raises(RequestError) as caught:
        write_below(tmp_path / "runs", "p/file", b"two")
    what = "is a link or a file where a folder belongs; remove it or move it away, then try again"
    assert str(caught.value) == f"{tmp_path}/runs/p: {what}"
    assert not list((tmp_path / "outside").iterdir())


def test_a_link_is_replaced_and_never_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "name").symlink_to("../secret")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_below(tmp_path / "in", "name")
    write_below(tmp_path / "in", "name", b"theirs")
    assert (tmp_path / "secret").read_text() == "mine"
    with open_below(tmp_path / "in", "name") as file:
        assert file.read() == b"theirs"


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(OSError, match="Not a regular file"):
            open_below(tmp_path, name)


def packed(*members: tarfile.TarInfo) -> io.BytesIO:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return io.BytesIO(stream.getvalue())


def test_an_archive_cannot_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tarfile reads the header of a long name whole; in an archive of zeros it costs its sender a thousandth."""
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(header.tobuf(tarfile.GNU_FORMAT)))
    for source in (path, io.BytesIO(header.tobuf(tarfile.GNU_FORMAT))):
        with pytest.raises(tarfile.ReadError, match=r"^a header of 1,099,511,627,776 bytes$"):
            list(entries(source))
    assert [entry.name for entry, _ in entries(packed(tarfile.TarInfo("x" * 900)))] == ["x" * 900]
    monkeypatch.setattr(files_below, "_MOST_FILES", 2)
    with pytest.raises(tarfile.ReadError, match=r"^more than 2 files$"):
        list(entries(packed(*map(tarfile.TarInfo, "abc"))))
