"""The code of a run on a node: laid out once all of its content is there."""

from __future__ import annotations

import io
import json
import os
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.node.agent.code import place_code, place_run
from tridock.ops.runs.code import ARCHIVE_END, archive_member


def index(**contents: bytes) -> str:
    files = {name.replace("__", "/"): sha256(content).hexdigest() for name, content in contents.items()}
    return json.dumps({name: {"sha256": digest, "executable": name == "run"} for name, digest in files.items()})


def store(folder: Path, content: bytes) -> Path:
    path = folder.parent / ".code" / sha256(content).hexdigest()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def test_it_is_laid_out_once_nothing_is_missing(tmp_path: Path) -> None:
    folder, wanted = tmp_path / "run-1", index(run=b"one", pkg__two=b"two", copy=b"one")
    assert set(place_code(folder, wanted).missing) == {sha256(b"one").hexdigest(), sha256(b"two").hexdigest()}
    store(folder, b"one")
    assert place_code(folder, wanted).missing == (sha256(b"two").hexdigest(),)
    assert not folder.exists()
    store(folder, b"two")
    assert place_code(folder, wanted).missing == ()
    code = folder / "code"
    assert [(code / name).read_bytes() for name in ("run", "copy", "pkg/two")] == [b"one", b"one", b"two"]
    assert [(code / name).stat().st_mode & 0o777 for name in ("run", "copy")] == [0o755, 0o644]


def test_content_that_is_damaged_is_missing(tmp_path: Path) -> None:
    store(tmp_path / "run-1", b"one").write_bytes(b"on")
    assert place_code(tmp_path / "run-1", index(run=b"one")).missing == (sha256(b"one").hexdigest(),)


def test_old_content_is_removed_and_nothing_else(tmp_path: Path) -> None:
    """Half of a file too, whose writer was killed; a folder there ends no launch."""
    kept, old = store(tmp_path / "run-1", b"one"), store(tmp_path / "run-1", b"old")
    half, folder, link = (kept.with_name(name) for name in (".half.4242.0a1b2c3d.part", "folder", "link"))
    half.touch()
    folder.mkdir()
    link.symlink_to("none")
    for path in (old, half, folder):
        os.utime(path, (0, 0))
    os.utime(link, (0, 0), follow_symlinks=False)
    assert place_code(tmp_path / "run-1", index(run=b"one")).missing == ()
    assert {path.name for path in kept.parent.iterdir()} == {kept.name, "folder"}


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside"])
def test_names_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    store(tmp_path / "run-1", b"one")
    wanted = json.dumps({name: {"sha256": sha256(b"one").hexdigest(), "executable": False}})
    with pytest.raises(RequestError, match="is not taken"):
        place_code(tmp_path / "run-1", wanted)


def test_a_runs_files_arrive_with_its_code(tmp_path: Path) -> None:
    store(tmp_path / "run-1", b"one")
    files = {"launch.sh": b"exec true", "code.json": index(run=b"one").encode(), "supervision.json": b"{}"}
    packed = b"".join((*(archive_member(*file) for file in files.items()), ARCHIVE_END))
    assert place_run(tmp_path / "run-1", io.BytesIO(packed)).missing == ()
    assert {name: (tmp_path / "run-1" / name).read_bytes() for name in files} == files
    assert (tmp_path / "run-1" / "code" / "run").read_bytes() == b"one"


@pytest.mark.parametrize("at", [0, 100, tarfile.BLOCKSIZE + 2, 2 * tarfile.BLOCKSIZE, 3 * tarfile.BLOCKSIZE + 2])
def test_a_part_of_a_runs_files_is_no_run(tmp_path: Path, at: int) -> None:
    """An archive that is cut between two files reads like a whole one."""
    packed = archive_member("code.json", index(run=b"one").encode()) + archive_member("supervision.json", b"{}")
    with pytest.raises(EOFError, match=r"^only part of the files for .*/run-1 arrived$"):
        place_run(tmp_path / "run-1", io.BytesIO(packed[:at]))
