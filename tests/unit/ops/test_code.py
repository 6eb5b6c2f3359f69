"""Which files of a folder are the code of a run, and how they travel."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.ops.runs import code
from tridock.ops.runs.code import code_of_run, read_code

Write = Callable[..., None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_files(**files: str) -> None:
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write_files


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)


def test_a_plain_folder_is_sent_whole_without_caches_and_runs(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="1", pkg__aDOTpy="2", pkg____pycache____aDOTpyc="3", DOTvenv__x="4", runs__old__log="5")
    (tmp_path / "pkg/__pycache__").mkdir()
    (tmp_path / "pkg/__pycache__/a.pyc").write_text("3")
    (tmp_path / "pkg/runs").mkdir()
    (tmp_path / "pkg/runs/kept.py").write_text("6")
    assert {name for name in read_code(tmp_path).files if "pyc" not in name} == {
        "train.py", "pkg/a.py", "pkg/runs/kept.py"
    }  # fmt: skip
    assert "pkg/__pycache__/a.pyc" not in read_code(tmp_path).files


def test_the_ignore_file_has_gitignores_syntax(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="1", data__aDOTbin="2", data__keepDOTbin="3", xDOTpt="4")
    (tmp_path / ".tridockignore").write_text("# data\ndata/*\n!data/keep.bin\n*.pt\n")
    assert set(read_code(tmp_path).files) == {".tridockignore", "train.py", "data/keep.bin"}


def test_a_git_repository_sends_what_git_does_not_ignore(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="one\n", newDOTpy="2", bigDOTbin="3", goneDOTpy="4")
    (tmp_path / ".gitignore").write_text("*.bin\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "train.py", "gone.py", ".gitignore")
    git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "gone.py").unlink()
    (tmp_path / "train.py").write_text("two\n")
    found = read_code(tmp_path)
    assert set(found.files) == {".gitignore", "train.py", "new.py"}
    about = found.origin
    assert isinstance(about, dict)
    assert (about["git_dirty"], about["files"], len(about["git_commit"])) == (True, 3, 40)
    assert b"-one\n+two\n" in (found.diff or b"")
    git(tmp_path, "commit", "-qam", "b")
    assert read_code(tmp_path).diff is None


def test_the_digest_is_that_of_names_contents_and_nothing_else(tmp_path: Path, write: Write) -> None:
    write(a="1", b="2")
    first = read_code(tmp_path).origin["sha256"]
    (tmp_path / "a").touch()
    assert read_code(tmp_path).origin["sha256"] == first
    (tmp_path / "a").rename(tmp_path / "c")
    assert read_code(tmp_path).origin["sha256"] != first


def test_what_is_no_code_is_refused(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="is not a folder with code"):
        read_code(tmp_path / "nowhere")
    write(small="1", large="x" * 2000)
    monkeypatch.setattr(code, "_MOST_BYTES", 1000)
    with pytest.raises(RequestError) as refusal:
        read_code(tmp_path)
    assert str(refusal.value).endswith(
        f"got 0.0 GB; the largest files are large, small; name what is no code in {tmp_path}/.tridockignore, and copy"
        " data with tridock data sync"
    )


def test_the_archive_is_one_that_tar_reads(tmp_path: Path, write: Write) -> None:
    write(a="x" * 1500, b="")
    packed = b"".join(code.archive_of({name: tmp_path / name for name in ("a", "b")}))
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r|") as archive:
        assert [(member.name, member.size) for member in archive] == [("a", 1500), ("b", 0)]
    index = json.loads(read_code(tmp_path).index)
    assert set(index) == {"a", "b"}
    assert set(index["a"]) == {"sha256", "executable"}


def test_a_run_remembers_the_code_with_which_it_began(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("as it was")
    first = read_code(tmp_path / "code")
    (tmp_path / "code.json").write_text(first.index)
    (tmp_path / "code.diff").write_text("+1\n")
    (tmp_path / "manifest.json").write_text(json.dumps({"code": dict(first.origin)}))
    (tmp_path / "code" / "train.py").write_text("what the program made of it")
    (tmp_path / "code" / "model.pt").write_text("a result")
    again = code_of_run(tmp_path)
    assert (again.files, again.origin, again.diff) == (first.files, first.origin, b"+1\n")


def test_a_run_that_does_not_know_its_code(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="fetch the run's folder whole"):
        code_of_run(tmp_path)


def test_a_program_of_the_image_may_have_no_code(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    none = read_code(tmp_path / "empty")
    (tmp_path / "manifest.json").write_text(json.dumps({"code": dict(none.origin)}))
    (tmp_path / "code.json").write_text(none.index)
    assert code_of_run(tmp_path).files == {}
    (tmp_path / "code.json").unlink()
    (tmp_path / "manifest.json").write_text(json.dumps({"code": {"files": 2}}))
    with pytest.raises(RequestError, match="fetch the run's folder whole"):
        code_of_run(tmp_path)
