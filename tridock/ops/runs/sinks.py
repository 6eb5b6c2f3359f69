"""A launch's checks of trackers and notifications: secrets, libraries, and reachability."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tridock.contracts.codec import decode
from tridock.contracts.sinks import CREDENTIALS, EXTRAS, NOTIFY, Reachable
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import Experiment
from tridock.experiment.command import CommandExperiment
from tridock.ops.runs.this_machine import node_argv, node_environment
from tridock.sink_settings import Notifications, Tracker, Trackers, contracts

if TYPE_CHECKING:
    from tridock.cluster.schema import Settings
    from tridock.ops.hosts.session import Session

_TIMEOUT_S = 60.0
AnyExperiment = TypeVar("AnyExperiment", Experiment, CommandExperiment)


@dataclass(frozen=True, slots=True)
class Sinks:
    """The trackers and notifications of a run, and the values of their secrets by variable."""

    trackers: Trackers = ()
    notify: Notifications = ()
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [it.name for it in self.trackers] + [NOTIFY] * bool(self.notify)


def with_cluster_sinks(experiment: AnyExperiment, settings: Settings) -> AnyExperiment:
    """Returns the experiment with the cluster's trackers and notifications if it names none."""
    given = {"trackers": settings.trackers, "notify": settings.notify}
    return experiment.model_copy(update={name: it for name, it in given.items() if not getattr(experiment, name)})


def sinks_of(experiment: Experiment | CommandExperiment) -> Sinks:
    """Reads the secrets from this machine's variables and files.

    Raises :class:`RequestError` for each one named but missing, and for credentials in ``env``, which the run's folder
    would contain.
    """
    secrets: dict[str, str] = {}
    problems: list[Problem] = []
    for number, tracker in enumerate(experiment.trackers):
        own = CREDENTIALS.get(tracker.name, ())
        problems += _exposed(experiment.env, own)
        secrets |= {name: os.environ[name] for name in own if os.environ.get(name)}
        try:
            key = key_of(f"trackers[{number}]", tracker)
        except RequestError as error:
            problems += error.problems
            continue
        secrets |= {own[0]: key} if key is not None and own else {}
    for (number, it), contract in zip(enumerate(experiment.notify), contracts(experiment.notify), strict=True):
        found = _secret(f"notify[{number}]", it.variable, it.file)
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            if "://" not in found:
                where = f"notify[{number}].{'file' if it.file else 'variable'}"
                todo = "write apprise's form, as json://host/path, mailtos://… or slack://…"
                problems.append(Problem(where, "holds no address", it.file or str(it.variable), todo))
            secrets[contract.variable] = found
    if problems:
        raise RequestError(problems)
    return Sinks(experiment.trackers, experiment.notify, secrets)


def key_of(where: str, tracker: Tracker) -> str | None:
    """Returns the key in a tracker's variable or file; None if it names none. Raises :class:`RequestError`."""
    found = _secret(where, tracker.variable, tracker.file)
    if isinstance(found, Problem):
        raise RequestError(found)
    return found


def _exposed(env: Mapping[str, str], names: tuple[str, ...]) -> Iterator[Problem]:
    for name in names:
        if name in env:
            todo = "remove it, and export it in the shell that you launch from"
            yield Problem(f"env.{name}", "would be readable by everyone in the run folder", "a secret", todo)


def _secret(where: str, variable: str | None, file: str | None) -> str | Problem | None:
    if variable is not None:
        if not (value := os.environ.get(variable)):
            return Problem(f"{where}.variable", "is not set", variable, "export it in the shell that you launch from")
        return value
    if file is None:
        return None
    try:
        value = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        got = f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8'}"
        return Problem(f"{where}.file", "cannot be read", got, "name a text file on this machine")
    return value or Problem(f"{where}.file", "is empty", file, "write the secret into it")


def check_on_head(session: Session, sinks: Sinks) -> None:
    """Checks libraries and services from the head. Raises :class:`ClusterError` if a library is missing.

    A service that does not answer causes only a warning: the run's records wait for it.
    """
    if sinks.names:
        argv, given = _question(sinks)
        answer = session.ask(session.head, Reachable, *argv, stdin=given, timeout=_TIMEOUT_S)
        todo = "make image TRACKERS=yes; in an image of your own: pip install 'tridock[{extra}]'"
        _report(answer, todo, session.head)


def check_here(sinks: Sinks) -> None:
    """Like :func:`check_on_head`, for a run on this machine."""
    if sinks.names:
        asked, given = _question(sinks)
        argv, env = [*node_argv(), *asked], node_environment(1)
        done = subprocess.run(argv, env=env, input=given or b"", capture_output=True, check=True)
        _report(
            decode(Reachable, done.stdout),
            "pip install 'tridock[{extra}]', or make trackers in a checkout",
            "this machine",
        )


def _question(sinks: Sinks) -> tuple[tuple[str, ...], bytes | None]:
    """Returns the query to the head, and its standard input: the addresses to notify."""
    reach = [f"--reach={address}" for tracker in sinks.trackers if (address := _server(tracker))]
    offline = os.environ.get("WANDB_MODE") == "offline"
    online = any(it.name == "wandb" and not (it.offline or offline) for it in sinks.trackers)
    login = ["--login"] * (online and CREDENTIALS["wandb"][0] not in sinks.secrets)
    notify = {it.variable: sinks.secrets[it.variable] for it in contracts(sinks.notify)}
    argv = ("sinks", *sinks.names, *reach, *login, *["--notify"] * bool(notify))
    return argv, json.dumps(notify).encode() if notify else None


def _server(tracker: Tracker) -> str | None:
    if tracker.offline:
        return None
    variables = {"wandb": ("WANDB_BASE_URL", "https://api.wandb.ai"), "mlflow": ("MLFLOW_TRACKING_URI", None)}
    variable, default = variables.get(tracker.name, ("", None))
    address = tracker.address or os.environ.get(variable) or default
    return address if address is not None and address.startswith(("http://", "https://")) else None


def _report(answer: Reachable, remedy: str, where: str) -> None:
    problems = []
    for module in answer.missing:
        extra = next(extra for library, extra in EXTRAS.values() if library == module)
        problems.append(Problem(f"{where}: {module}", "is not installed", "", remedy.format(extra=extra)))
    if problems:
        raise ClusterError(problems)
    for variable in answer.unknown:
        number = variable.rpartition("_")[2]
        todo = "write one of its forms, as json://host/path, mailtos://user:password@host or slack://…"
        problems.append(Problem(f"notify[{number}]", "holds an address that apprise does not understand", "", todo))
    if not answer.has_login:
        todo = f"export {CREDENTIALS['wandb'][0]} where you launch, or set offline: true"
        problems.append(Problem("trackers: wandb", "has no API key", "", todo))
    if problems:
        raise RequestError(problems)
    for address, reason in answer.unreachable.items():
        line = f"warning: {where}: {address} does not answer ({reason}); the run's records are sent once it does"
        print(line, file=sys.stderr, flush=True)
