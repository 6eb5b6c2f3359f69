"""Building blocks of the command line: a subcommand with its help, and the options that several subcommands share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

from tridock.contracts import environment
from tridock.contracts.run_folder import is_run_id
from tridock.errors import Problem, RequestError, cut, printable

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.ops.hosts.session import Session

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Action: TypeAlias = Callable[[argparse.Namespace], int]

T = TypeVar("T")

DEFAULT_HOSTFILE: Final = Path("hostfile")
_EXAMPLES: Final = "examples:\n"


class HelpFormatter(argparse.HelpFormatter):
    """Wraps every text but the examples, which keep their lines."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if action.nargs == argparse.PARSER:  # argparse forgets that subcommands are indented, and breaks the longest
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class UsageError(SystemExit):
    """The command line is wrong; the usage and the message have been printed."""

    def __init__(self, message: str) -> None:
        super().__init__(RequestError.exit_code)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Prints of a wrong word what a terminal can show, and no more than a screen holds."""

    def error(self, message: str) -> NoReturn:
        shown = printable(cut(message, 1000))
        try:
            super().error(shown)
        except SystemExit:
            raise UsageError(shown) from None


def add_command(commands: Commands, name: str, action: Action, summary: str, *examples: str) -> argparse.ArgumentParser:
    """Adds a subcommand. ``action`` runs it and returns the exit code; its docstring is the description.

    ``examples`` are the arguments of a command line each, after the subcommand's name.
    """
    lines = [f"  %(prog)s {example}".rstrip() for example in examples]
    parser = commands.add_parser(
        name,
        help=summary,
        description=action.__doc__,
        epilog=_EXAMPLES + "\n".join(lines),
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(action=action)
    return parser


def output_file(value: str) -> Path:
    """The type of an option that names a file to write: refused before anything starts, not when it is written."""
    path = Path(value)
    try:
        place = next((folder for folder in path.absolute().parents if folder.exists()), path)  # / has no parent
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, with a NUL, or below a folder that is not ours to read
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"{value!r}: {reason}; give another file") from None
    if exists and not path.is_file():
        raise argparse.ArgumentTypeError(f"{value!r} is a {'folder' if path.is_dir() else 'device'}; give a file")
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"{str(place)!r} is a file; give a folder's name before the last /")
    if not os.access(path if exists else place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{value!r} cannot be written by you; give another file")
    return path


def run_id_file(value: str) -> Path:
    """The type of ``--run-id-file``: a file that is new, empty or of an earlier run, and never an experiment."""
    path = output_file(value)
    if not path.exists():
        return path
    folder = path.absolute().parent
    if not os.access(folder, os.W_OK):  # the file is replaced
        raise argparse.ArgumentTypeError(f"{str(folder)!r} cannot be written by you; give another file")
    try:
        with path.open("rb") as file:
            text = file.read(1000).decode(errors="replace").strip()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{value!r}: {error.strerror}; give another file") from None
    if text and not is_run_id(text):
        raise argparse.ArgumentTypeError(f"{value!r} does not hold a run id; give another file, or remove it")
    return path


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    """Adds a subcommand that only groups others, and returns where they are added."""
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description, formatter_class=HelpFormatter)
    return parser.add_subparsers(required=True, metavar="COMMAND")


class _Named(argparse.Action):
    """A positional argument that is short for the option of the same destination."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        named = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *named])


def _add_named(parser: argparse.ArgumentParser, name: str, text: str, *, several: bool, kind: Any) -> None:
    """``--name NAME``, or NAME alone. Both end up in one list."""
    metavar = name.upper()
    nargs, short = ("*", f"short for --{name}; may be several") if several else ("?", f"short for --{name}")
    parser.add_argument(name, type=kind, nargs=nargs, action=_Named, default=[], metavar=metavar, help=short)
    parser.add_argument(f"--{name}", type=kind, action="append", default=[], dest=name, metavar=metavar, help=text)


def add_config(
    parser: argparse.ArgumentParser, default: str = "", *, kind: str = "experiment", several: bool = False
) -> None:
    text = f"YAML file of the {kind}" + ("; several make a job array" if several else "")
    text += f" (default: {default})" if default else ""
    _add_named(parser, "config", text, several=several, kind=Path)


def config_of(arguments: argparse.Namespace) -> Path | None:
    """The experiment that is named, or None."""
    return _only("config", arguments.config)


def require_config(arguments: argparse.Namespace) -> Path:
    """The experiment that is named. Raises :class:`RequestError` if there is none."""
    if (config := config_of(arguments)) is None:
        todo = "give a YAML file, as in --config configs/demo-3d.yaml"
        raise RequestError(Problem("--config", "is missing", "", todo))
    return config


def configs_of(arguments: argparse.Namespace) -> list[Path]:
    """The experiments that are named. Raises :class:`RequestError` if there is none."""
    return arguments.config or [require_config(arguments)]


def _only(option: str, named: Sequence[T]) -> T | None:
    if len(named) > 1:
        got = " ".join(map(str, named))
        raise RequestError(Problem(f"--{option}", "is given more than once", got, "give one"))
    return named[0] if named else None


RUNS: Final = "the active run if there is only one, otherwise the last"


def add_run(
    parser: argparse.ArgumentParser, text: str = "run id", default: str = RUNS, *, several: bool = False
) -> None:
    shown = f"{text}{'; repeatable' if several else ''} (default: {default})"
    _add_named(parser, "run", shown, several=several, kind=str)


def run_of(arguments: argparse.Namespace) -> str | None:
    """The run that is named, or None."""
    return _only("run", arguments.run)


def add_run_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder: runs/<run-id>")


def add_hosts(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = (
        "DeepSpeed hostfile (`host slots=N` per line); the cluster's settings are in HOSTFILE.yaml"
        f" (default: ${environment.HOSTS}, or ./{DEFAULT_HOSTFILE})"
    )
    parser.add_argument("--hosts", type=Path, metavar="HOSTFILE", help=text)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """``--hosts``, ``--include`` and ``--exclude``: the cluster, or a part of it."""
    add_hosts(parser)
    add_slots(parser)


def find_hostfile(arguments: argparse.Namespace) -> Path | None:
    """The hostfile that is named, or else the one that is here; None if there is none."""
    if arguments.hosts is not None:
        return Path(arguments.hosts)
    if named := os.environ.get(environment.HOSTS):
        return Path(named)
    return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.exists() else None


def hostfile_of(arguments: argparse.Namespace) -> Path:
    """The hostfile. Raises :class:`RequestError` if there is none: a run never falls back to this machine alone."""
    if (found := find_hostfile(arguments)) is None:
        todo = "give a DeepSpeed hostfile: a line `host slots=8` for each host, as in hostfiles/example"
        raise RequestError(Problem("--hosts", f"is missing, and there is no ./{DEFAULT_HOSTFILE}", "", todo))
    return found


def open_session(
    arguments: argparse.Namespace,
    change: Callable[[Cluster], Cluster] = lambda cluster: cluster,
    *,
    ahead: bool = False,
) -> Session:
    """The cluster that the options name, as ``change`` leaves it. Contacts no host yet, unless ``ahead``.

    Call it before the imports that a command needs: meanwhile ssh looks up where the hosts are, and with ``ahead``
    connections open.
    """
    hostfile = hostfile_of(arguments)
    try:
        from tridock.ops.hosts.session import Session

        session = Session.open(hostfile, arguments.include, arguments.exclude, change, ahead=ahead)
    except ModuleNotFoundError as missing:
        todo = "run it on the machine from which you manage the hosts: a node has no access to them"
        raise RequestError(Problem("--hosts", "needs the package fabric", str(missing), todo)) from None
    session.quiet = getattr(arguments, "quiet", False)
    return session


def add_set(parser: argparse.ArgumentParser) -> None:
    text = "override a field of the experiment, e.g. train.seed=7; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)


def add_slots(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = "use only these nodes and slots, e.g. host-a@host-b:0,2"
    parser.add_argument("--include", default="", metavar="NODES", help=text)
    parser.add_argument("--exclude", default="", metavar="NODES", help="use all nodes and slots except these")


def add_quiet(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and errors, but no progress")


def add_workspace(parser: argparse.ArgumentParser, where: str = "") -> None:
    text = f"folder with data/ and runs/{where} (default: the current folder)"
    parser.add_argument("--workspace", type=_folder, default=Path(), metavar="DIR", help=text)


def _folder(value: str) -> Path:
    if not value:  # as with an unset variable: not the current folder
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(value)
