"""The keys on the operator's disk: made once, repaired, rotated, private."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.ops.conftest import Lab, Unlocked
from tridock.cluster.keys import NODE_FILES
from tridock.cluster.settings import load_cluster
from tridock.cluster.transports import Transport
from tridock.command import Command
from tridock.errors import ClusterError, RequestError
from tridock.ops.hosts import facts as host_facts
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import Container, HostState, keys_digest
from tridock.ops.hosts.keys import KeyStore, distribute_keys
from tridock.remote import Host


def store(folder: Path, hosts: str = "a slots=1\nb slots=1\n", transport: str = "compose") -> KeyStore:
    (folder / "lab").write_text(hosts)
    (folder / "lab.yaml").write_text(f"transport: {transport}\n")
    return KeyStore(load_cluster(folder / "lab", project_folder=folder))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mode & 0o7777, path.read_bytes() if path.is_file() else b"")
        for path in sorted(folder.rglob("*"))
    }


def test_the_layout_and_its_modes(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.ensure()
    assert made.folder == tmp_path / ".tridock" / "lab"
    assert {name: mode for name, (mode, _) in contents(tmp_path / ".tridock").items()} == {
        ".gitignore": 0o600,
        "lab": 0o700,
        "lab/.keys.json": 0o600,
        "lab/.lock": 0o600,
        **{f"lab/{node}": 0o700 for node in "ab"},
        **{f"lab/{node}/{name}": 0o600 for node in "ab" for name in NODE_FILES},
    }
    assert (tmp_path / ".tridock").stat().st_mode & 0o7777 == 0o700
    assert (tmp_path / ".tridock" / ".gitignore").read_text() == "*\n"
    for node in "ab":
        assert made.node_files(node) == {name: (made.node_folder(node) / name).read_bytes() for name in NODE_FILES}


def test_a_host_that_is_new_in_the_hostfile_has_no_key_on_file(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.ensure()
    more = store(tmp_path, "a slots=1\nb slots=1\nc slots=1\n")
    found = more.on_file("abc")
    assert {node: files["known_hosts"] for node, files in found.items()} == dict.fromkeys(
        "ab", made.node_files("a")["known_hosts"]
    )


def test_nodes_on_other_hosts_leave_no_copies_of_their_keys_here(tmp_path: Path) -> None:
    store(tmp_path).ensure()
    (tmp_path / ".tridock/lab/b/mine.txt").touch()
    made = store(tmp_path, transport="ssh")
    made.ensure()
    assert set(contents(tmp_path / ".tridock/lab")) == {".keys.json", ".lock", "b", "b/mine.txt"}
    assert set(made.node_files("a")) == set(NODE_FILES)


ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="nobody else writes into folders of mode 0")


@pytest.mark.parametrize("umask", [0o000, 0o077, pytest.param(0o777, marks=ROOT_ALONE)])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store(tmp_path).ensure()
    finally:
        os.umask(before)
    assert (tmp_path / ".tridock/lab/a/id_ed25519").stat().st_mode & 0o7777 == 0o600


def test_ensuring_again_changes_nothing(tmp_path: Path) -> None:
    store(tmp_path).ensure()
    before = contents(tmp_path)
    inodes = {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.name != "lab"}
    store(tmp_path).ensure()
    assert contents(tmp_path) == before
    assert {path: path.stat().st_ino for path in inodes} == inodes


def test_the_first_use_makes_them(tmp_path: Path) -> None:
    first = store(tmp_path)
    fingerprint, of_a = first.fingerprint(), first.fingerprint("a")
    assert fingerprint.startswith("SHA256:")
    assert of_a != fingerprint
    again = store(tmp_path)
    assert (again.fingerprint(), again.fingerprint("a")) == (fingerprint, of_a)


def test_rotation_replaces_every_key(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.ensure()
    before = contents(tmp_path)
    kept.rotate()
    assert kept.is_rotating  # until every host has them
    kept.end_rotation()
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {
        "/".join((".tridock/lab", rest))
        for rest in (".keys.json", *(f"{n}/{name}" for n in "ab" for name in NODE_FILES if name != "ssh_config"))
    }
    assert store(tmp_path).fingerprint() == kept.fingerprint()


def test_wrong_modes_are_mended(tmp_path: Path) -> None:
    store(tmp_path).ensure()
    before = contents(tmp_path)
    for path in [tmp_path / ".tridock", *(tmp_path / ".tridock").rglob("*")]:
        if path.name != ".keys.json":
            path.chmod(0o777)
    store(tmp_path).ensure()
    assert contents(tmp_path) == before


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    store(tmp_path).ensure()
    keys = tmp_path / ".tridock/lab/.keys.json"
    keys.chmod(0o644)
    with pytest.raises(RequestError) as caught:
        store(tmp_path).ensure()
    assert str(caught.value) == (
        f"{keys}: can be read by other users; got mode 644; make new keys: tridock keys --rotate; "
        f"to keep these: chmod 600 {keys}"
    )
    store(tmp_path).rotate()
    store(tmp_path).ensure()


def test_what_is_missing_or_damaged_in_a_nodes_folder_is_written_again(tmp_path: Path) -> None:
    store(tmp_path).ensure()
    before = contents(tmp_path)
    folder = tmp_path / ".tridock/lab/a"
    (folder / "known_hosts").unlink()
    (folder / "id_ed25519").write_bytes(b"half of i")
    (folder / "authorized_keys").unlink()
    for path in (tmp_path / ".tridock/lab/b").iterdir():
        path.unlink()
    (tmp_path / ".tridock/lab/b").rmdir()
    store(tmp_path).ensure()
    assert contents(tmp_path) == before


def test_an_interrupted_rotation_is_finished_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(tmp_path).ensure()
    old = store(tmp_path).fingerprint()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    rotating = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("tridock.ops.hosts.keys.node_files", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rotating.rotate()
    repaired = store(tmp_path)
    assert repaired.fingerprint() != old
    for node in "ab":
        assert repaired.node_files(node) == {
            name: (repaired.node_folder(node) / name).read_bytes() for name in NODE_FILES
        }


def test_a_new_node_gets_a_key_and_one_that_left_loses_its_folder(tmp_path: Path) -> None:
    first = store(tmp_path, "a slots=1\nb slots=1\n")
    client, of_b = first.fingerprint(), first.fingerprint("b")
    (first.node_folder("a") / "mine.txt").touch()
    changed = store(tmp_path, "b slots=1\nc slots=1\n")
    changed.ensure()
    assert (changed.fingerprint(), changed.fingerprint("b")) == (client, of_b)
    assert changed.fingerprint("c").startswith("SHA256:")
    assert b"a,[a]" not in changed.node_files("b")["known_hosts"]
    # Ours goes, what somebody else put there stays.
    assert [path.name for path in first.node_folder("a").iterdir()] == ["mine.txt"]
    store(tmp_path, "b slots=1\n").ensure()
    assert not changed.node_folder("c").exists()


def ensure_in(folder: str) -> str:
    return KeyStore(load_cluster(Path(folder) / "lab", project_folder=Path(folder))).fingerprint()


def test_two_commands_at_once_agree(tmp_path: Path) -> None:
    store(tmp_path)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert len(set(pool.map(ensure_in, [str(tmp_path)] * 8))) == 1


def test_keys_that_another_command_holds_say_who_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store(tmp_path)
    kept.ensure()
    monkeypatch.setattr("tridock.ops.hosts.keys.LOCK_S", 0.2)
    with (kept.folder / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        assert message(store(tmp_path)) == (
            f"{kept.folder}/.lock: is locked for more than 0.2 s; got {holder}; end that command, or see whether the "
            "folder's file server hangs, then try again"
        )
    store(tmp_path).ensure()


def message(kept: KeyStore) -> str:
    with pytest.raises(RequestError) as caught:
        kept.ensure()
    return str(caught.value)


def test_damaged_keys_are_never_replaced_in_silence(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.ensure()
    path = kept.folder / ".keys.json"
    path.write_text("{}")
    todo = "restore it from a copy, or make new keys: tridock keys --rotate"
    assert message(store(tmp_path)) == f"{path}: does not hold a cluster's keys; got KeyError: 'hosts'; {todo}"
    again = store(tmp_path)
    again.rotate()
    again.ensure()


def test_a_place_that_cannot_hold_them(tmp_path: Path) -> None:
    (tmp_path / ".tridock").write_text("a file")
    todo = f"make {tmp_path / '.tridock'} and everything in it writable for you, and free space on its disk"
    assert message(store(tmp_path)) == (
        f"{tmp_path / '.tridock'}: the cluster's keys cannot be stored here; got File exists; {todo}"
    )


def test_nothing_shows_a_private_key(tmp_path: Path) -> None:
    kept = store(tmp_path)
    kept.ensure()
    assert "PRIVATE" not in repr(kept) + str(vars(kept))


@pytest.mark.parametrize("reads", [True, False])
def test_a_host_whose_sshd_has_not_read_its_keys_gets_them_again(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    read_state, keys = host_facts.read_state, {"node-1": "others"}
    container = Container("1", "sha256:1", running=True, recipe=None, exit_code=0, health="healthy")

    def up(transport: Transport, node: str, host: Host) -> HostState:
        return replace(read_state(transport, node, host), container=container, keys=keys.get(node))

    monkeypatch.setattr(host_facts, "read_state", up)
    client = NodeClient.of(lab.hosts)
    monkeypatch.setattr(client, "inside", lambda *_: Command.of("true" if reads else "false"))
    folder = lab.project.parent / "node-1" / "tridock" / "lab" / "secrets" / "node-1"
    if reads:
        written = distribute_keys(client, Unlocked(lab.hosts))
        assert {it.name: it.read_bytes() for it in folder.iterdir()} == written.node_files("node-1")
        return
    with pytest.raises(ClusterError, match=r"node-1: `write into .*` failed"):
        distribute_keys(client, Unlocked(lab.hosts))
    found = {it.name: it.read_bytes() for it in folder.iterdir()}
    assert keys_digest(found) != keys_digest(KeyStore(lab.hosts.cluster).node_files("node-1"))


def test_a_host_with_the_right_keys_is_left_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    read_state, store = host_facts.read_state, KeyStore(lab.hosts.cluster)

    def right(transport: Transport, node: str, host: Host) -> HostState:
        keys = keys_digest(store.node_files(node)) if node == "node-1" else "others"
        return replace(read_state(transport, node, host), keys=keys)

    monkeypatch.setattr(host_facts, "read_state", right)
    lab.up.clear()  # no sshd reads them again
    distribute_keys(NodeClient.of(lab.hosts), Unlocked(lab.hosts))
    home = lab.project.parent
    assert [(home / node / "tridock/lab/secrets").exists() for node in lab.hosts] == [False, True]
