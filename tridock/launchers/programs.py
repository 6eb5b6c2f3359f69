"""Programs that start ranks: torchrun, deepspeed, accelerate and mpirun, with the options that the cluster decides.

The user's words stay as they are. Tridock adds the nodes, the rendezvous and the ranks right behind the program's name,
and refuses these options where the user gives them, too. Any other program is started once per slot.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tridock.errors import Problem, RequestError
from tridock.launchers.deepspeed import deepspeed_options, for_pdsh

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a run, as its starter has to know it."""

    slots: Mapping[str, Sequence[int]]
    """Of every node; the head comes first."""
    node_rank: int
    master_addr: str
    master_port: int
    hostfile: str
    env: Words = ()
    """Names of the variables that every rank must have."""

    @property
    def ranks(self) -> int:
        """Of this node."""
        return len(list(self.slots.values())[self.node_rank])

    @property
    def world_size(self) -> int:
        return sum(map(len, self.slots.values()))


@dataclass(frozen=True, slots=True)
class Program:
    """How Tridock starts one kind of program."""

    name: str
    options: Callable[[Place, frozenset[str]], Sequence[str]]
    """The options to add, given those that the user has set."""
    decided: frozenset[str] = frozenset()
    """Options that are not the user's to set, with dashes for underscores."""
    on_every_node: bool = True
    """False: on the head, and it reaches the other nodes by itself."""
    for_shell: bool = False
    """Whether what follows the script goes through a shell of other nodes."""


def _torchrun(place: Place, given: frozenset[str]) -> Sequence[str]:
    ranks = () if "--nproc-per-node" in given else ("--nproc-per-node", str(place.ranks))
    return (
        *("--nnodes", str(len(place.slots)), "--node-rank", str(place.node_rank), *ranks),
        *("--master-addr", place.master_addr, "--master-port", str(place.master_port)),
    )


def _deepspeed(place: Place, _given: frozenset[str]) -> Sequence[str]:
    return deepspeed_options(place.slots, place.hostfile, place.master_addr, place.master_port)


def _accelerate(place: Place, given: frozenset[str]) -> Sequence[str]:
    ranks = () if "--num-processes" in given else ("--num_processes", str(place.world_size))
    return (
        *("--num_machines", str(len(place.slots)), "--machine_rank", str(place.node_rank), *ranks),
        *("--main_process_ip", place.master_addr, "--main_process_port", str(place.master_port)),
    )


def _mpirun(place: Place, _given: frozenset[str]) -> Sequence[str]:
    names = (word for name in place.env for word in ("-x", name))
    return ("--hostfile", place.hostfile, "-np", str(place.world_size), *names)


def _start_ranks(place: Place, _given: frozenset[str]) -> Sequence[str]:
    return (
        *("--nnodes", str(len(place.slots)), "--node-rank", str(place.node_rank)),
        *("--nproc-per-node", str(place.ranks)),
        *("--master-addr", place.master_addr, "--master-port", str(place.master_port), "--no-python"),
    )


_TORCHRUN: Final = Program(
    "torchrun",
    _torchrun,
    frozenset(
        (
            "--nnodes",
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--rdzv-endpoint",
            "--standalone",
            "--max-restarts",
        )
    ),
)
_DEEPSPEED: Final = Program(
    "deepspeed",
    _deepspeed,
    frozenset(
        (
            *("--hostfile", "-H", "--include", "-i", "--exclude", "-e", "--num-nodes", "--num-gpus", "--node-rank"),
            *("--master-addr", "--master-port", "--launcher", "--no-ssh"),
        )
    ),
    on_every_node=False,
    for_shell=True,
)
_ACCELERATE: Final = Program(
    "accelerate launch",
    _accelerate,
    frozenset(("--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port")),
)
_MPIRUN: Final = Program(
    "mpirun",
    _mpirun,
    frozenset(("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--host", "-host", "-H", "-np", "-n")),
    on_every_node=False,
)
_OTHER: Final = Program("any other program", _start_ranks)
_START_RANKS: Final = ("python", "-P", "-m", "tridock.node", "start-ranks")

_PYTHON: Final = re.compile(r"python[0-9.]*")
_MODULES: Final = {"torch.distributed.run": _TORCHRUN, "torch.distributed.launch": _TORCHRUN,
                   "deepspeed.launcher.runner": _DEEPSPEED, "accelerate.commands.launch": _ACCELERATE}  # fmt: skip
_NAMES: Final = {"torchrun": _TORCHRUN, "deepspeed": _DEEPSPEED, "mpirun": _MPIRUN, "mpiexec": _MPIRUN}


def program_of(words: Sequence[str]) -> tuple[Program, int]:
    """The launcher at the beginning of a command line, and how many words its name takes."""
    first = posixpath.basename(words[0])
    if _PYTHON.fullmatch(first) and len(words) > 2 and words[1] == "-m" and words[2] in _MODULES:
        return _MODULES[words[2]], 3
    if first == "accelerate" and words[1:2] == ["launch"]:
        return _ACCELERATE, 2
    return (_NAMES[first], 1) if first in _NAMES else (_OTHER, 0)


def on_node(words: Sequence[str], place: Place) -> Words:
    """The command line of one node. Raises :class:`RequestError` for options that are the cluster's to decide."""
    words = list(words)
    program, named = program_of(words)
    own, rest = words[named:], words[:named]
    script = _script_at(own)
    given = {_option(word): word for word in own[:script] if word.startswith("-")}
    if refused := [word for option, word in given.items() if option in program.decided]:
        what, todo = (
            f"{program.name} gets these options from Tridock",
            "leave them out: the hostfile and --restarts decide",
        )
        raise RequestError(Problem("command", what, " ".join(refused), todo))
    sizes = {len(slots) for slots in place.slots.values()}
    if program is _OTHER and len(sizes) > 1:
        got, todo = ", ".join(f"{node}: {len(it)}" for node, it in place.slots.items()), "use torchrun, or --include"
        raise RequestError(Problem("command", "starts once per slot, and nodes differ in slots", got, todo))
    added = tuple(program.options(place, frozenset(given)))
    if program is _OTHER:
        return (*_START_RANKS, *added, *words)
    if program.for_shell and len(place.slots) > 1:
        own = [*own[: script + 1], *map(for_pdsh, own[script + 1 :])]
    return (*rest, *added, *own)


def _script_at(words: Sequence[str]) -> int:
    """Where the launcher's own options end: at the script, or at ``-m``."""
    ends = (n for n, word in enumerate(words) if word.endswith(".py") or word in ("-m", "--module", "--"))
    return next(ends, len(words))


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
