"""A cluster: a hostfile, its settings file, and the values derived from both."""

import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tridock.cluster.hostfile import Hostfile, is_ipv6, load_hostfile
from tridock.cluster.schema import NodeSettings, Settings, parse_settings
from tridock.contracts.limits import refuse_too_many
from tridock.errors import Problem, RequestError
from tridock.project_files import project_file
from tridock.strict_yaml import read_text

STATE: str = ".tridock"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """The names of a node.

    ``name`` is used by Tridock, the run's hostfile and the other nodes: the hostfile's entry, or a label for an IPv6
    address (pdsh reads the part before a colon as a module, Docker as a mount's source). ``host`` is the entry itself,
    passed to the operator's ssh; ``address`` is where the other nodes reach it.
    """

    name: str
    host: str
    address: str
    slots: int


@dataclass(frozen=True, slots=True)
class Cluster:
    """Everything known about a cluster before a host is contacted.

    ``nodes`` holds every entry of the hostfile. ``slots`` holds the slot numbers of those that the filters select,
    without the ``spares``, on which no run starts. ``settings.image`` is the nodes' image; ``wraps`` is your own image
    that Tridock's layer is built on, if there is one.
    """

    name: str
    hostfile_path: Path
    hostfile: Hostfile
    settings: Settings
    project_folder: Path
    nodes: tuple[ClusterNode, ...]
    slots: Mapping[str, tuple[int, ...]]
    spares: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    wraps: str | None = None

    def first(self, nodes: int | None, slots: int | None) -> "Cluster":
        """Returns this cluster with only its first nodes, and only the first slots of each.

        Raises :class:`RequestError` if there are fewer.
        """
        problems = []
        if nodes is not None and not 1 <= nodes <= len(self.slots):
            problems.append(_beyond("--nodes", "the hostfile", nodes, len(self.slots)))
        few = min(self.slots, key=lambda name: len(self.slots[name]))
        if slots is not None and not 1 <= slots <= len(self.slots[few]):
            problems.append(_beyond("--slots", few, slots, len(self.slots[few])))
        RequestError.raise_for(problems)
        return replace(self, slots={name: self.slots[name][:slots] for name in list(self.slots)[:nodes]})

    def with_image(self, image: str, *, wrap: bool) -> "Cluster":
        """Returns this cluster with another image, or with Tridock's layer on it."""
        own = wrapped_name(image) if wrap else image
        settings = self.settings.model_copy(update={"image": own})
        return replace(self, settings=settings, wraps=image if wrap else None)

    @property
    def unfiltered(self) -> "Cluster":
        """This cluster with all slots of every entry of the hostfile, and no spares."""
        return replace(self, slots={node.name: tuple(range(node.slots)) for node in self.nodes}, spares={})

    @property
    def hosts_option(self) -> str:
        """``--hosts HOSTFILE``, quoted for a shell."""
        return f"--hosts {shlex.quote(str(self.hostfile_path))}"

    @property
    def everywhere(self) -> Mapping[str, tuple[int, ...]]:
        """The slot numbers of the nodes in use, then of the spares."""
        return {**self.slots, **self.spares}

    @property
    def head(self) -> str:
        return next(iter(self.slots))

    @property
    def state_folder(self) -> Path:
        """The folder on the operator's machine with the cluster's keys."""
        return self.project_folder / STATE / self.name

    @property
    def workdir(self) -> str:
        """The cluster's folder on each host; may begin with ``~``."""
        return self.settings.workdir or f"~/tridock/{self.name}"

    def node(self, name: str) -> ClusterNode:
        return next(node for node in self.nodes if node.name == name)

    def listen_of(self, name: str) -> tuple[str, ...]:
        """Returns the addresses that a node's sshd listens on; empty means all."""
        own = self._own(name).listen
        return self.settings.listen if own is None else own

    def env_of(self, name: str) -> dict[str, str]:
        """Returns a node's environment: the cluster's, overridden by the node's own."""
        return {**self.settings.env, **self._own(name).env}

    def _own(self, name: str) -> NodeSettings:
        return self.settings.nodes.get(self.node(name).host, NodeSettings())


def load_cluster(path: Path, include: str = "", exclude: str = "", project_folder: Path | None = None) -> Cluster:
    """Reads a hostfile and the settings file beside it, if there is one (``lab`` and ``lab.yaml``).

    ``include`` and ``exclude`` are DeepSpeed's filters on the hostfile's names. The project folder is the one with the
    fabfile, above the hostfile or else above the current folder.
    """
    hostfile = load_hostfile(path)
    settings_path, beside = (it.with_name(f"{it.name}.yaml") for it in (path, project_file(path)))
    settings = Settings()
    if beside.exists():
        settings = parse_settings(read_text(beside, "a cluster's settings"), str(settings_path))
    _refuse_unknown_nodes(settings, hostfile, str(settings_path))
    nodes = tuple(
        ClusterNode(
            name=node_label(entry.name),
            host=entry.name,
            address=settings.nodes.get(entry.name, NodeSettings()).address or entry.name,
            slots=entry.slots,
        )
        for entry in hostfile.nodes
    )
    _refuse_shared_addresses(nodes, str(settings_path))
    selected = hostfile.select(include, exclude)
    if not selected:
        got = repr(include or exclude)
        option = "--include" if include else "--exclude"
        raise RequestError(Problem(option, "leaves no slot of the hostfile", got, "leave some in"))
    # A spare that is requested by name is used.
    spare = set() if include else set(settings.spares)
    if not selected.keys() - spare:
        todo = "keep at least one node that is not a spare: runs start there"
        raise RequestError(Problem(f"{settings_path}: spares", "names every node", ", ".join(selected), todo))
    refuse_too_many(selected, str(path), "choose some with --include")
    labelled = {node_label(name): slots for name, slots in selected.items()}
    spares = {node_label(name) for name in spare}
    cluster = Cluster(
        name=settings.name or cluster_name(path),
        hostfile_path=path,
        hostfile=hostfile,
        settings=settings,
        project_folder=project_folder or _project_folder(path),
        nodes=nodes,
        slots={name: slots for name, slots in labelled.items() if name not in spares},
        spares={name: slots for name, slots in labelled.items() if name in spares},
    )
    return cluster.with_image(settings.image, wrap=True) if settings.wrap else cluster


def wrapped_name(image: str) -> str:
    """Returns the name of Tridock's layer on an image, ``localhost/tridock-wrapped/NAME:TAG``, with only characters
    that Docker allows. Without ``localhost`` it would be in a namespace of Docker Hub that anyone can take."""
    name, at, digest = image.partition("@")
    name, colon, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "")
    path = "/".join(re.sub(r"[^a-z0-9._-]+", "-", part.lower()).strip("._-") or "image" for part in name.split("/"))
    return f"localhost/tridock-wrapped/{path}:{tag if colon and not at else digest.rpartition(':')[2][:12] or 'latest'}"


def node_label(name: str) -> str:
    """Returns a hostfile's entry as a name that is safe everywhere; only IPv6 addresses change."""
    return "ip6-" + re.sub(r"[:%]", "-", name.lower()) if is_ipv6(name) else name


def cluster_name(path: Path) -> str:
    """Returns a cluster's name, derived from its hostfile's: lower case, as Docker and Compose require."""
    return re.sub(r"[^a-z0-9_-]+", "-", path.name.lower()).strip("-_")[:41] or "cluster"


def _beyond(option: str, what: str, got: int, there: int) -> Problem:
    if got < 1:
        return Problem(option, "must be 1 or more", str(got), f"give 1 to {there}")
    return Problem(option, f"is more than {what} has", str(got), f"give at most {there}")


def _refuse_unknown_nodes(settings: Settings, hostfile: Hostfile, source: str) -> None:
    names = list(hostfile.pool)
    problems = []
    named = [(f"nodes.{name}", name) for name in settings.nodes]
    for where, name in named + [(f"spares.{place}", name) for place, name in enumerate(settings.spares)]:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            todo = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
            got = "" if where.startswith("nodes.") else repr(name)
            problems.append(Problem(f"{source}: {where}", f"is not a node of {hostfile.source}", got, todo))
    RequestError.raise_for(problems)


def _refuse_shared_addresses(nodes: Sequence[ClusterNode], source: str) -> None:
    # Each node has its own host key; at one address, one node's pin would accept the other.
    owners: dict[str, ClusterNode] = {}
    problems = []
    for node in nodes:
        first = owners.setdefault(node.address.lower(), node)
        if first is not node:
            what = f"has the address of {first.host}"
            todo = "give each node its own address"
            problems.append(Problem(f"{source}: nodes.{node.host}", what, node.address, todo))
    RequestError.raise_for(problems)


def _project_folder(hostfile: Path) -> Path:
    here = Path.cwd()
    for start in (hostfile.resolve().parent, here):
        for folder in (start, *start.parents):
            if (folder / "fabfile.py").is_file():
                return folder
    return here
