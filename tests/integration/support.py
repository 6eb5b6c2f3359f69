"""What the integration tests share beside the fixtures: commands, containers, waiting."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from tests.patience import STEP_S, WORK_S

ROOT = Path(__file__).resolve().parents[2]
# What every container, network, volume and image of one pytest session begins with; its workers inherit it.
SESSION = "tridock-test-" + os.environ.setdefault("TEST_SESSION", uuid.uuid4().hex[:8])
CPU_IMAGE = f"{SESSION}:cpu"
HOST_IMAGE = f"{SESSION}:host"
_TEMPORARY = Path(tempfile.gettempdir())
_LOCK = "lock"
_held: list[IO[str]] = []


def execute(*argv: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; output is captured, and the exit code is the caller's to judge."""
    settings: dict[str, object] = {"capture_output": True, "text": True, "timeout": WORK_S, "check": False, **options}
    return subprocess.run(argv, **settings)  # type: ignore[call-overload]


def succeed(*argv: str, **options: object) -> str:
    """Runs a command that has to succeed, and gives its standard output."""
    done = execute(*argv, **options)
    assert done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def give(path: Path, uid: int, gid: int | None = None) -> None:
    """Makes a file a user's, and not what a link names. Skips the test where only root may do that."""
    if os.getuid() not in (0, uid):
        pytest.skip("giving files to another user takes root")
    if os.getuid() == 0:
        os.chown(path, uid, uid if gid is None else gid, follow_symlinks=False)


def own_name() -> str:
    return f"{SESSION}-{uuid.uuid4().hex[:6]}"


def hold_session() -> None:
    """Locks the session's folder until this process ends: another session may remove what a killed one left."""
    folder = _TEMPORARY / SESSION
    folder.mkdir(exist_ok=True)
    new = folder / f"{_LOCK}.new"
    file = new.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    new.rename(folder / _LOCK)  # it is never there without being held
    _held.append(file)


def killed_sessions() -> Iterator[str]:
    """Yields the sessions that ended without removing what is theirs: nobody holds their lock."""
    for lock in _TEMPORARY.glob(f"tridock-test-*/{_LOCK}"):
        name = lock.parent.name
        with suppress(OSError), lock.open("a") as file:  # one that is held, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if re.fullmatch(r"tridock-test-[0-9a-f]{8}", name):
                yield name


def remove_everything(session: str = SESSION) -> None:
    """Removes what a session has left, as after Ctrl-C; the build's cache stays."""
    for list_, remove in (
        ("ps --all --quiet --filter name=", "rm --force --volumes"),
        ("network ls --quiet --filter name=", "network rm"),
        ("volume ls --quiet --filter name=", "volume rm --force"),
    ):
        if names := execute("docker", *f"{list_}{session}".split()).stdout.split():
            execute("docker", *remove.split(), *names)
    images = execute("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
    if names := [name for name in images if name.startswith(session)]:
        execute("docker", "image", "rm", *names)
    shutil.rmtree(_TEMPORARY / session, ignore_errors=True)


def pause(container: str) -> None:
    """Pauses a container. The kernel cannot freeze a process in each of its states, so `docker pause` may fail once."""
    wait_until(lambda: execute("docker", "pause", container).returncode == 0, f"{container} is paused")


def inside(container: str, *arguments: str, user: str = "tridock") -> str:
    """Runs a command in a container that is up, as the operator's user."""
    return succeed("docker", "exec", "--user", user, container, *arguments)


@contextmanager
def once(name: str) -> Iterator[bool]:
    """Whether this worker is the session's first here; the others wait until its block has ended."""
    folder = _TEMPORARY / SESSION
    folder.mkdir(exist_ok=True)
    with (folder / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first = os.fstat(file.fileno()).st_size == 0
        yield first
        if first:
            file.write("done\n")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = STEP_S) -> None:
    """Asks again and again, but leaves the processor to others for twice as long as a question takes."""
    deadline, asked = time.monotonic() + seconds, time.monotonic()
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"after {seconds:.0f} s still not: {what}"
        time.sleep(min(1.0, max(0.1, 2 * (now - asked))))
        asked = time.monotonic()


@dataclass
class Containers:
    """Containers of one test, each under a name of its own, removed at the end."""

    image: str
    names: list[str] = field(default_factory=list)

    def start(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """Starts a container in the background and gives its name."""
        name = own_name()
        self.names.append(name)
        succeed("docker", "run", "--detach", "--name", name, *options, self.image, *arguments)
        return name

    def run(self, *arguments: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Runs a container to its end."""
        return execute("docker", "run", "--rm", *options, self.image, *arguments)

    def remove(self) -> None:
        if self.names:
            execute("docker", "rm", "--force", "--volumes", *self.names)


@dataclass
class Twin:
    """Two nodes in a network of their own, started without Compose."""

    names: Mapping[str, str]
    secrets: Mapping[str, Path]
    workspace: Path

    def __getitem__(self, node: str) -> str:
        return self.names[node]
