"""Building blocks of the command line: a subcommand with its help, and the options that several subcommands share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias, TypeVar

from tridock.cli.output import say
from tridock.contracts import environment
from tridock.contracts.run_folder import is_run_id
from tridock.errors import Problem, RequestError, cut, printable, reason_of

if TYPE_CHECKING:
    from tridock.cluster.settings import Cluster
    from tridock.ops.hosts.client import NodeClient
    from tridock.ops.hosts.hosts import Hosts

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"

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


RUNS: Final = "the active run if there is only one, otherwise the last"


class UsageError(SystemExit):
    """The command line is wrong; the usage and the message have been printed."""

    def __init__(self, message: str) -> None:
        super().__init__(RequestError.exit_code)
        self.message = message


class _Named(argparse.Action):
    """A positional argument that is short for the option of the same destination."""

    def __call__(
        self, _parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, _option: str | None = None
    ) -> None:
        named = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), *named])


class Parser(argparse.ArgumentParser):
    """A parser with the options that several subcommands share."""

    def error(self, message: str) -> NoReturn:
        shown = printable(cut(message, 1000))  # of a wrong word what a terminal can show
        try:
            super().error(shown)
        except SystemExit:
            raise UsageError(shown) from None

    def add_flag(self, name: str, text: str) -> None:
        self.add_argument(name, action="store_true", help=text)

    def _add_named(self, name: str, text: str, *, several: bool, kind: Any) -> None:
        """``--name NAME``, or NAME alone. Both end up in one list."""
        metavar = name.upper()
        nargs, short = ("*", f"short for --{name}; may be several") if several else ("?", f"short for --{name}")
        self.add_argument(name, type=kind, nargs=nargs, action=_Named, default=[], metavar=metavar, help=short)
        self.add_argument(f"--{name}", type=kind, action="append", default=[], dest=name, metavar=metavar, help=text)

    def add_config(self, default: str = "", *, kind: str = "experiment", several: bool = False) -> None:
        text = f"YAML file of the {kind}" + ("; several make a job array" if several else "")
        self._add_named("config", text + (f" (default: {default})" if default else ""), several=several, kind=Path)

    def add_run(self, text: str = "run id", default: str = RUNS, *, several: bool = False) -> None:
        shown = f"{text}{'; repeatable' if several else ''} (default: {default})"
        self._add_named("run", shown, several=several, kind=str)

    def add_cluster(self) -> None:
        """``--hosts``, ``--include`` and ``--exclude``: the cluster, or a part of it."""
        add_hosts(self)
        add_slots(self)

    def add_set(self) -> None:
        text = (
            "override a field of the experiment, e.g. train.seed=7 (model.preset: the file's whole model); repeatable"
        )
        self.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)

    def add_quiet(self) -> None:
        self.add_argument("-q", "--quiet", action="store_true", help="print results and errors, but no progress")

    def add_yes(self) -> None:
        text = "allow what the run's folder would execute or set here: program, code, env, trackers, notifications"
        self.add_flag("--yes", text)

    def add_workspace(self, where: str = "") -> None:
        text = f"folder with data/ and runs/{where} (default: the current folder)"
        self.add_argument("--workspace", type=named_path, default=Path(), metavar="DIR", help=text)


class Arguments(argparse.Namespace):
    """A subcommand's arguments, and what several subcommands make of them."""

    def note(self, text: str) -> None:
        """Prints lines of progress, unless ``--quiet`` is given."""
        if not self.quiet:
            say(text)

    @property
    def named_config(self) -> Path | None:
        return _only("config", self.config)

    @property
    def required_config(self) -> Path:
        """The experiment that is named. Raises :class:`RequestError` if there is none."""
        if (config := self.named_config) is None:
            todo = "give a YAML file, as in --config configs/demo-3d.yaml"
            raise RequestError(Problem("--config", "is missing", "", todo))
        return config

    @property
    def named_run(self) -> str | None:
        return _only("run", self.run)

    @property
    def found_hostfile(self) -> Path | None:
        """The hostfile that is named, or else the one that is here; None if there is none."""
        if named := self.hosts or os.environ.get(environment.HOSTS):
            return Path(named)
        return DEFAULT_HOSTFILE if DEFAULT_HOSTFILE.exists() else None

    @property
    def hostfile(self) -> Path:
        """The hostfile. Raises :class:`RequestError` if there is none: a run never falls back to this machine alone."""
        if (found := self.found_hostfile) is None:
            todo = "give a DeepSpeed hostfile: a line `host slots=8` for each host, as in hostfiles/example"
            raise RequestError(Problem("--hosts", f"is missing, and there is no ./{DEFAULT_HOSTFILE}", "", todo))
        return found

    def is_run_folder(self, run: str) -> bool:
        """Whether a run is named by its folder, which is the only way without a cluster."""
        return "/" in run or Path(run).is_dir() or self.found_hostfile is None

    def open_hosts(self, change: Callable[[Cluster], Cluster] = lambda cluster: cluster) -> Hosts:
        """The hosts of the cluster that the options name, as ``change`` leaves it. Contacts none of them yet."""
        from tridock.cluster.settings import load_cluster
        from tridock.ops.hosts.hosts import Hosts
        from tridock.ops.image.ensure import with_built_image

        cluster = load_cluster(self.hostfile, self.include, self.exclude)
        if not getattr(self, "dry_run", False):  # which asks no program anything
            cluster = with_built_image(cluster)
        return Hosts(change(cluster), quiet=getattr(self, "quiet", False))

    def open_client(self) -> NodeClient:
        """A client of the nodes of the cluster that the options name; reads the states of its hosts."""
        from tridock.ops.hosts.client import NodeClient

        return NodeClient.of(self.open_hosts())

    def confirm(self, run: Path, effects: Sequence[str]) -> None:
        """Asks the user, who may have given ``--yes``, to allow what a run's folder would execute or set."""
        if not effects:
            return
        print(f"{run} would:", *map(printable, effects), sep="\n  ", file=sys.stderr, flush=True)
        if self.yes or (sys.stdin.isatty() and says_yes("allow it?")):
            return
        todo = "read the lines above, then give --yes; a host may have written this folder"
        raise RequestError(Problem(str(run), "is not allowed to do that", "", todo))


def _only(option: str, named: Sequence[T]) -> T | None:
    if len(named) > 1:
        got = " ".join(map(str, named))
        raise RequestError(Problem(f"--{option}", "is given more than once", got, "give one"))
    return named[0] if named else None


Action: TypeAlias = Callable[[Arguments], int]


def add_command(commands: Commands, name: str, action: Action, summary: str, *examples: str) -> Parser:
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
        place = next(it for it in (path, *path.absolute().parents) if it.exists())
    except (OSError, ValueError) as error:  # too long, with a NUL, or below a folder that is not ours to read
        raise argparse.ArgumentTypeError(f"{value!r}: {reason_of(error)}; give another file") from None
    if place == path and not path.is_file():
        raise argparse.ArgumentTypeError(f"{value!r} is a {'folder' if path.is_dir() else 'device'}; give a file")
    if place != path and not place.is_dir():
        raise argparse.ArgumentTypeError(f"{str(place)!r} is a file; give a folder's name before the last /")
    if not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{value!r} cannot be written by you; give another file")
    return path


def number(kind: Callable[[str], T], range_: str, is_inside: Callable[[T], bool]) -> Callable[[str], T]:
    """The type of an option that is a number in a range, which ``range_`` says in words."""

    def read(value: str) -> T:
        found = kind(value)
        if not is_inside(found):
            raise argparse.ArgumentTypeError(f"must be {range_}; got {value}")
        return found

    read.__name__ = kind.__name__  # argparse names it for a word that is no number
    return read


def run_id_file(value: str) -> Path:
    """The type of ``--run-id-file``: a file that is new, empty or of an earlier run, and never an experiment."""
    path = output_file(value)
    if not path.exists():
        return path
    output_file(str(path.absolute().parent / "new"))  # the file is replaced
    with path.open("rb") as file:
        text = file.read(1000).decode(errors="replace").strip()
    if text and not is_run_id(text):
        raise argparse.ArgumentTypeError(f"{value!r} does not hold a run id; give another file, or remove it")
    return path


def add_group(commands: Commands, name: str, summary: str) -> Commands:
    description = f"{summary[0].upper()}{summary[1:]}."
    parser = commands.add_parser(name, help=summary, description=description, formatter_class=HelpFormatter)
    return parser.add_subparsers(required=True, metavar="COMMAND")


def add_hosts(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = (
        "DeepSpeed hostfile (`host slots=N` per line); the cluster's settings are in HOSTFILE.yaml"
        f" (default: ${environment.HOSTS}, or ./{DEFAULT_HOSTFILE})"
    )
    parser.add_argument("--hosts", type=Path, metavar="HOSTFILE", help=text)


def add_slots(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    text = "use only these nodes and slots, e.g. host-a@host-b:0,2"
    parser.add_argument("--include", default="", metavar="NODES", help=text)
    parser.add_argument("--exclude", default="", metavar="NODES", help="use all nodes and slots except these")


def says_yes(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def named_path(value: str) -> Path:
    if not value:  # as with an unset variable: not the current folder
        raise argparse.ArgumentTypeError("the name is empty")
    return Path(value)
