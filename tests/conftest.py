"""What holds for every test."""

import errno
import gc
import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import killed_suites
from tests.core_seconds import pytest_sessionfinish, pytest_sessionstart  # noqa: F401  (hooks)
from tests.parts import pytest_addoption, pytest_collection_modifyitems  # noqa: F401  (hooks)

# A shell that starts the tests in its background lets them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What is started here writes as it does for users, who seldom have this set.
os.environ.pop("PYTHONUNBUFFERED", None)

# What tests compile stays in this working tree: a compiler that is killed leaves a lock for which the next one waits
# for ever, and in the home that would be any other program's.
for _name in ("TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
    os.environ[_name] = str(Path(__file__).parents[1] / ".cache" / _name.lower())

# How long an example takes depends on what else the machine does: a deadline would fail good code.
settings.register_profile("tridock", deadline=None, max_examples=50)
settings.register_profile("tridock-full", deadline=None, max_examples=200)


def pytest_configure(config: pytest.Config) -> None:
    """The full matrices try more examples too."""
    if not hasattr(config, "workerinput"):
        killed_suites.end_theirs()
        killed_suites.mark()
    settings.load_profile("tridock" if "not full" in config.getoption("markexpr") else "tridock-full")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> None:
    """What a command printed before its time was up is part of the failure."""
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, subprocess.TimeoutExpired | subprocess.CalledProcessError):
        for printed in filter(None, (error.stdout, error.stderr)):
            error.add_note(printed if isinstance(printed, str) else printed.decode(errors="replace"))


def pytest_collection_finish() -> None:
    """Modules stay to the end: no garbage collection has to walk through those of torch again."""
    gc.collect()
    gc.freeze()


# ---- a unit test contacts nobody -----------------------------------------------------------------

_UNIT = tuple(Path(__file__).parent / folder for folder in ("unit", "shell"))
_OWN = (None, "", "localhost", socket.gethostname())
_contacts: list[str] | None = None
"""What the unit test that runs has tried to contact."""


def _is_own(host: object) -> bool:
    """Whether it is this machine, or a name that never exists (RFC 6761)."""
    name = host.decode() if isinstance(host, bytes) else host
    if name in _OWN or str(name).endswith(".invalid"):
        return True
    family = socket.AF_INET6 if ":" in str(name) else socket.AF_INET
    try:
        ipaddress.ip_address(str(name).partition("%")[0])
        with socket.socket(family) as own:
            own.bind((name, 0))
    except (ValueError, OSError):
        return False
    return True


def _refuse_others(event: str, arguments: tuple[Any, ...]) -> None:
    if _contacts is None:
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # of a path, or connected before
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = arguments[0]
    else:
        return
    if not _is_own(host):
        _contacts.append(f"{event} {host}")
        raise OSError(errno.ENETUNREACH, "a unit test contacts this machine only")


sys.addaudithook(_refuse_others)


@pytest.fixture(autouse=True)
def contacts(request: pytest.FixtureRequest) -> Iterator[None]:
    """A unit test that connects to another machine, or looks up its name, fails, and reaches nobody."""
    global _contacts
    _contacts = [] if any(map(request.path.is_relative_to, _UNIT)) else None
    yield
    tried, _contacts = _contacts, None
    assert not tried, tried
