"""Which files of a folder are the code of a run, and how they travel."""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tridock.errors import RequestError
from tridock.ops.runs import code
from tridock.ops.runs.code import code_of_run, place_code, read_code

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


def test_a_folders_git_runs_none_of_its_programs(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="one\n", DOTgitattributes="*.py diff=mine\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "train.py").write_text("two\n")
    program = tmp_path.parent / f"{tmp_path.name}-program"
    program.write_text('#!/bin/sh\necho "$@" >>"$0.ran"; cat "$1"\n')
    program.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.mine.textconv", "diff.mine.command"):
        git(tmp_path, "config", name, str(program))
    found = read_code(tmp_path)
    assert found.diff is not None
    assert b"-one\n+two\n" in found.diff
    assert not Path(f"{program}.ran").exists()


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


def test_odd_names_and_lines_arrive_as_they_are(tmp_path: Path) -> None:
    (tmp_path / " first").write_bytes(b"a\r\nb\r\n")
    (tmp_path / "second").touch()
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "x")
    (tmp_path / " first").write_bytes(b"a\r\nc\r\n")
    found = read_code(tmp_path)
    assert set(found.files) == {" first", "second"}
    assert b"-b\r\n+c\r\n" in (found.diff or b"")
    git(tmp_path, "checkout", "--quiet", ".")
    (tmp_path / "code.diff").write_bytes(found.diff or b"")
    git(tmp_path, "apply", "code.diff")
    assert (tmp_path / " first").read_bytes() == b"a\r\nc\r\n"


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
    found = read_code(tmp_path)
    contents = {found.files["a"].sha256: 1500, found.files["b"].sha256: 0}
    assert archived(found, contents) == contents
    assert archived(found, [found.files["b"].sha256, "of-no-file"]) == {found.files["b"].sha256: 0}
    index = json.loads(found.index)
    assert set(index) == {"a", "b"}
    assert set(index["a"]) == {"sha256", "executable"}


def test_nothing_travels_that_was_not_read(tmp_path: Path, write: Write) -> None:
    write(code__a="1", code__b="2", key="secret")
    found = read_code(tmp_path / "code")
    (tmp_path / "code/a").unlink()
    (tmp_path / "code/a").symlink_to("../key")
    (tmp_path / "code/b").write_text("3")
    assert archived(found, [it.sha256 for it in found.files.values()]) == {}


def refused(folder: Path) -> list[str]:
    with pytest.raises(RequestError) as refusal:
        read_code(folder)
    return str(refusal.value).splitlines()


@pytest.mark.parametrize("repository", [False, True])
def test_links_out_of_the_folder_are_refused_by_name(tmp_path: Path, write: Write, repository: bool) -> None:
    """However they lead out, whatever they lead to, committed or not; a link that stays inside is followed."""
    write(key="secret", other__a="1", code__trainDOTpy="1", code__pkg__aDOTpy="2")
    folder = tmp_path / "code"
    inside = {"same.py": "train.py", "pkg/up.py": "../same.py"}
    left_out = {"to_folder": "pkg", "dangling": "nowhere", "loop": "loop", "runs": "../other"}
    out = {
        "absolute": (f"{tmp_path}/key", tmp_path / "key"),
        "chain": ("pkg/relative", tmp_path / "key"),
        "folder": ("../other", tmp_path / "other"),
        "gone": ("../nowhere", tmp_path / "nowhere"),
        "pkg/relative": ("../../key", tmp_path / "key"),
    }
    for name, target in {**inside, **left_out, **{name: target for name, (target, _) in out.items()}}.items():
        (folder / name).symlink_to(target)
    if repository:
        git(folder, "init", "-q")
        git(folder, "add", "train.py", "absolute", "folder")
        git(folder, "commit", "-qm", "a")
    todo = f"copy there what it leads to, or name it in {folder}/.tridockignore; data go with tridock data sync"
    assert refused(folder) == [
        f"{folder}/{name}: leads out of the folder's code by a link; got {target}; {todo}"
        for name, (_, target) in out.items()
    ]
    (folder / ".tridockignore").write_text("/absolute\nchain\nfolder/\ngone\n/pkg/relative\n")
    expected = {".tridockignore", "train.py", "pkg/a.py", *inside, "to_folder/a.py"} - {"to_folder"}
    assert set(read_code(folder).files) == expected


def test_a_tracked_file_behind_a_link_to_a_folder_is_not_followed(tmp_path: Path, write: Write) -> None:
    write(other__a="secret", code__sub__a="1", code__trainDOTpy="1")
    folder = tmp_path / "code"
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "a")
    shutil.rmtree(folder / "sub")
    (folder / "sub").symlink_to("../other")
    todo = f"copy there what it leads to, or name it in {folder}/.tridockignore; data go with tridock data sync"
    assert refused(folder) == [
        f"{folder}/sub: leads out of the folder's code by a link; got {tmp_path}/other; {todo}",
        f"{folder}/sub/a: leads out of the folder's code by a link; got {tmp_path}/other/a; {todo}",
    ]


def test_what_is_no_file_and_what_other_repositories_have_is_not_sent(tmp_path: Path, write: Write) -> None:
    write(key="1", code__trainDOTpy="1", code__nested__aDOTpy="2", module__bDOTpy="3")
    folder = tmp_path / "code"
    for inner in (tmp_path / "module", folder / "nested"):
        git(inner, "init", "-q")
        (inner / "link").symlink_to(tmp_path / "key")
        git(inner, "add", ".")
        git(inner, "commit", "-qm", "a")
    os.mkfifo(folder / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "socket"))
    os.link(tmp_path / "key", folder / "hard_link")
    git(folder, "init", "-q")
    git(folder, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "module"), "module")
    code = read_code(folder)
    assert set(code.files) == {".gitmodules", "hard_link", "train.py"}
    own = "a repository of its own"
    assert sorted(code.left_out) == [f"module/ ({own})", f"nested/ ({own})"]


@pytest.mark.parametrize("repository", [False, True])
def test_a_link_to_a_folder_stands_for_its_files(tmp_path: Path, write: Write, repository: bool) -> None:
    write(code__configs__v2__aDOTyaml="1", code__pkg__bDOTpy="2")
    folder = tmp_path / "code"
    (folder / "pkg" / "current").symlink_to("../configs/v2")
    (folder / "pkg" / "around").symlink_to("..")
    os.mkfifo(folder / "pipe")
    if repository:
        git(folder, "init", "-q")
    code = read_code(folder)
    assert set(code.files) == {"configs/v2/a.yaml", "pkg/b.py", "pkg/current/a.yaml"}
    assert code.left_out == (() if repository else ("pipe (no file)",))  # git knows no pipes
    (folder / ".tridockignore").write_text("/configs/v2/a.yaml\n")
    assert set(read_code(folder).files) == {".tridockignore", "pkg/b.py"}


@pytest.mark.parametrize("repository", [False, True])
def test_an_empty_folder_arrives_unless_it_is_left_out(tmp_path: Path, write: Write, repository: bool) -> None:
    write(code__trainDOTpy="1", code__new__xDOTpt="2", code__nested__aDOTpy="3", code__DOTtridockignore="skip/\n")
    folder, sent = tmp_path / "code", {"out/", "new/deep/er/", "link/"}
    for name in ("out", "new/deep/er", "skip", "new/skip", ".venv/lib", "pkg/__pycache__", "nested/empty", "ignored"):
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to("out")
    git(folder / "nested", "init", "-q")
    if repository:
        git(folder, "init", "-q")
        (folder / ".gitignore").write_text("ignored/\n*.pt\n")
        git(folder, "add", "train.py")
    code, others = read_code(folder), set() if repository else {"ignored/", "nested/empty/"}
    assert {name for name in code.files if name.endswith("/")} == sent | others
    assert code.number == f"{len(code.files) - len(sent | others)} files"
    place_code(code, run := tmp_path / "runs" / "a-20260101-000000-0a1b")
    (run / "code.json").write_text(code.index)
    (run / "manifest.json").write_text(json.dumps({"code": code.origin}))
    place_code(code_of_run(run), again := tmp_path / "again" / "a-20260101-000000-0a1b")
    for it in (run, again):
        made = {f"{path.relative_to(it / 'code')}/" for path in (it / "code").rglob("*") if path.is_dir()}
        assert {name for name in made if not any((it / "code" / name).iterdir())} == sent | others


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("1")
    todo = f"rename it, or name it in {tmp_path}/.tridockignore with a ? for each such byte"
    assert refused(tmp_path) == [rf"{tmp_path}: has a file whose name is not UTF-8; got caf\xe9.txt; {todo}"]
    (tmp_path / ".tridockignore").write_text("caf?.txt\n")
    assert set(read_code(tmp_path).files) == {".tridockignore"}
    (tmp_path / ".tridockignore").write_bytes(b"caf\xe9.txt\n")
    assert set(read_code(tmp_path).files) == {".tridockignore"}


@pytest.mark.parametrize("repository", [True, False])
def test_a_name_of_two_lines_arrives(tmp_path: Path, repository: bool) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "new\nline").write_text("1")
    if repository:
        git(folder, "init", "-q")
    place_code(read_code(folder), run := tmp_path / "runs" / "a-20260101-000000-0a1b")
    assert [path.name for path in (run / "code").iterdir()] == ["new\nline"]


@pytest.mark.parametrize(("replaced", "target"), [("sub/a", "../../key"), ("sub", "../other")])
def test_a_link_that_comes_between_check_and_reading_is_not_followed(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, replaced: str, target: str
) -> None:
    write(key="secret", other__a="secret", code__sub__a="2")
    folder, really = tmp_path / "code", os.open
    assert set(read_code(folder).files) == {"sub/a"}

    def replace_and_open(path: str, flags: int) -> int:
        (folder / replaced).rename(tmp_path / "away")
        (folder / replaced).symlink_to(target)
        return really(path, flags)

    monkeypatch.setattr(os, "open", replace_and_open)
    with pytest.raises(RequestError, match=f"^{folder}/sub/a: cannot be read; got Too many levels of symbolic links"):
        read_code(folder)


KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn\n"
SECRETS = {
    **dict.fromkeys((".env", ".env.local", "a/id_ed25519", "b/SERVER.PEM", "c/.aws/config", ".netrc"), "its name"),
    "notes.txt": "a private key in it",
    "z/credentials.json": "its name",
}


@pytest.mark.parametrize("repository", [False, True])
def test_secrets_that_git_does_not_know_are_named(tmp_path: Path, repository: bool) -> None:
    others = ("train.py", ".env.example", "id_ed25519.pub", "monkey.py", "keys/a.txt")
    for name in (*SECRETS, *others):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"# notes\n{KEY}" if name == "notes.txt" else "1")
    if repository:
        git(tmp_path, "init", "-q")
    own = f"{tmp_path}/.tridockignore"
    assert refused(tmp_path) == [
        f"{tmp_path}/{name}: looks like a secret, and git does not know it; got {why}; "
        f"name it in {own}, or, to send it to every node, name it there as !/{name}"
        for name, why in sorted(SECRETS.items())
    ]
    (tmp_path / ".tridockignore").write_text("!/.env\n!/notes.txt\n.env.local\n*.[pP][eE][mM]\n/[acz]/\n.netrc\n")
    sent = {*others, ".tridockignore", ".env", "notes.txt"}
    assert set(read_code(tmp_path).files) == sent
    if repository:
        git(tmp_path, "add", "-f", *SECRETS)
        (tmp_path / ".tridockignore").unlink()
        assert set(read_code(tmp_path).files) == {*SECRETS, *others}


def test_a_committed_link_shows_no_secret_that_git_ignores(tmp_path: Path, write: Write) -> None:
    write(DOTenv="1", DOTgitignore=".env\n", DOTtridock__mine__DOTkeysDOTjson=KEY, trainDOTpy="1")
    for name, target in {"keys.py": ".tridock/mine/.keys.json", "settings.py": ".env", "same.py": "train.py"}.items():
        (tmp_path / name).symlink_to(target)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-f", ".gitignore", "train.py", "keys.py", "settings.py", "same.py")
    git(tmp_path, "commit", "-qm", "a")
    (shown,) = refused(tmp_path)
    assert shown.startswith(f"{tmp_path}/keys.py: leads out of the folder's code by a link; got {tmp_path}/.tridock/")
    (tmp_path / ".tridockignore").write_text("keys.py\n")
    (shown,) = refused(tmp_path)
    assert shown.startswith(f"{tmp_path}/settings.py: looks like a secret, and git does not know it; got its name; ")


def test_the_keys_of_a_cluster_are_never_sent(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="1", DOTtridock__mine__DOTkeysDOTjson=KEY)
    assert set(read_code(tmp_path).files) == {"train.py"}


def test_a_repository_that_git_cannot_read_is_not_sent_with_what_it_ignores(tmp_path: Path, write: Write) -> None:
    write(sub__trainDOTpy="1", DOTgit__HEAD="nonsense")
    assert refused(tmp_path / "sub") == [
        f"{tmp_path}/sub: is in a git repository that git does not read; "
        "correct what git status says there: Tridock would send what git ignores"
    ]


def test_the_changes_of_files_that_are_not_sent_do_not_travel_either(tmp_path: Path, write: Write) -> None:
    write(code__trainDOTpy="one\n", code__siteDOTyaml="user: me\n", code__goneDOTpy="old\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    write(code__trainDOTpy="two\n", code__siteDOTyaml="password: 1\n", code__DOTtridockignore="site.yaml\n")
    (tmp_path / "code/gone.py").unlink()
    found = read_code(tmp_path / "code").diff or b""
    assert b"+two" in found
    assert b"-old" in found
    assert b"password" not in found


def archived(found: code.Code, contents: Iterable[str]) -> dict[str, int]:
    packed = b"".join(code.archive_of(found, contents))
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r|") as archive:
        return {member.name: member.size for member in archive}


def test_a_log_that_grows_travels_as_it_was_read(tmp_path: Path, write: Write) -> None:
    write(trainDOTpy="1", outDOTlog="one\n", otherDOTpy="2")
    found = read_code(tmp_path)
    with (tmp_path / "out.log").open("a") as log:
        log.write("two\n")
    (tmp_path / "other.py").write_text("3")
    wanted = {name: it.sha256 for name, it in found.files.items()}
    assert archived(found, wanted.values()) == {wanted["train.py"]: 1, wanted["out.log"]: 4}
    assert str(found.not_whole([wanted["other.py"]], ", on b")) == (
        f"{tmp_path}: has files that changed after they were read, on b; got other.py; "
        f"start it again, or name what changes by itself in {tmp_path}/.tridockignore"
    )
