"""rsync into the nodes' containers, and which nodes share a folder: a file is sent once per shared folder.

This machine's rsync speaks to the node's over the host's ssh connection and ``docker exec -i``. Every file arrives
under another name, is verified there, and gets its own name when all of them are there.
"""

import posixpath
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from tridock.errors import ClusterError, Problem, TridockError
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import States, ask_states, read_states
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.nodes.containers import up
from tridock.remote import Host, Outcome, raise_failures

T = TypeVar("T")

PARTS: Final = ".tridock-part"
"""The folder beside a file that holds what has arrived of it; rsync removes it."""
_LOCK: Final = ".tridock-sync.lock"
_OPTIONS: Final = (
    *("--no-implied-dirs", "--copy-links", "--times", "--chmod=D755,F644", "--no-human-readable"),
    "--modify-window=-1",  # nanoseconds
)
_SEND: Final = (
    *(f"--partial-dir={PARTS}", "--delay-updates", "--ignore-times", "--info=progress2", "--stats"),
    "--remote-option=--timeout=300",  # of the node's rsync, which holds the lock: this side may wait for it
)
_NOT_FOUND: Final = 127
_ECHOES: Final = (b"rsync error:", b"rsync: connection unexpectedly closed", b"rsync: [sender] write")
"""How lines begin that follow from another one."""
_TIMEOUT_S: Final = 60.0

# Empty files, so that a full disk takes them too. What a killed command left is removed an hour later.
_PROBE: Final = (
    "set -eu; umask 022; command -v rsync >/dev/null || exit 127\n"
    'name=$1 make=$2; shift 2\nfor f; do\n  f=./$f; [ "$make" = no ] || mkdir -p "$f"; [ -d "$f" ] || continue\n'
    "  find \"$f/\" -maxdepth 1 -name '.tridock-probe-*' -mmin +60 -delete 2>/dev/null || true\n"
    '  : >"$f/$name"\ndone\n'
)
# The nearest existing folder has the free bytes: a dry run creates none.
_SEEN: Final = (
    "set -eu; names=$1; shift; n=0\nfor f; do\n  f=./$f\n"
    '  for name in $names; do [ ! -e "$f/$name" ] || printf \'seen %s %s\\n\' "$n" "$name"; done\n'
    '  [ ! -d "$f" ] || echo "there $n"\n  while [ ! -d "$f" ]; do f=$(dirname "$f"); done\n'
    '  echo "free $n $(df --output=avail -B1 "$f" | tail -n 1)"; n=$((n + 1))\ndone\n'
)
_UNPROBE: Final = 'name=$1; shift; for f; do rm -f "./$f/$name"; done\n'
_SIZES: Final = "cd \"./$1\" 2>/dev/null || exit 0; xargs -0 -r stat --printf '%s %n\\0' -- 2>/dev/null || true\n"
SCRIPTS: Final = (_PROBE, _SEEN, _UNPROBE, _SIZES)


class Nodes:
    """The nodes of one operation, in hostfile order. A failed one is left out of what follows, without the others."""

    def __init__(self, hosts: Hosts, *, start: bool) -> None:
        """Reads every host's state. ``start`` brings the nodes up if all hosts answer and a node is not running."""
        self.hosts = hosts
        outcomes = ask_states(hosts)
        self._outcomes: dict[str, Outcome[Any]] = dict(outcomes)
        states: States = {node: it.value for node, it in outcomes.items() if it.value is not None}
        running = {node for node, state in states.items() if state.container and state.container.running}
        if start and self.fit == hosts.nodes and len(running) < len(states):
            up(hosts)
            states, running = read_states(hosts), set(hosts)
        self.client = NodeClient(hosts, states)
        todo = f"run tridock up {hosts.cluster.hosts_option}"
        for node in states.keys() - running:
            error = ClusterError(Problem(node, "its node is not running", "", todo))
            self._outcomes[node] = Outcome(error=error)

    @property
    def fit(self) -> tuple[str, ...]:
        """The nodes on which nothing has failed yet."""
        return tuple(node for node, outcome in self._outcomes.items() if outcome.ok)

    def each(self, action: Callable[[str, Host], T], only: Iterable[str] | None = None) -> dict[str, T]:
        """Runs an action on the fit nodes in parallel, under the cap; returns the values of those that succeed."""
        outcomes = self.hosts.try_each(action, [it for it in self.fit if only is None or it in only])
        self._outcomes |= {node: outcome for node, outcome in outcomes.items() if not outcome.ok}
        return {node: outcome.value for node, outcome in outcomes.items() if outcome.ok}  # type: ignore[misc]

    def failure(self) -> TridockError | None:
        """Combines the errors of all nodes into one; raises an error that is not a node's."""
        try:
            raise_failures(self._outcomes)
        except TridockError as failure:
            return failure
        return None

    def run(self, node: str, *argv: str, stdin: bytes | None = None, timeout: float | None = _TIMEOUT_S) -> str:
        """Runs a command of the node's container; returns what it prints."""
        done = self.client.run_inside(node, *argv, stdin=stdin, timeout=timeout)
        if done.exit_code == _NOT_FOUND:
            raise self.client.other_version(node, "it has no rsync")
        return replace(done, command="look at its data").checked(node).stdout.decode(errors="surrogateescape")

    def script(self, node: str, text: str, *arguments: str) -> list[list[str]]:
        """Runs a script in the node's container; returns the words of each line that it prints."""
        return [line.split() for line in self.run(node, "sh", "-c", text, "sync", *arguments).splitlines()]

    # ---- files below a folder of the workspace, by name ----

    def differing(self, node: str, place: str, source: Path, names: Iterable[str], *, checksum: bool) -> list[str]:
        """Returns the files whose size or time differs on the node; with ``checksum``, those whose content does."""
        options, printed = ("--dry-run", "--out-format=%i %n", *(["--checksum"] if checksum else [])), bytearray()
        self._rsync(node, place, (), (*options, f"{source}/", "host:."), names, printed.extend)
        lines = (line.partition(b" ") for line in bytes(printed).split(b"\n"))
        return [_plain(name) for what, _, name in lines if what.startswith(b"<f")]

    def arrived(self, node: str, place: str, names: Iterable[str]) -> dict[str, int]:
        """Returns the bytes that an interrupted call left of the files."""
        parts = {f"{posixpath.dirname(name) or '.'}/{PARTS}/{posixpath.basename(name)}": name for name in names}
        stdin = "\0".join(parts).encode(errors="surrogateescape")
        printed = self.run(node, "sh", "-c", _SIZES, "sync", place, stdin=stdin) if parts else ""
        return {parts[path]: int(size) for size, _, path in (it.partition(" ") for it in printed.split("\0")) if path}

    def send(self, node: str, place: str, source: Path, names: Iterable[str], progress: Callable[[int], object]) -> int:
        """Sends files of the folder ``source``; returns the bytes of their content that were not there.

        ``progress`` is called with the bytes done so far. What an interruption leaves is used by the next call.
        """
        tail = b""

        def read(part: bytes) -> None:
            nonlocal tail
            tail = (tail + part)[-_TAIL:]
            if found := _PROGRESS.findall(tail):
                progress(int(found[-1]))

        # It waits while another command sends there.
        self._rsync(node, place, ("flock", _LOCK), (*_SEND, f"{source}/", "host:."), names, read)
        found = _LITERAL.search(tail)
        return int(found[1]) if found else 0

    def fetch(self, node: str, place: str, names: Iterable[str], folder: Path) -> None:
        """Copies files of the node into an empty folder."""
        self._rsync(node, place, (), ("host:.", f"{folder}/"), names, lambda _: None)

    def _rsync(
        self,
        node: str,
        place: str,
        server: tuple[str, ...],
        arguments: tuple[str, ...],
        names: Iterable[str],
        sink: Callable[[bytes], object],
    ) -> None:
        command = self.client.inside(node, "env", "-C", place, *server, interactive=True)
        done = self.hosts[node].rsync(command, *_OPTIONS, *arguments, names=names, sink=sink)
        lines = [line for line in done.stderr.splitlines() if not line.startswith(_ECHOES)]
        replace(done, stderr=b"\n".join(lines) or done.stderr, command=f"rsync {place}").checked(node)


_TAIL: Final = 4096
_PROGRESS: Final = re.compile(rb"\r\s*(\d+)\s+\d+%")
_LITERAL: Final = re.compile(rb"\nLiteral data: (\d+) bytes\n")


def _plain(name: bytes) -> str:
    r"""Returns a name that rsync has printed with ``\#ooo`` for unusual bytes."""
    found = re.sub(rb"\\#([0-7]{3})", lambda it: bytes((int(it[1], 8),)), name)
    return found.decode(errors="surrogateescape")


OPERATOR: Final = ""
"""The name that stands for the operator's own project folder among the nodes."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Facts about each node's folders, by node and folder."""

    keepers: Mapping[tuple[str, str], str]
    """The first node that sees the folder, which gets its files for all; OPERATOR for the project's own folder."""
    free: Mapping[tuple[str, str], int]
    """Free bytes."""
    there: frozenset[tuple[str, str]]
    """The folders that exist."""

    def keeper(self, node: str, place: str) -> str:
        """Returns the folder's keeper; the node itself for a folder that was not looked at."""
        return self.keepers.get((node, place), node)


def find_shared(nodes: Nodes, project: Path, places: tuple[str, ...], *, make: bool) -> Sharing:
    """Finds shared folders by probe files, which it removes. ``make`` creates missing folders on a node.

    It looks up random names rather than listings, which a network file system may serve from its cache.
    """
    token = secrets.token_hex(8)
    names = {node: f".tridock-probe-{token}-{number}" for number, node in enumerate((OPERATOR, *nodes.fit))}
    owners = {name: node for node, name in names.items()}
    probes, probed = [project / place / names[OPERATOR] for place in places], dict[str, object]()
    try:
        for probe in probes:
            with suppress(OSError):  # the operator may have read access only; the nodes' files suffice
                probe.touch()
        probed |= nodes.each(lambda it, _: nodes.script(it, _PROBE, names[it], "yes" if make else "no", *places))
        found = nodes.each(lambda it, _: nodes.script(it, _SEEN, " ".join(owners), *places))
        pairs = {(it, place, OPERATOR) for it in found for place in places if (project / place / names[it]).exists()}
    finally:
        for probe in probes:
            with suppress(OSError):
                probe.unlink(missing_ok=True)
        nodes.each(lambda it, _: nodes.script(it, _UNPROBE, names[it], *places), only=probed)
    said = [(node, words[0], places[int(words[1])], *words[2:]) for node, lines in found.items() for words in lines]
    pairs |= {(node, place, owners[rest[0]]) for node, what, place, *rest in said if what == "seen"}
    who, keepers = (OPERATOR, *found), dict[tuple[str, str], str]()
    for place in places:
        for number, node in enumerate(who):  # one-way visibility is enough
            met = (it for it in who[:number] if {(node, place, it), (it, place, node)} & pairs)
            keepers[node, place] = next(met, node)
    free = {(node, place): int(rest[0]) for node, what, place, *rest in said if what == "free"}
    return Sharing(keepers, free, frozenset((node, place) for node, what, place, *_ in said if what == "there"))
