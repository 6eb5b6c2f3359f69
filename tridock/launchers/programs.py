"""Programs that start ranks (torchrun, deepspeed, accelerate, mpirun) and the options that the cluster determines.

Your own arguments are unchanged. Tridock inserts the options for nodes, rendezvous and ranks after the program's name,
and rejects them in your arguments. Any other program is started once per slot, once per node or once on the head.
"""

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tridock.contracts import run_folder
from tridock.errors import Problem, RequestError
from tridock.launchers.deepspeed import deepspeed_options, for_pdsh
from tridock.launchers.self_launchers import Per, known_per, self_launcher

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

    @property
    def ranks(self) -> int:
        return len(list(self.slots.values())[self.node_rank])

    @property
    def world_size(self) -> int:
        return sum(map(len, self.slots.values()))


@dataclass(frozen=True, slots=True)
class Program:
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
    starts_ranks: bool = False
    """Whether it starts the ranks itself: Tridock adds variables instead of options."""
    job_options: Callable[[Place], Sequence[str]] | None = None
    """Options in a scheduler's job for a program that else starts only on the head: in a job it runs on every node."""

    def runs_on_every_node(self, *, in_job: bool) -> bool:
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


def _composer(place: Place, _given: frozenset[str]) -> Sequence[str]:
    before = sum(map(len, list(place.slots.values())[: place.node_rank]))
    return (
        *("--nproc", str(place.ranks), "--world_size", str(place.world_size), "--base_rank", str(before)),
        *("--node_rank", str(place.node_rank)),
        *("--master_addr", place.master_addr, "--master_port", str(place.master_port)),
    )


def _per_node(place: Place) -> Mapping[str, object]:
    """Returns the variables of a program that starts its node's ranks; torchrun itself reads ``PET_…``."""
    variables = {
        "NNODES": len(place.slots),
        "NODE_RANK": place.node_rank,
        "NPROC_PER_NODE": place.ranks,
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }
    return variables | {f"PET_{name}": value for name, value in variables.items()}


def _per_cluster(place: Place) -> Mapping[str, object]:
    """Returns the variables of a program that starts all ranks from the head; gpt-neox reads ``DLTS_HOSTFILE``."""
    if place.in_job:
        what, todo = "cluster is for programs that reach the other nodes over ssh", "use --per node in a job"
        raise RequestError(Problem("per", what, "", todo))
    return {
        "DLTS_HOSTFILE": place.hostfile,
        "NNODES": len(place.slots),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": place.master_port,
    }


def _with_variables(
    variables: Callable[[Place], Mapping[str, object]], env: Mapping[str, str]
) -> Callable[[Place, frozenset[str]], Sequence[str]]:
    return lambda place, _given: ("env", *(f"{name}={value}" for name, value in {**env, **variables(place)}.items()))


_ACCELERATE_KINDS: Final = frozenset(
    ("--multi-gpu", "--use-deepspeed", "--use-fsdp", "--use-megatron-lm", "--tpu", "--config-file")
)
_OF_TORCHRUN: Final = frozenset(
    (
        *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--standalone"),
        "--max-restarts",
    )
)
_TORCHRUN: Final = Program(
    "torchrun",
    _torchrun,
    _OF_TORCHRUN,
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
_TUNE: Final = Program("tune run", _torchrun, _OF_TORCHRUN)
_COMPOSER: Final = Program(
    "composer",
    _composer,
    frozenset(
        (
            *("--nproc", "-n", "--world-size", "--base-rank", "--node-rank", "--master-addr", "--master-port"),
            *("--stdout", "--stderr"),
        )
    ),
    module="-m",
    own_logs=frozenset(("-c", "--command-mode", "--module-mode")),
)
_MPIRUN_FLAGS: Final = frozenset((
    *("allow-run-as-root", "oversubscribe", "nooversubscribe", "report-bindings", "display-map", "nolocal", "q", "v"),
    *("display-allocation", "tag-output", "timestamp-output", "use-hwthread-cpus", "quiet", "verbose"),
    *("disable-recovery", "bynode", "byslot", "bycore", "bysocket", "bind-to-core", "bind-to-socket", "bind-to-none"),
    "pernode",
))  # fmt: skip
_MPIRUN_VALUES: Final = frozenset((
    *("x", "bind-to", "map-by", "rank-by", "N", "npernode", "npersocket", "wdir", "wd", "path", "prefix", "timeout"),
    *("output-filename", "output", "stdin", "rankfile", "rf", "tune", "cpus-per-proc", "cpus-per-rank", "cpu-set"),
    *("cpu-list", "display"),
))  # fmt: skip
_MPIRUN_PAIRS: Final = frozenset(("mca", "gmca"))
_OTHER: Final = Program("any other program", lambda place, _: (*_torchrun(place, frozenset()), "--no-python"))
_RANK_OUTPUT: Final = "tridock.node.rank_output"

_MODULE: Final = ("-m", "--module")
_PYTHON: Final = re.compile(r"python[0-9.]*")
_FLAGS: Final = re.compile(r"-[bBdEiIOPqsSuvx]+")
_FLAGS_WITH_VALUE: Final = ("-W", "-X")
_MODULES: Final = {"torch.distributed.run": _TORCHRUN, "torch.distributed.launch": _TORCHRUN,
                   "deepspeed.launcher.runner": _DEEPSPEED, "accelerate.commands.launch": _ACCELERATE}  # fmt: skip
_NAMES: Final = {"torchrun": _TORCHRUN, "deepspeed": _DEEPSPEED, "deepspeed.pt": _DEEPSPEED, "ds": _DEEPSPEED,
                 "accelerate-launch": _ACCELERATE, "composer": _COMPOSER, "mpirun": _MPIRUN, "mpiexec": _MPIRUN,
                 "orterun": _MPIRUN, "mpirun.openmpi": _MPIRUN, "mpiexec.openmpi": _MPIRUN}  # fmt: skip
_SUBCOMMANDS: Final = {("accelerate", "launch"): _ACCELERATE, ("tune", "run"): _TUNE}
_BEHIND: Final = (*_NAMES, "accelerate", "llamafactory-cli", "axolotl")


def program_of(argv: Sequence[str], per: Per | None = None) -> tuple[Program, int]:
    """Returns the launcher at the beginning of a command line and the number of arguments in its name.

    ``per``: where any other program is started; None lets the program decide. Raises :class:`RequestError` for a
    launcher of which that is said, and for a program that cannot be given the other nodes.
    """
    first, option = posixpath.basename(argv[0]), 0
    if _PYTHON.fullmatch(first):
        option = 1
        while option < len(argv) and (_FLAGS.fullmatch(argv[option]) or argv[option] in _FLAGS_WITH_VALUE):
            option += 2 if argv[option] in _FLAGS_WITH_VALUE else 1
    program, named = _OTHER, 0
    match tuple(argv[option : option + 2]):
        case ("-m", module) if module in _MODULES:
            program, named = _MODULES[module], option + 2
        case (joined, *_) if option and joined.startswith("-m") and joined[2:] in _MODULES:
            program, named = _MODULES[joined[2:]], option + 1
        case (_, subcommand) if (first, subcommand) in _SUBCOMMANDS:
            program, named = _SUBCOMMANDS[first, subcommand], 2
        case _ if first in _NAMES:
            program, named = _NAMES[first], 1
    if program is not _OTHER:
        if per in ("node", "cluster"):
            what = f"{per} is for programs that start ranks themselves"
            todo = f"leave it out: Tridock starts {program.name} where it belongs"
            raise RequestError(Problem("per", what, program.name, todo))
        return program, named
    words = argv[option:]
    own = self_launcher((posixpath.basename(words[0]), *words[1:])) if words and per is None else None
    env, per = (own.env, own.per) if own else ({}, per)
    match per:
        case "node":
            options = _with_variables(_per_node, env)
            return Program("a program per node", options, starts_ranks=True), 0
        case "cluster":
            options = _with_variables(_per_cluster, env)
            return Program("a program on the head", options, starts_ranks=True, on_every_node=False), 0
    return _OTHER, 0


def is_per_slot(argv: Sequence[str], per: Per | None = None) -> bool:
    return program_of(argv, per)[0] is _OTHER


def on_node(argv: Sequence[str], place: Place, per: Per | None = None) -> Argv:
    """Returns one node's command line. Raises :class:`RequestError` for options that the cluster determines."""
    program, named, script = _parts(argv, per)
    if program.starts_ranks:
        return (*program.options(place, frozenset()), *argv)
    given = _options(argv[named:script])
    if alone := [word for option, word in given.items() if option in program.alone]:
        what, todo = f"{program.name} starts no ranks with it", "leave it out, or give it behind the script"
        raise RequestError(Problem("command", what, " ".join(alone), todo))
    if refused := [word for option, word in given.items() if option in program.decided]:
        what = f"{program.name} gets these options from Tridock"
        todo = "leave them out: the hostfile, --nodes, --slots and --restarts decide"
        raise RequestError(Problem("command", what, " ".join(refused), todo))
    if program is _OTHER and per is None and (found := _starts_ranks(argv, script)):
        name, of_it = found
        todo = f"begin with {name}, or add --per {of_it}" if of_it else "add --per node, or --per slot if you mean it"
        raise RequestError(Problem("command", f"starts {name} once per slot, each alone", " ".join(argv), todo))
    if program is _MPIRUN and _names_its_program(argv, named, script):
        watched = (place.python, "-P", "-m", _RANK_OUTPUT, "--watched")
        return (*argv[:named], *program.options(place, frozenset()), *argv[named:script], *watched, *argv[script:])
    sizes = {len(slots) for slots in place.slots.values()}
    if program in (_OTHER, _ACCELERATE) and len(sizes) > 1:
        what = "starts once per slot" if program is _OTHER else f"{program.name} starts as many ranks on each node"
        got, todo = ", ".join(f"{node}: {len(it)}" for node, it in place.slots.items()), "use torchrun, or --include"
        raise RequestError(Problem("command", f"{what}, and nodes differ in slots", got, todo))
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


def _starts_ranks(argv: Sequence[str], script: int) -> tuple[str, Per | None] | None:
    """Returns the name of a launcher behind another program, and where to start both; None if it is the first word,
    with a subcommand that is not known."""
    for place in range(min(script + 1, len(argv))):
        words = (posixpath.basename(argv[place]), *argv[place + 1 :])
        of_it = known_per(words) or ("node" if words[0] in _BEHIND or words[:2] in _SUBCOMMANDS else None)
        if of_it:
            return words[words[0] == "-m"], of_it if place else None
    return None


def has_rank_logs(argv: Sequence[str], per: Per | None = None) -> bool:
    """Whether Tridock can copy each rank's output to its log, for which it must know where the script begins."""
    program, named, script = _parts(argv, per)
    if program is _OTHER:
        return True
    is_known = script < len(argv) and argv[script] != "--"
    return bool(program.module) and is_known and not program.own_logs & _options(argv[named:script]).keys()


def _parts(argv: Sequence[str], per: Per | None = None) -> tuple[Program, int, int]:
    """Returns the launcher and the range of its own options, which end at the script or at ``-m``."""
    program, named = program_of(argv, per)
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


def _names_its_program(argv: Sequence[str], place: int, script: int) -> bool:
    """Whether what mpirun starts is known for certain: one program, after options that are all known."""
    options = {word.lstrip("-") for word in argv[place:script] if word.startswith("-")}
    known = options <= _MPIRUN_FLAGS | _MPIRUN_PAIRS | _MPIRUN_VALUES
    return known and ":" not in argv and script < len(argv) and argv[script] != "--"


def _options(argv: Sequence[str]) -> dict[str, str]:
    return {_option(word): word for word in argv if word.startswith("-")}


def _option(word: str) -> str:
    return word.partition("=")[0].replace("_", "-")
