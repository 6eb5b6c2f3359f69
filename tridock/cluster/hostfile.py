"""DeepSpeed's hostfile: its exact grammar, and stricter checks for use as a cluster. Pure.

``parse_hostfile`` and ``Hostfile.select`` accept and reject the same input as DeepSpeed 0.19 (a property test compares
them). ``load_hostfile`` rejects more, where DeepSpeed would start a run that cannot work:

* ``slots=0``: DeepSpeed counts the node but starts no rank there; were it the first, rank 0 would wait elsewhere;
* more than 4096 slots, and digits with something stuck to them (``slots=4,5``, ``slots=8x``), which DeepSpeed drops;
* names that ssh, pdsh or a file system reads as something else (``-oProxyCommand=…``, ``node[1-4]``, ``user@host``);
* names that differ in case only: ssh lowers them, so that their host keys would be one.
"""

import io
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tridock.contracts.limits import MOST_SLOTS
from tridock.errors import Problem, RequestError
from tridock.project_files import project_file
from tridock.strict_yaml import read_text

NEVER_LOCAL: Final = "a run never falls back to this machine alone"

_LINE = re.compile(r"^(\S+)\s+slots=(\d+)")
_SAFE_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")
_EXAMPLE = "write for example `node-1 slots=8`"


@dataclass(frozen=True, slots=True)
class Node:
    """One entry: a host's name or address and its number of slots.

    ``line`` and ``rest`` (the ignored text after the digits) are for messages only.
    """

    name: str
    slots: int
    line: int = field(default=0, compare=False, repr=False)
    rest: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Hostfile:
    """The entries in file order; at least one."""

    nodes: tuple[Node, ...]
    source: str = field(default="hostfile", compare=False)

    @property
    def pool(self) -> dict[str, int]:
        """Slot counts by name, as DeepSpeed's parser returns them."""
        return {node.name: node.slots for node in self.nodes}

    def render(self) -> str:
        """Returns text that parses to the same entries."""
        return "".join(f"{node.name} slots={node.slots}\n" for node in self.nodes)

    def select(self, include: str = "", exclude: str = "") -> dict[str, tuple[int, ...]]:
        """Returns each node's slots in use, in file order, under DeepSpeed's ``host[:slot,slot]@host`` filters."""
        if include and exclude:
            got, todo = f"{include!r} and {exclude!r}", "give one of them"
            raise RequestError(Problem("--include, --exclude", "exclude each other", got, todo))
        everything = {node.name: tuple(range(node.slots)) for node in self.nodes}
        if not include and not exclude:
            return everything
        option, text = ("--include", include) if include else ("--exclude", exclude)
        named = _parse_filter(text, option, self)
        selected = {}
        for name, all_slots in everything.items():
            slots = named.get(name)
            if include:
                kept = () if slots is None else tuple(slots) or all_slots
            else:
                kept = all_slots if slots is None else tuple(s for s in all_slots if slots and s not in slots)
            if kept:
                selected[name] = kept
        return selected


def load_hostfile(path: Path) -> Hostfile:
    """Reads, parses and validates a hostfile. Raises :class:`RequestError` with every bad line."""
    if not project_file(path).exists():
        todo = f"give the path of a hostfile; {NEVER_LOCAL}"
        raise RequestError(Problem(str(path), "the hostfile is missing", "no such file", todo))
    nodes, problems = _scan(read_text(path, "a hostfile"), str(path))
    if nodes:
        problems += _unusable(Hostfile(nodes, str(path)))
    if problems:
        raise RequestError(sorted(problems, key=lambda problem: int(problem.where.rpartition(":")[2])))
    return _not_empty(nodes, str(path))


def parse_hostfile(text: str, source: str) -> Hostfile:
    """Parses hostfile text by DeepSpeed's grammar alone; ``source`` is the prefix of messages."""
    nodes, problems = _scan(text, source)
    RequestError.raise_for(problems)
    return _not_empty(nodes, source)


def _not_empty(nodes: tuple[Node, ...], source: str) -> Hostfile:
    if not nodes:
        raise RequestError(Problem(source, "the hostfile names no node", "no entry", f"{_EXAMPLE}; {NEVER_LOCAL}"))
    return Hostfile(nodes, source)


def _scan(text: str, source: str) -> tuple[tuple[Node, ...], list[Problem]]:
    nodes: dict[str, Node] = {}
    problems = []
    # StringIO splits lines as an open file does: str.splitlines also splits at form feeds and similar.
    for number, raw in enumerate(io.StringIO(text, newline=None), start=1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        where, match = f"{source}:{number}", _LINE.search(line)
        if match is None:
            problems.append(Problem(where, "is not a `host slots=N` line", repr(line), _EXAMPLE))
            continue
        name, digits = match.groups()
        if name in nodes:
            what = f"names a host that line {nodes[name].line} has already"
            problems.append(Problem(where, what, repr(name), "keep one of the two, with all its slots"))
        else:
            try:
                nodes[name] = Node(name, int(digits), number, line[match.end() :])
            except ValueError:  # Python's limit on digits, which fails DeepSpeed's parser too
                problems.append(Problem(where, "has a number too long to read", f"{len(digits)} digits", _EXAMPLE))
    return tuple(nodes.values()), problems


def is_ipv6(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).version == 6
    except ValueError:
        return False


def _unusable(hostfile: Hostfile) -> Iterator[Problem]:
    lowered: dict[str, Node] = {}
    for node in hostfile.nodes:
        where = f"{hostfile.source}:{node.line}"
        if not is_address(node.name):
            todo = (
                "use letters, digits, dots, dashes and underscores, or an address; users and ports go into the settings"
            )
            yield Problem(where, "cannot be used as a host's name", repr(node.name), todo)
        if node.slots == 0:
            yield Problem(where, "has no slots", f"{node.name} slots=0", "give at least 1, or comment the line out")
        if node.slots > MOST_SLOTS:
            yield Problem(where, "has more slots than a host can have", str(node.slots), f"give at most {MOST_SLOTS}")
        if node.rest and not node.rest[0].isspace():
            got = f"slots={node.slots}{node.rest.split()[0]}"
            yield Problem(where, "has more than a number after slots=", repr(got), _EXAMPLE)
        first = lowered.setdefault(node.name.lower(), node)
        if first is not node:
            what = f"differs from line {first.line} in case only, which ssh does not tell apart"
            yield Problem(where, what, repr(node.name), "keep one of the two")


def is_address(name: str) -> bool:
    """Whether it is a host name or an IP address, safe in ssh's files and on command lines."""
    ipv6 = is_ipv6(name) and re.fullmatch(r"[0-9a-fA-F:.]+(%[A-Za-z0-9._-]+)?", name)
    return bool(_SAFE_NAME.fullmatch(name) or ipv6)


def _parse_filter(text: str, option: str, hostfile: Hostfile) -> Mapping[str, Sequence[int]]:
    """Returns sorted slot numbers by name; an empty list means the whole node."""
    pool, named, problems = hostfile.pool, dict[str, set[int]](), []
    for part in text.split("@"):
        name, colon, slots = part.partition(":")
        if ":" in slots:
            todo = (
                "name its host instead: in this grammar a colon begins the list of slots, "
                "so IPv6 addresses cannot stand here"
            )
            problems.append(Problem(option, "has more than one colon in a host", repr(part), todo))
            continue
        if name not in pool:
            todo = f"use one of {', '.join(pool)}"
            problems.append(Problem(option, f"names a host that {hostfile.source} does not have", repr(name), todo))
            continue
        numbers = named.setdefault(name, set())
        for word in slots.split(",") if colon else ():
            number = _slot(word)
            if number is None:
                problems.append(
                    Problem(option, f"has a slot of {name} that is not a number", repr(word), f"write {name}:0,1")
                )
            elif not 0 <= number < pool[name]:
                todo = f"use 0 to {pool[name] - 1}" if pool[name] else "it has no slots"
                problems.append(Problem(option, f"names a slot that {name} does not have", str(number), todo))
            else:
                numbers.add(number)
    RequestError.raise_for(problems)
    return {name: sorted(numbers) for name, numbers in named.items()}


def _slot(word: str) -> int | None:
    try:
        return int(word)
    except ValueError:
        return None
