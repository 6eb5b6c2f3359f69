"""Checks whether this node has the libraries of trackers and notifications, and whether their servers answer."""

import json
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from tridock.contracts.trackers import LIBRARIES, NOTIFY, Reachable, find_python, has_wandb_login
from tridock.errors import Problem, RequestError

_PATIENCE_S: Final = 5.0
_APPRISE_S: Final = 60.0
_PORTS: Final = {"http": 80, "https": 443}


_KNOWN: Final = """
import apprise, json, sys
given = json.load(sys.stdin)
print(json.dumps([name for name, address in given.items() if apprise.Apprise.instantiate(address) is None]))
"""


def reachable(
    names: Sequence[str], addresses: Sequence[str], notify: Mapping[str, str], *, asks_login: bool
) -> Reachable:
    """Returns the modules of these trackers that no Python here has, and the servers that refuse connections.

    ``notify``: apprise's addresses by variable; ``asks_login``: whether W&B's key must be here.
    """
    modules = dict.fromkeys(LIBRARIES[name] for name in names)
    missing = tuple(module for module in modules if find_python(module) is None)
    failures = {address: _failure(address) for address in dict.fromkeys(addresses)}
    return Reachable(
        missing,
        {address: why for address, why in failures.items() if why is not None},
        unknown=_unknown(notify),
        has_login=not asks_login or has_wandb_login(),
    )


def _unknown(notify: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the variables whose address apprise rejects; apprise's own messages would reveal secrets."""
    python = find_python(LIBRARIES[NOTIFY]) if notify else None
    if python is None:
        return ()
    argv, given = [python, "-P", "-c", _KNOWN], json.dumps(notify).encode()
    try:
        done = subprocess.run(argv, input=given, capture_output=True, timeout=_APPRISE_S, check=True)
    except subprocess.TimeoutExpired:
        todo = f"see what delays `{python} -c 'import apprise'` there, or leave notify out"
        got = f"nothing within {_APPRISE_S:g} s"
        raise RequestError(
            Problem("notify", "apprise does not say whether it knows the addresses", got, todo)
        ) from None
    return tuple(json.loads(done.stdout))


def _failure(address: str) -> str | None:
    parts = urlsplit(address)
    try:
        place = (parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 443))
        socket.create_connection(place, timeout=_PATIENCE_S).close()
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return None
