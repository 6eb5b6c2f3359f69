"""Ensures the cluster's image: identifies it and brings it to every host that lacks it, without a registry."""

import fcntl
import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.session import Session
from tridock.ops.image.wrap import ensure_wrapped
from tridock.remote import LocalHost


def ensure_image(session: Session) -> str:
    """Brings the image to every host that lacks it and returns its id, the same on all of them.

    Tridock's layer on another image is built here first. :func:`verify` says whether the hosts have it then.
    """
    ensure_wrapped(session.cluster)
    wanted = wanted_image(session)
    if lacking(session, wanted):
        from tridock.ops.image.send import distribute  # most commands send no image

        with _cache(session) as folder:
            if missing := lacking(session, wanted):
                keep = distribute(session, wanted, missing, folder)
                session.forget_states()
                for path in folder.iterdir():
                    if path.name not in keep:
                        path.unlink()
    return wanted


def lacking(session: Session, wanted: str) -> tuple[str, ...]:
    """Returns the nodes whose hosts lack the image."""
    return tuple(node for node, state in session.states().items() if not state.has(wanted))


def local_image_id(image: str) -> str | None:
    """Returns the image's id on the operator's machine, or None if the image or Docker is missing."""
    if shutil.which("docker") is None:
        return None
    command = Command.of("docker", "image", "inspect", "--format", "{{.Id}}", image)
    done = LocalHost().run(command, timeout=30.0)
    return done.stdout.decode().strip() if done.exit_code == 0 else None


def wanted_image(session: Session) -> str:
    """Returns the operator's image, or if there is none here, the one that all hosts agree on."""
    return image_of_hosts(session, local_image_id(session.cluster.settings.image))


def image_of_hosts(session: Session, local: str | None) -> str:
    """Returns the operator's image ``local``, or if there is none here, the one that all hosts agree on."""
    image = session.cluster.settings.image
    if local is not None:
        return local
    found = {state.image_id for state in session.states().values()}
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    flavor = " --flavor cpu" if image.endswith(":cpu") else ""
    ids = ((node, state.image_id) for node, state in session.states().items())
    got = ", ".join(f"{id_[:19]} on {node}" if id_ else f"none on {node}" for node, id_ in ids)
    raise ClusterError(
        Problem(image, "is not on this machine, and not the same on every host", got, f"run tridock image{flavor} here")
    )


@contextmanager
def _cache(session: Session) -> Iterator[Path]:
    """Locks and yields this cluster's layer cache on the operator's machine.

    The layers that an interrupted command exported are reused by the next.
    """
    sender = f"{socket.gethostname()} {os.getuid()} {session.cluster.state_folder}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "tridock" / "layers" / hashlib.sha256(sender.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = folder.with_suffix(".lock").open("w")
    except OSError as error:
        todo = "make it yours to write, or set XDG_CACHE_HOME to another folder"
        raise ClusterError(Problem(str(folder), "cannot be used for layers", error.strerror or "", todo)) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            _note(f"another command brings an image to {session.cluster.name}; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
            session.forget_states()
        for part in folder.glob("*.part"):
            part.unlink()
        yield folder


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def verify(session: Session, wanted: str) -> None:
    """Raises :class:`ClusterError` with each host that lacks the image, though it was sent there."""
    wrong = [(node, state.image_id) for node, state in session.states().items() if not state.has(wanted)]
    if wrong:
        raise ClusterError(
            Problem(node, f"holds another image after loading than {wanted}", str(found), "look at docker load there")
            for node, found in wrong
        )
