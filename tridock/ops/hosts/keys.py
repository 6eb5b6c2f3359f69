"""A cluster's keys: kept in ``.tridock/<cluster>/`` (0700, files 0600) and distributed over trusted connections.

``.keys.json`` alone decides: it is replaced in one step. The twin's containers mount folders of their own beside it,
which are written from it, so that the next command repairs what an interrupted one left.
"""

import fcntl
import os
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from tridock.cluster.keys import CLIENT_KEY, HOST_KEY, NODE_FILES, ClusterKeys, KeyPair, node_files
from tridock.cluster.settings import Cluster
from tridock.cluster.transports import transport_of
from tridock.command import Command
from tridock.contracts import run_folder
from tridock.contracts.run_folder import write_atomic
from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.attached import NodesLock, nodes_locked
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import keys_digest
from tridock.ops.hosts.hosts import Hosts
from tridock.remote import Host, clock
from tridock.remote.files import put_tree_command
from tridock.remote.host import FILES_TIMEOUT_S

_KEYS: Final = ".keys.json"
_LOCK: Final = ".lock"
_ROTATING: Final = ".rotating"
LOCK_S: Final = 30.0
"""Seconds to wait for another command that reads or writes the keys."""
_UNREAD: Final = "unread"
_READ: Final = 'cat -- "$1" && echo = && cat -- "$2"'
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
            _put(self.folder / _ROTATING, b"")
            self._write(ClusterKeys.generate(node.name for node in self._cluster.nodes), changed=True)

    def adopt(self, keys: ClusterKeys) -> None:
        with self._locked():
            self._write(keys.for_nodes(node.name for node in self._cluster.nodes), changed=True)

    @property
    def is_rotating(self) -> bool:
        """Whether new keys have not reached every host yet."""
        return (self.folder / _ROTATING).exists()

    def end_rotation(self) -> None:
        (self.folder / _ROTATING).unlink(missing_ok=True)

    def node_files(self, node: str) -> dict[str, bytes]:
        """File names and contents of one node's secrets folder."""
        if self._files_of is None:
            self.ensure()
        assert self._files_of is not None
        return self._files_of(node)

    def node_folder(self, node: str) -> Path:
        """The folder with these files that the twin's container mounts. Nodes on other hosts have none here."""
        return self.folder / node

    def fingerprint(self, node: str | None = None) -> str:
        """``SHA256:…`` of the client key, or of a node's host key."""
        return (self.keys.client if node is None else self.keys.hosts[node]).fingerprint

    @property
    def keys(self) -> ClusterKeys:
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
                _take_lock(lock, self.folder / _LOCK)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            todo = f"make {self.folder.parent} and everything in it writable for you, and free space on its disk"
            where, what = error.filename or self.folder, "the cluster's keys cannot be stored here"
            raise RequestError(Problem.of_error(where, what, error, todo)) from None

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


def _take_lock(lock: int, path: Path) -> None:
    """Waits for a lock, in a thread: a file server that hangs answers no request for one, not even a quick one."""
    taken = SimpleQueue[OSError | None]()

    def take() -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            taken.put(None)
        except OSError as error:
            taken.put(error)

    threading.Thread(target=take, daemon=True).start()
    try:
        error = clock.take(taken, LOCK_S)
    except Empty:
        holder = path.read_text().strip() or "nobody's name in it"
        todo = "end that command, or see whether the folder's file server hangs, then try again"
        raise RequestError(Problem(str(path), f"is locked for more than {LOCK_S:g} s", holder, todo)) from None
    if error is not None:
        raise error
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _put(path: Path, content: bytes) -> None:
    # Left alone where it is right: a running container has it mounted. Not durable: the next command compares it again.
    if not path.is_file() or path.read_bytes() != content:
        write_atomic(path, content, _FILE_MODE, durable=False)
    _set_mode(path, _FILE_MODE)


def _set_mode(path: Path, mode: int) -> None:
    if path.stat().st_mode & 0o7777 != mode:
        path.chmod(mode)


def distribute_keys(client: NodeClient, lock: NodesLock, *, rotate: bool = False) -> KeyStore:
    """Creates missing keys (with ``rotate``, replaces all) and copies each node's files to its host.

    The keys live with the cluster: those that its hosts have are taken over, whoever made them, but for a rotation.
    A running node's sshd reads its host key again; its sessions, and so its runs, continue. Hosts that hold exactly
    these files are left alone: their node's sshd has read them.
    """
    store = KeyStore(client.cluster)
    if rotate:
        store.rotate()
    else:
        store.ensure()
        if client.hosts.transport.separate_hosts and not store.is_rotating:
            _adopt(client, store)

    def push(node: str, host: Host) -> None:
        steps, what = _key_steps(client, store, node)
        if len(steps) > 1:  # in one command, which a lost connection does not end
            line = " && ".join(step.render() for step in steps)
            steps = [Command.of("sh", "-c", line, stdin=steps[0].stdin)]
        done = lock.run(node, steps[0], FILES_TIMEOUT_S, host)
        replace(done, command=what).checked(node)

    client.hosts.each(push, only=tuple(node for node in client.states if _needs_keys(client, store, node)))
    if len(client.hosts) == len(client.cluster.nodes):
        store.end_rotation()
    return store


def _adopt(client: NodeClient, store: KeyStore) -> None:
    """Takes over the keys that the hosts have. Raises :class:`ClusterError` if these are of two clusters."""
    ours = store.keys

    def read(node: str, host: Host) -> tuple[KeyPair, KeyPair] | None:
        folder = client.hosts.transport.secrets(node, client.states[node].facts)
        files = (f"{folder}/{name}" for name in (CLIENT_KEY, HOST_KEY))
        pair, _, host_key = host.run(Command.of("sh", "-c", _READ, "read", *files), 30.0).stdout.partition(b"\n=\n")
        try:
            return KeyPair.from_private(pair + b"\n"), KeyPair.from_private(host_key)
        except ValueError:
            return None  # half of them: written again

    others = tuple(node for node, state in client.states.items() if state.keys and _needs_keys(client, store, node))
    found = {node: pairs for node, pairs in client.hosts.each(read, only=others).items() if pairs is not None}
    clients = {node: pair.fingerprint for node, (pair, _) in found.items()}
    clients |= {node: store.fingerprint() for node, it in client.states.items() if it.keys and node not in others}
    if len({*clients.values()}) > 1:
        what, todo = "has other keys than the cluster's other nodes", "give all of them new ones: tridock keys --rotate"
        raise ClusterError(Problem(node, what, f"client key {key}", todo) for node, key in clients.items())
    for pair, _ in list(found.values())[:1]:
        if pair.fingerprint != ours.client.fingerprint and len(client.hosts) < len(client.cluster.nodes):
            todo = f"take over theirs first, of all nodes: tridock keys {client.cluster.hosts_option}"
            raise RequestError(Problem(str(store.folder), "has other keys than the hosts", store.fingerprint(), todo))
        store.adopt(ClusterKeys(pair, {**ours.hosts, **{node: host_key for node, (_, host_key) in found.items()}}))
        if pair.fingerprint != ours.client.fingerprint:
            print(f"took over the keys of {client.cluster.name} from its hosts: {pair.fingerprint}", file=sys.stderr)


def keys(hosts: Hosts, *, rotate: bool = False) -> KeyStore:
    with nodes_locked(hosts) as lock:
        lock.claim()
        return distribute_keys(NodeClient.of(hosts), lock, rotate=rotate)


def _needs_keys(client: NodeClient, store: KeyStore, node: str) -> bool:
    """Whether the node's host has other files than it should, or its sshd must read those of this machine again."""
    state = client.states[node]
    if client.hosts.transport.separate_hosts:
        return state.keys != keys_digest(store.node_files(node))
    return state.container is not None and state.container.running


def _key_steps(client: NodeClient, store: KeyStore, node: str) -> tuple[list[Command], str]:
    """Returns the commands that copy a node's files to its host, and a description of them.

    A running node's sshd reads them again. Until then a file says that it has not: a host that is left in between has
    other files than it should.
    """
    state, files = client.states[node], store.node_files(node)
    rereads = state.container is not None and state.container.running
    reread = [client.inside(node, "sh", "-c", f"kill -HUP $(cat {run_folder.SSHD_PID})")] if rereads else []
    if not client.hosts.transport.separate_hosts:  # on this machine the containers mount the store's own folders
        return reread, "have sshd read its keys again"
    folder = client.hosts.transport.secrets(node, state.facts)
    what = f"write into {folder}"
    if not rereads:
        return [put_tree_command(files, folder, 0o600)], what
    write = put_tree_command({**files, _UNREAD: b""}, folder, 0o600)
    return [write, *reread, Command.of("rm", "--", f"{folder}/{_UNREAD}")], what
