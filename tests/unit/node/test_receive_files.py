"""Files that a node takes from the head."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.node.agent.code import receive_files
from tridock.node.supervisor.failover import _pack


def archive(*members: tarfile.TarInfo) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w|") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO(b"x" * member.size))
    return io.BytesIO(packed.getvalue())


def test_what_is_packed_is_taken(tmp_path: Path) -> None:
    large = bytes(range(256)) * 9000
    stream = io.BytesIO()
    _pack([("iter_1/a.pt", large), ("latest", b"iter_1\n")], stream)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "latest").write_text("iter_0\n")
    assert receive_files(tmp_path / "there", io.BytesIO(stream.getvalue())) == 2
    assert (tmp_path / "there" / "iter_1" / "a.pt").read_bytes() == large
    assert (tmp_path / "there" / "latest").read_text() == "iter_1\n"
    assert sorted(path.name for path in (tmp_path / "there").iterdir()) == ["iter_1", "latest"]


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x"])
def test_names_that_lead_elsewhere(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        receive_files(tmp_path / "in", archive(tarfile.TarInfo(name)))
    assert str(caught.value) == f"{name}: is not taken; send plain files, by names below the folder"
    assert not list(tmp_path.iterdir())


def test_links(tmp_path: Path) -> None:
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    with pytest.raises(RequestError, match=r"^link: is not taken"):
        receive_files(tmp_path, archive(link))


def test_an_archive_that_is_cut_short(tmp_path: Path) -> None:
    """What was whole before the cut stays; of the rest nothing is left."""
    member = tarfile.TarInfo("second")
    member.size = 5000
    with pytest.raises(tarfile.ReadError):
        receive_files(tmp_path, io.BytesIO(archive(tarfile.TarInfo("first"), member).getvalue()[:2048]))
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
