"""Programs that start ranks (torchrun, deepspeed, accelerate, mpirun) and the options that the cluster determines.

Your own arguments are unchanged. Tridock inserts the options for nodes, rendezvous and ranks after the program's name,
and rejects them in your arguments. Any other program is started once per slot.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError
from tridock.launchers.deepspeed import deepspeed_options, for_pdsh

Argv = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A node of a run, as its rank starter needs it."""

    slots: Mapping[str, Sequence[int]]
    """Slots of every node, the head first."""
    node_rank: int
    master_addr: str
    master_port: int
    hostfile: str
    env: Argv = ()
    """Names of the variables that every rank needs."""
    python: str = run_folder.PYTHON
    """The Python that runs Tridock's own code on every node."""
    in_job: bool = False
    """Whether a scheduler has started a task on every node, so that no program uses ssh."""
    per_node: bool = False
    """Whether the program starts once per node and starts the node's ranks itself."""

    @property
    def ranks(self) -> int:
        """Number of ranks on this node."""
        return len(list(self.slots.values())[self.node_rank])

    @property
    def world_size(self) -> int:
        return sum(map(len, self.slots.values()))


@dataclass(frozen=True, slots=True)
class Program:
    """How Tridock starts one kind of program."""

    name: str
    options: Callable[[Place, frozenset[str]], Sequence[str]]
    """Returns the options to add, given those that the user has set."""
    decided: frozenset[str] = frozenset()
    """Options that the user may not set, with dashes for underscores."""
    on_every_node: bool = True
    """False if it starts only on the head and reaches the other nodes itself."""
    for_shell: bool = False
    """Whether the arguments after the script pass through a shell on other nodes."""
    module: str = ""
    """The option that runs a module instead of a script; empty if there is none."""
    own_logs: frozenset[str] = frozenset()
    """Options with which the program writes per-rank logs itself, or runs no Python."""
    alone: frozenset[str] = frozenset()
    """Options with which the program starts independent processes."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that it needs in a container, where the user is the operator, root included."""
    job_options: Callable[[Place], Sequence[str]] | None = None
    """Options in a scheduler's job for a program that otherwise starts only on the head: in a job it runs on every
    node.
    """

    def runs_on_every_node(self, *, in_job: bool) -> bool:
        """Whether it starts on every node, not only on the head."""
        return self.on_every_node or (in_job and self.job_options is not None)


def _torchrun(place: Place, given: frozenset[str]) -> Sequence[str]:
    ranks = () if "--nproc-per-node" in given else ("--nproc-per-node", str(place.ranks))
    return (
        *("--nnodes", str(len(place.slots)), "--node-rank", str(place.node_rank), *ranks),
        *("--master-addr", place.master_addr, "--master-port", str(place.master_port)),
    )


def _deepspeed(place: Place, _given: frozenset[str]) -> Sequence[str]:
    return deepspeed_options(place.slots, place.hostfile, place.master_addr, place.master_port)


def _deepspeed_in_job(place: Place) -> Sequence[str]:
    address = ("--master_addr", place.master_addr, "--master_port", str(place.master_port))
    return ("--hostfile", place.hostfile, *address, "--no_ssh", "--node_rank", str(place.node_rank))


def _accelerate(place: Place, given: frozenset[str]) -> Sequence[str]:
    ranks = () if "--num-processes" in given else ("--num_processes", str(place.world_size))
    # Without it, or a kind that the user names, accelerate starts one isolated process per node.
    kind = () if place.world_size == 1 or given & _ACCELERATE_KINDS else ("--multi_gpu",)
    return (
        *kind,
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


_ACCELERATE_KINDS: Final = frozenset(
    ("--multi-gpu", "--use-deepspeed", "--use-fsdp", "--use-megatron-lm", "--tpu", "--config-file")
)
_TORCHRUN: Final = Program(
    "torchrun",
    _torchrun,
    frozenset(
        (
            *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--standalone"),
            "--max-restarts",
        )
    ),
    module="-m",
    own_logs=frozenset(("--no-python", "--log-dir", "--redirects", "-r", "--tee", "-t")),
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
    module="--module",
    own_logs=frozenset(("--no-python", "--enable-each-rank-log", "--autotuning")),
    job_options=_deepspeed_in_job,
)
_ACCELERATE: Final = Program(
    "accelerate launch",
    _accelerate,
    frozenset(("--num-machines", "--machine-rank", "--main-process-ip", "--main-process-port")),
    module="--module",
    own_logs=frozenset(("--no-python", "--log-dir", "--tee")),
    alone=frozenset(("--cpu",)),
)
_MPIRUN: Final = Program(
    "mpirun",
    _mpirun,
    frozenset(("--hostfile", "-hostfile", "--machinefile", "-machinefile", "--host", "-host", "-H", "-np", "-n")),
    on_every_node=False,
    env={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
)
_MPIRUN_FLAGS: Final = frozenset(
    (
        *(
            "allow-run-as-root",
            "oversubscribe",
            "nooversubscribe",
            "report-bindings",
            "display-map",
            "nolocal",
            "q",
            "v",
        ),
        *(
            "display-allocation",
            "tag-output",
            "timestamp-output",
            "use-hwthread-cpus",
            "quiet",
            "verbose",
            "disable-recovery",
        ),
        *("bynode", "byslot", "bycore", "bysocket", "bind-to-core", "bind-to-socket", "bind-to-none", "pernode"),
    )
)
_MPIRUN_PAIRS: Final = frozenset(("mca", "gmca"))
_OTHER: Final = Program("any other program", _start_ranks)
_RANK_OUTPUT: Final = "tridock.node.rank_output"

_MODULE: Final = ("-m", "--module")
_PYTHON: Final = re.compile(r"python[0-9.]*")
_FLAGS: Final = re.compile(r"-[bBdEiIOPqsSuvx]+")
_FLAGS_WITH_VALUE: Final = ("-W", "-X")
_MODULES: Final = {"torch.distributed.run": _TORCHRUN, "torch.distributed.launch": _TORCHRUN,
                   "deepspeed.launcher.runner": _DEEPSPEED, "accelerate.commands.launch": _ACCELERATE}  # fmt: skip
_NAMES: Final = {"torchrun": _TORCHRUN, "deepspeed": _DEEPSPEED, "mpirun": _MPIRUN, "mpiexec": _MPIRUN}
_BEHIND: Final = ("torchrun", "deepspeed", "mpirun", "accelerate")


def program_of(argv: Sequence[str]) -> tuple[Program, int]:
    """Returns the launcher at the beginning of a command line and the number of arguments in its name."""
    first = posixpath.basename(argv[0])
    if _PYTHON.fullmatch(first):
        option = 1
        while option < len(argv) and (_FLAGS.fullmatch(argv[option]) or argv[option] in _FLAGS_WITH_VALUE):
            option += 2 if argv[option] in _FLAGS_WITH_VALUE else 1
        match tuple(argv[option : option + 2]):
            case ("-m", module) if module in _MODULES:
                return _MODULES[module], option + 2
    if first == "accelerate" and tuple(argv[1:2]) == ("launch",):
        return _ACCELERATE, 2
    return (_NAMES[first], 1) if first in _NAMES else (_OTHER, 0)


def on_node(argv: Sequence[str], place: Place) -> Argv:
    """Returns one node's command line. Raises :class:`RequestError` for options that the cluster determines."""
    program, named, script = _parts(argv)
    if place.per_node:
        return ("env", *_of_node(program, place), *argv)
    given = _options(argv[named:script])
    if alone := [word for option, word in given.items() if option in program.alone]:
        what, todo = f"{program.name} starts no ranks with it", "leave it out, or give it behind the script"
        raise RequestError(Problem("command", what, " ".join(alone), todo))
    if refused := [word for option, word in given.items() if option in program.decided]:
        what, todo = (
            f"{program.name} gets these options from Tridock",
            "leave them out: the hostfile and --restarts decide",
        )
        raise RequestError(Problem("command", what, " ".join(refused), todo))
    if program is _OTHER and (behind := next((word for word in argv[:script] if word in _BEHIND), None)):
        what, todo = f"starts {behind} once per slot, each alone", f"begin with {behind}, or add --per node"
        raise RequestError(Problem("command", what, " ".join(argv), todo))
    sizes = {len(slots) for slots in place.slots.values()}
    if program is _OTHER and len(sizes) > 1:
        got, todo = ", ".join(f"{node}: {len(it)}" for node, it in place.slots.items()), "use torchrun, or --include"
        raise RequestError(Problem("command", "starts once per slot, and nodes differ in slots", got, todo))
    for_shell = program.for_shell and len(place.slots) > 1
    if place.in_job and program.job_options is not None:
        added, for_shell = tuple(program.job_options(place)), False
    else:
        added = tuple(program.options(place, frozenset(given)))
    if program is _OTHER:
        tridock = (place.python, "-P", "-m")
        return (*tridock, "tridock.node", "start-ranks", *added, *tridock, _RANK_OUTPUT, "--program", *argv)
    first, last = argv[script : script + 1], argv[script + 1 :]
    if has_rank_logs(argv):
        last = ("-m", *last) if first[0] in _MODULE else (*first, *last)
        first = (program.module, _RANK_OUTPUT)
    if for_shell:
        last = tuple(map(for_pdsh, last))
    return (*argv[:named], *added, *argv[named:script], *first, *last)


def _of_node(program: Program, place: Place) -> Sequence[str]:
    """Returns the variables of a program that starts its node's ranks; torchrun itself reads ``PET_…``."""
    if program is not _OTHER:
        what, todo = (
            "node is for programs that start the ranks of their node",
            f"leave it out: Tridock starts {program.name}",
        )
        raise RequestError(Problem("per", what, program.name, f"{todo} where it belongs"))
    variables = {
        "NNODES": len(place.slots),
        "NODE_RANK": place.node_rank,
        "NPROC_PER_NODE": place.ranks,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    return [f"{prefix}{name}={value}" for prefix in ("", "PET_") for name, value in variables.items()]


def has_rank_logs(argv: Sequence[str], *, per_node: bool = False) -> bool:
    """Whether Tridock can copy each rank's output to its log, for which it must know where the script begins."""
    program, named, script = _parts(argv)
    if per_node or program is _OTHER:
        return not per_node
    is_known = script < len(argv) and argv[script] != "--"
    return bool(program.module) and is_known and not program.own_logs & _options(argv[named:script]).keys()


def _parts(argv: Sequence[str]) -> tuple[Program, int, int]:
    """Returns the launcher and the range of its own options, which end at the script or at ``-m``."""
    program, named = program_of(argv)
    if program is _MPIRUN:
        return program, named, _end_of_mpirun(argv, named)
    ends = (n for n in range(named, len(argv)) if argv[n].endswith(".py") or argv[n] in (*_MODULE, "--"))
    return program, named, next(ends, len(argv))


def _end_of_mpirun(argv: Sequence[str], place: int) -> int:
    """Returns the end of mpirun's options: its program may be any, with options of the same names."""
    while place < len(argv) and argv[place].startswith("-") and argv[place] != "--":
        option = argv[place].lstrip("-")
        values = 0 if option in _MPIRUN_FLAGS else 2 if option in _MPIRUN_PAIRS else 1
        place += 1
        while values and place < len(argv) and not argv[place].startswith("-"):
            place, values = place + 1, values - 1
    return place


def _options(argv: Sequence[str]) -> dict[str, str]:
    return {_option(word): word for word in argv if word.startswith("-")}


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
