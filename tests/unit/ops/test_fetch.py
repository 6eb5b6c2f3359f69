"""Bringing a run home where it is at home already; the rest needs hosts (tests/integration/test_fab_over_ssh.py)."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest

from tests.unit.ops.conftest import Lab
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import HostFacts
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.codec import encode
from tridock.contracts.node_answers import RunInfo
from tridock.contracts.run_state import RunState
from tridock.errors import ClusterError, RequestError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import HostState
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.archives import unpack
from tridock.ops.runs.cluster_runs import Run, choose_run
from tridock.ops.runs.fetch import _PACK_FILES, fetch
from tridock.remote import Completed


def test_the_twins_own_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacked over itself, a log that a rank writes would lose what comes after."""
    (tmp_path / "twin").write_text("node-1 slots=1\n")
    (tmp_path / "twin.yaml").write_text("transport: compose\n")
    states = {"node-1": HostState(HostFacts(1000, 1000, "/home/ada", 0, False), "28.1", None, None)}
    client = NodeClient(Hosts(load_cluster(tmp_path / "twin", project_folder=tmp_path)), states)
    log = tmp_path / "runs" / "a" / "log"
    log.parent.mkdir(parents=True)
    log.write_text("so far\n")
    monkeypatch.chdir(tmp_path)
    assert fetch(client, Run("a", "node-1"), Path("runs"), checkpoints=True) == Path("runs/a")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    assert log.read_text() == "so far\n"


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", content: bytes = b"pwned") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, len(content) if kind == tarfile.REGTYPE else 0
    return made


RUN = "demo-20261122-110613-14b7"


def past_the_longest_path(runs: Path) -> list[tarfile.TarInfo]:
    """A link whose real path is longer than PATH_MAX, which Python's ``data`` filter takes for one that stays below."""
    deepest = 4090 - len(f"{runs}/.fetch.12345678/node-1.part/{RUN}")
    steps, part, path, made = "abcdefghijklmnop"[: deepest // 248], "d" * 247, RUN, []
    for step in steps:
        made += [member(f"{path}/{part}", tarfile.DIRTYPE), member(f"{path}/{step}", tarfile.SYMTYPE, part)]
        path = f"{path}/{part}"
    last = "/".join(steps) + "/" + "l" * 254
    made.append(member(f"{RUN}/{last}", tarfile.SYMTYPE, "../" * len(steps)))
    made.append(member(f"{RUN}/out", tarfile.SYMTYPE, f"{last}/../../../.."))
    return [*made, member(f"{RUN}/out/outside")]


HOSTILE = {
    "the folder above": [member("../outside")],
    "an absolute name": [member("{outside}")],
    "a way up within": [member(f"{RUN}/../../outside")],
    "through a link to above": [member(f"{RUN}/l", tarfile.SYMTYPE, ".."), member(f"{RUN}/l/../outside")],
    "through a link away": [member(f"{RUN}/l", tarfile.SYMTYPE, "{folder}"), member(f"{RUN}/l/outside")],
    "a hard link away": [member(f"{RUN}/l", tarfile.LNKTYPE, "../outside")],
    "a hard link to an absolute name": [member(f"{RUN}/l", tarfile.LNKTYPE, "{outside}")],
    "a link that leads up": [member(f"{RUN}/l", tarfile.SYMTYPE, "../../outside")],
    "a path longer than the longest": [],
    "another run": [member("other-20261122-110613-14b7/outside")],
    "a file where a folder is": [member(f"{RUN}/a"), member(f"{RUN}/a/b")],
    "a device": [member(f"{RUN}/d", tarfile.CHRTYPE)],
    "a pipe": [member(f"{RUN}/p", tarfile.FIFOTYPE)],
}


@pytest.fixture
def workspace(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The workspace of the only node that is up; its commands run here."""
    own = lab.workspace("node-1")

    def inside(_: str, *argv: str, **__: object) -> Command:
        return Command(tuple(it.replace(run_folder.WORKSPACE, str(own)) for it in argv))

    monkeypatch.setattr(lab.client, "inside", inside)
    monkeypatch.setattr(lab.client, "running", lambda: ("node-1",))
    (own / "runs" / RUN).mkdir(parents=True)
    return own


def everything(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return {str(path.relative_to(folder)): "link" if path.is_symlink() else path.read_text("latin-1") for path in paths}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_writes_nothing_outside_of_its_folder(
    lab: Lab, workspace: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, runs, archive = lab.write("outside", b"mine"), lab.project / "runs", tmp_path / "a.tar.gz"
    with tarfile.open(archive, "w:gz") as made:
        for entry in HOSTILE[name] or past_the_longest_path(runs):
            places = {"outside": outside, "folder": lab.project}
            given = tarfile.TarInfo(entry.name.format(**places))
            given.type, given.size, given.linkname = entry.type, entry.size, entry.linkname.format(**places)
            made.addfile(given, io.BytesIO(b"pwned"))
    before = everything(tmp_path)
    monkeypatch.setattr(lab.client, "inside", lambda *_, **__: Command.of("cat", str(archive)))
    with suppress(ClusterError):
        fetch(lab.client, Run(RUN, "node-1"), runs)
    assert {path: text for path, text in everything(tmp_path).items() if f"runs/{RUN}/" not in path} == before
    assert [path.name for path in runs.iterdir()] in ([], [RUN])
    for path in runs.rglob("*"):
        assert not path.is_symlink()
        assert path.is_dir() or path.is_file()


def test_an_archive_that_leads_away_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as made:
        made.addfile(member("../outside"), io.BytesIO(b"pwned"))
    with pytest.raises(ClusterError) as caught:
        list(unpack("gpu-1", tmp_path / "a.tar.gz", tmp_path / "runs"))
    assert str(caught.value) == (
        "gpu-1: sent an archive that cannot be unpacked; got ../outside: is not taken; send plain files, by names below"
        " the folder; remove what it names from the run's folder there, or try again"
    )


def test_pipes_of_flight_recorders_are_not_fetched(
    lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor named: a rank that was killed on its own leaves one."""
    run = workspace / "runs" / RUN
    (run / ".heartbeat").mkdir(parents=True)
    os.mkfifo(run / ".heartbeat" / "flight-0.pipe")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert "not fetched" not in capsys.readouterr().err
    assert list((lab.project / "runs" / RUN / ".heartbeat").iterdir()) == []


def test_links_of_earlier_fetches_are_not_followed(
    lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder changes between three fetches: each archive alone stays below it."""
    run, here = workspace / "runs" / RUN, lab.project / "runs" / RUN
    (run / "log").write_text("1")
    (run / "p").symlink_to(".")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    (run / "p").unlink()
    (run / "p" / "z").mkdir(parents=True)
    (run / "p" / "z" / "up").symlink_to("../../..")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    (run / "z" / "up").mkdir(parents=True)
    (run / "z" / "up" / "evil.py").write_text("pwned")
    fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert everything(lab.project) == {
        "fabfile.py": "", "hostfiles/lab": "node-1 slots=1\nnode-2 slots=1\n",
        f"runs/{RUN}/log": "1", f"runs/{RUN}/z/up/evil.py": "pwned",
    }  # fmt: skip
    note = f"note: not fetched, since they are links, special files or git's own: {RUN}/p"
    assert capsys.readouterr().err.splitlines() == [note, f"{note}/z/up", f"{note}/z/up"]
    # What an earlier version left, or you made.
    (here / "z" / "up" / "evil.py").unlink()
    (here / "z" / "up").rmdir()
    (here / "z" / "up").symlink_to("../../..")
    with pytest.raises(RequestError, match=rf"^runs/{RUN}/z/up: is a link or a file where a folder belongs; remove it"):
        fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert sorted(path.name for path in lab.project.iterdir()) == ["fabfile.py", "hostfiles", "runs"]


def test_what_git_would_obey_is_left_out(lab: Lab, workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's prompt runs git in the folder that you look at, and git the program that a repository names."""
    code, ran = workspace / "runs" / RUN / "code", lab.project / "ran"
    for folder in (code, code / "bare"):
        folder.mkdir()
        subprocess.run(["git", "init", "--quiet", *(["--bare"] if folder != code else []), folder], check=True)
        for monitored in ("core.fsmonitor", "core.worktree"):
            value = f"touch {ran}; false" if monitored == "core.fsmonitor" else "."
            subprocess.run(["git", "-C", folder, "config", monitored, value], check=True)
    (code / "train.py").touch()
    subprocess.run(["git", "-C", code, "config", "--unset", "core.worktree"], check=True)
    subprocess.run(["git", "-C", code, "status"], check=True, capture_output=True)
    assert ran.exists()
    ran.unlink()
    here = fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    for folder in (here / "code", here / "code" / "bare"):
        subprocess.run(["git", "-C", folder, "status"], check=False, capture_output=True)
    assert not ran.exists()
    assert (here / "code" / "train.py").exists()
    assert f"git's own: {RUN}/code/.git, " in capsys.readouterr().err


def test_what_a_run_holds_arrives(lab: Lab, workspace: Path) -> None:
    run = workspace / "runs" / RUN
    (run / "logs").mkdir()
    (run / "empty").mkdir()
    (run / "logs" / "rank-0.log").write_text("a line\n")
    (run / "launch.sh").write_text("exec true\n")
    (run / "launch.sh").chmod(0o755)
    os.utime(run / "launch.sh", (1e9, 1e9))
    os.link(run / "launch.sh", run / "linked.sh")
    here = fetch(lab.client, Run(RUN, "node-1"), Path("runs"))
    assert here == Path("runs", RUN)
    assert {path.name for path in here.iterdir()} == {"logs", "empty", "launch.sh", "linked.sh"}
    assert [(here / name).read_text() for name in ("launch.sh", "linked.sh")] == ["exec true\n"] * 2
    status = (here / "launch.sh").stat()
    assert (status.st_mode & 0o777, status.st_mtime) == (0o755, 1e9)
    assert (here / "logs" / "rank-0.log").stat().st_mode & 0o777 == 0o644


def test_files_of_a_tokenizer_that_are_links_arrive(tmp_path: Path) -> None:
    """As those in the cache of Hugging Face are."""
    here, there = tmp_path / "here", tmp_path / "there"
    (there / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "blob").write_text("{}")
    for name in ("tokenizer.json", "additional_chat_templates/tools.jinja"):
        (there / name).symlink_to(tmp_path / "blob")
    names = ("tokenizer.json", "tokenizer_config.json", "additional_chat_templates")
    packed = subprocess.run(["sh", "-c", _PACK_FILES, "sh", there, *names], check=True, capture_output=True).stdout
    (tmp_path / "archive.tar.gz").write_bytes(packed)
    assert list(unpack("n", tmp_path / "archive.tar.gz", here)) == []
    found = {str(file.relative_to(here)): file.read_text() for file in here.rglob("*") if file.is_file()}
    assert found == {"tokenizer.json": "{}", "additional_chat_templates/tools.jinja": "{}"}


def test_a_run_id_that_leads_elsewhere_moves_nothing(
    lab: Lab, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = lab.write("data/mine", b"mine")
    reported = RunInfo(RUN, RunState.LOST, None, "20261122-110613", None, "demo", (), None, None, None)
    answer = encode([reported]).replace(RUN, "../../../data").encode()
    monkeypatch.setattr(lab.client, "node_verb", lambda *_, **__: Completed(0, answer, b""))
    with pytest.raises(ClusterError) as caught:
        fetch(lab.client, choose_run(lab.client, None, active=False), Path("runs"))
    assert str(caught.value) == (
        "node-1: its answer to runs is refused; got '../../../data' is no run id; do not use this host before you know"
        " why: a node of Tridock's does not answer so"
    )
    assert mine.read_bytes() == b"mine"
    assert not (lab.project / "runs").exists()
