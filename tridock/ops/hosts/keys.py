"""A cluster's keys: kept in ``.tridock/<cluster>/`` (0700, files 0600) and distributed over trusted connections.

``.keys.json`` alone decides: it is replaced in one step. The twin's containers mount folders of their own beside it,
which are written from it, so that the next command repairs what an interrupted one left.
"""

import fcntl
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from tridock.cluster.keys import NODE_FILES, ClusterKeys, node_files
from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RequestError
from tridock.ops.hosts.facts import keys_digest
from tridock.ops.hosts.session import Session
from tridock.remote import Host
from tridock.remote.files import put_texts_command
from tridock.remote.host import FILES_TIMEOUT_S

_KEYS: Final = ".keys.json"
_LOCK: Final = ".lock"
_UNREAD: Final = "unread"
_FOLDER_MODE: Final = 0o700
_FILE_MODE: Final = 0o600


class KeyStore:
    """The keys of one cluster, created on first use."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.folder = cluster.state_folder
        self._mounted = () if transport_of(cluster).separate_hosts else cluster.nodes
        self._keys: ClusterKeys | None = None
        self._files_of: Callable[[str], dict[str, bytes]] | None = None

    def on_file(self, nodes: Iterable[str]) -> dict[str, dict[str, bytes]]:
        """As :meth:`node_files` of each node, but creates and repairs nothing: without nodes that have no keys yet."""
        keys = self._read()
        if keys is None:
            return {}
        files_of = node_files(self._cluster, keys)
        return {it: files_of(it) for it in nodes if it in keys.hosts}

    def ensure(self) -> None:
        """Creates missing keys and repairs modes and folders; keys that are right stay the same."""
        with self._locked():
            found = self._read()
            names = [node.name for node in self._cluster.nodes]
            keys = ClusterKeys.generate(names) if found is None else found.for_nodes(names)
            self._write(keys, changed=keys != found)

    def rotate(self) -> None:
        """Replaces every key, whatever state the old ones are in."""
        with self._locked():
            self._write(ClusterKeys.generate(node.name for node in self._cluster.nodes), changed=True)

    def node_files(self, node: str) -> dict[str, bytes]:
        """File names and contents of one node's secrets folder."""
        self._loaded()
        assert self._files_of is not None
        return self._files_of(node)

    def node_folder(self, node: str) -> Path:
        """The folder with these files that the twin's container mounts. Nodes on other hosts have none here."""
        return self.folder / node

    def fingerprint(self, node: str | None = None) -> str:
        """``SHA256:…`` of the client key, or of a node's host key."""
        keys = self._loaded()
        return (keys.client if node is None else keys.hosts[node]).fingerprint

    def _loaded(self) -> ClusterKeys:
        if self._keys is None:
            self.ensure()
        assert self._keys is not None
        return self._keys

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Serializes commands, and converts OSError into Tridock's errors."""
        try:
            self._make_folder(self.folder.parent)
            self._make_folder(self.folder)
            _put(self.folder.parent / ".gitignore", b"*\n")
            lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE_MODE)
            try:
                os.fchmod(lock, _FILE_MODE)
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            where = f"{error.filename or self.folder}"
            todo = f"make {self.folder.parent} and everything in it writable for you, and free space on its disk"
            raise RequestError(
                Problem(where, "the cluster's keys cannot be stored here", _reason(error), todo)
            ) from None

    def _read(self) -> ClusterKeys | None:
        path = self.folder / _KEYS
        try:
            if (mode := path.stat().st_mode & 0o7777) & 0o077:
                todo = f"make new keys: tridock keys --rotate; to keep these: chmod 600 {shlex.quote(str(path))}"
                raise RequestError(Problem(str(path), "can be read by other users", f"mode {mode:03o}", todo))
            return ClusterKeys.from_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            todo = "restore it from a copy, or make new keys: tridock keys --rotate"
            raise RequestError(Problem(str(path), "does not hold a cluster's keys", str(error), todo)) from None

    def _write(self, keys: ClusterKeys, *, changed: bool) -> None:
        # The nodes' folders come after: whatever stops here, the next command writes them from this file.
        path = self.folder / _KEYS
        if changed:
            write_atomic(path, keys.to_json(), _FILE_MODE)
        _set_mode(path, _FILE_MODE)
        self._keys = keys
        files_of = self._files_of = node_files(self._cluster, keys)
        for node in self._mounted:
            folder = self.node_folder(node.name)
            self._make_folder(folder)
            for name, content in files_of(node.name).items():
                _put(folder / name, content)
        self._remove_others({node.name for node in self._mounted})

    def _make_folder(self, folder: Path) -> None:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        _set_mode(folder, _FOLDER_MODE)

    def _remove_others(self, names: set[str]) -> None:
        """Removes folders that no container mounts: our files only, and the folder if that was all."""
        for folder in self.folder.iterdir():
            if folder.name in names or not folder.is_dir() or folder.is_symlink():
                continue
            for name in NODE_FILES:
                (folder / name).unlink(missing_ok=True)
            if not any(folder.iterdir()):
                folder.rmdir()


def _put(path: Path, content: bytes) -> None:
    # Left alone where it is right: a running container has it mounted. Not durable: the next command compares it again.
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content, _FILE_MODE, durable=False)
    _set_mode(path, _FILE_MODE)


def _set_mode(path: Path, mode: int) -> None:
    if path.stat().st_mode & 0o7777 != mode:
        path.chmod(mode)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def distribute_keys(session: Session, *, rotate: bool = False) -> KeyStore:
    """Creates missing keys (with ``rotate``, replaces all) and copies each node's files to its host.

    A running node's sshd reads its host key again; its sessions, and so its runs, continue. Hosts that hold exactly
    these files are left alone: their node's sshd has read them.
    """
    store = KeyStore(session.cluster)
    if rotate:
        store.rotate()
    else:
        store.ensure()

    def push(node: str, host: Host) -> None:
        steps, what = _key_steps(session, store, node)
        if len(steps) > 1:  # in one command, which a lost connection does not end
            line = " && ".join(step.render() for step in steps)
            steps = [Command.of("sh", "-c", line, stdin=steps[0].stdin)]
        done = host.run(steps[0], timeout=FILES_TIMEOUT_S, keep=session.keep_s)
        replace(done, command=what).checked(node)

    session.each(push, only=tuple(node for node in session.states() if _needs_keys(session, store, node)))
    return store


def _needs_keys(session: Session, store: KeyStore, node: str) -> bool:
    """Whether the node's host has other files than it should, or its sshd must read those of this machine again."""
    state = session.states()[node]
    if session.transport.separate_hosts:
        return state.keys != keys_digest(store.node_files(node))
    return state.container is not None and state.container.running


def _key_steps(session: Session, store: KeyStore, node: str) -> tuple[list[Command], str]:
    """Returns the commands that copy a node's files to its host, and a description of them.

    A running node's sshd reads them again. Until then a file says that it has not: a host that is left in between has
    other files than it should.
    """
    state, files = session.states()[node], store.node_files(node)
    rereads = state.container is not None and state.container.running
    reread = [session.inside(node, "sh", "-c", f"kill -HUP $(cat {run_folder.SSHD_PID})")] if rereads else []
    if not session.transport.separate_hosts:  # on this machine the containers mount the store's own folders
        return reread, "have sshd read its keys again"
    folder = session.transport.secrets(node, state.facts)
    what = f"write into {folder}"
    if not rereads:
        return [put_texts_command(files, folder)], what
    write = put_texts_command({**files, _UNREAD: b""}, folder)
    return [write, *reread, Command.of("rm", "--", f"{folder}/{_UNREAD}")], what
