"""Bringing a run home where it is at home already; the rest needs hosts (tests/integration/test_fab_over_ssh.py)."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts
from tridock.errors import ClusterError
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.session import Session
from tridock.ops.runs.fetch import _unpack, fetch
from tridock.ops.runs.registry import Run


def test_the_twins_own_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked over itself, a log that a rank writes would lose what comes after."""
    (tmp_path / "twin").write_text("node-1 slots=1\n")
    (tmp_path / "twin.yaml").write_text("transport: compose\n")
    session = Session(load_cluster(tmp_path / "twin", project_folder=tmp_path))
    session._states = {"node-1": HostState(HostFacts(1000, 1000, "/home/ada", 0, False), "28.1", None, None)}
    log = tmp_path / "runs" / "a" / "log"
    log.parent.mkdir(parents=True)
    log.write_text("so far\n")
    monkeypatch.chdir(tmp_path)
    assert fetch(session, Run("a", "node-1"), Path("runs"), checkpoints=True) == Path("runs/a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert log.read_text() == "so far\n"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"pwned") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(content) if kind == tarfile.REGTYPE else 0
    return made


HOSTILE = {
    "the folder above": [member("../outside")],
    "an absolute name": [member("{outside}")],
    "a way up within": [member("run/../../outside")],
    "through a link to above": [member("run/l", tarfile.SYMTYPE, ".."), member("run/l/../outside")],
    "through a link away": [member("run/l", tarfile.SYMTYPE, "{folder}"), member("run/l/outside")],
    "a hard link away": [member("run/l", tarfile.LNKTYPE, "../outside")],
    "a link that leads up": [member("run/l", tarfile.SYMTYPE, "../../outside")],
    "a device": [member("run/d", tarfile.CHRTYPE)],
    "a pipe": [member("run/p", tarfile.FIFOTYPE)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_writes_nothing_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "here"
    outside.write_text("mine")
    folder.mkdir()
    archive = tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for entry in HOSTILE[name]:
            given = tarfile.TarInfo(entry.name.format(outside=outside, folder=tmp_path))
            given.type, given.size, given.linkname = entry.type, entry.size, entry.linkname.format(folder=tmp_path)
            made.addfile(given, io.BytesIO(b"pwned"))
    try:
        _unpack("gpu-1", archive, folder)
    except ClusterError as error:
        (problem,) = error.problems
        assert (problem.where, problem.what) == ("gpu-1", "sent an archive that cannot be unpacked")
    assert outside.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "here", "outside"]
    for path in folder.rglob("*"):
        assert path.resolve().is_relative_to(folder.resolve())
        assert path.is_dir() or path.is_file()
