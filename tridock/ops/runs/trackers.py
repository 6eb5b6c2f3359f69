"""A launch's checks of trackers and notifications: secrets, libraries, and reachability."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tridock.cluster.schema import Settings
from tridock.contracts.trackers import CREDENTIALS, NOTIFY, Reachable
from tridock.errors import ClusterError, Problem, RequestError
from tridock.experiment import AnyExperiment, CommandExperiment, Experiment
from tridock.extras import install_command
from tridock.ops.hosts.client import NodeClient
from tridock.ops.runs.this_machine import ask_here
from tridock.tracker_settings import Notifications, Tracker, Trackers, contracts

_TIMEOUT_S = 60.0
E = TypeVar("E", Experiment, CommandExperiment)


@dataclass(frozen=True, slots=True)
class RunTrackers:
    """The trackers and notifications of a run, and the values of their secrets by variable."""

    trackers: Trackers = ()
    notify: Notifications = ()
    secrets: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [it.name for it in self.trackers] + [NOTIFY] * bool(self.notify)


def with_cluster_trackers(experiment: E, settings: Settings) -> E:
    """Returns the experiment with the cluster's trackers and notifications if it names none."""
    given = {"trackers": settings.trackers, "notify": settings.notify}
    return experiment.model_copy(update={name: it for name, it in given.items() if not getattr(experiment, name)})


def trackers_of(experiment: AnyExperiment) -> RunTrackers:
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
        key = _secret(f"trackers[{number}]", tracker.variable, tracker.file)
        if isinstance(key, Problem):
            problems.append(key)
        elif key is not None and own:
            secrets[own[0]] = key
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
    RequestError.raise_for(problems)
    return RunTrackers(experiment.trackers, experiment.notify, secrets)


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


def check_on_head(client: NodeClient, trackers: RunTrackers) -> None:
    """Checks libraries and services from the head. Raises :class:`ClusterError` if a library is missing.

    A service that does not answer causes only a warning: the run's records wait for it.
    """
    if trackers.names:
        argv, given = _question(trackers)
        answer = client.ask(client.head, Reachable, *argv, stdin=given, timeout=_TIMEOUT_S)
        _report(answer, "make image TRACKERS=yes; in an image of your own: pip install {}".format, client.head)


def check_here(trackers: RunTrackers) -> None:
    """Like :func:`check_on_head`, for a run on this machine."""
    if trackers.names:
        asked, given = _question(trackers)
        _report(ask_here(Reachable, *asked, stdin=given or b""), install_command, "this machine")


def _question(trackers: RunTrackers) -> tuple[tuple[str, ...], bytes | None]:
    """Returns the query to the head, and its standard input: the addresses to notify."""
    reach = [f"--reach={address}" for tracker in trackers.trackers if (address := _server(tracker))]
    offline = os.environ.get("WANDB_MODE") == "offline"
    online = any(it.name == "wandb" and not (it.offline or offline) for it in trackers.trackers)
    login = ["--login"] * (online and CREDENTIALS["wandb"][0] not in trackers.secrets)
    notify = {it.variable: trackers.secrets[it.variable] for it in contracts(trackers.notify)}
    argv = ("trackers", *trackers.names, *reach, *login, *["--notify"] * bool(notify))
    return argv, json.dumps(notify).encode() if notify else None


def _server(tracker: Tracker) -> str | None:
    if tracker.offline:
        return None
    variables = {"wandb": ("WANDB_BASE_URL", "https://api.wandb.ai"), "mlflow": ("MLFLOW_TRACKING_URI", None)}
    variable, default = variables.get(tracker.name, ("", None))
    address = tracker.address or os.environ.get(variable) or default
    return address if address is not None and address.startswith(("http://", "https://")) else None


def _report(answer: Reachable, remedy: Callable[[str], str], where: str) -> None:
    missing = answer.missing
    problems = [Problem(f"{where}: {module}", "is not installed", "", remedy(module)) for module in missing]
    ClusterError.raise_for(problems)
    for variable in answer.unknown:
        number = variable.rpartition("_")[2]
        todo = "write one of its forms, as json://host/path, mailtos://user:password@host or slack://…"
        problems.append(Problem(f"notify[{number}]", "holds an address that apprise does not understand", "", todo))
    if not answer.has_login:
        todo = f"export {CREDENTIALS['wandb'][0]} where you launch, or set offline: true"
        problems.append(Problem("trackers: wandb", "has no API key", "", todo))
    RequestError.raise_for(problems)
    for address, reason in answer.unreachable.items():
        line = f"warning: {where}: {address} does not answer ({reason}); the run's records are sent once it does"
        print(line, file=sys.stderr, flush=True)
