"""The cluster's image: which one it is, and how it reaches hosts that lack it, without a registry."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from tridock.command import Command
from tridock.errors import ClusterError, Problem
from tridock.ops.hosts.session import Session
from tridock.remote import Host, LocalHost

_CHUNK = 1 << 20
# `docker load` of every release reads gzip; zstd only newer ones.
_COMPRESSORS = (("pigz", "-1"), ("gzip", "-1"))


def ensure_image(session: Session) -> str:
    """Brings the image to every host that lacks it and returns its id, the same on all of them."""
    wanted = wanted_image(session)
    missing = tuple(node for node, state in session.states().items() if state.image_id != wanted)
    if missing:
        _send(session, wanted, missing)
        session.forget_states()
        _verify(session, wanted)
    return wanted


def local_image_id(image: str) -> str | None:
    """The image's id on the operator's machine, or None where it (or Docker) is not there."""
    if shutil.which("docker") is None:
        return None
    command = Command.of("docker", "image", "inspect", "--format", "{{.Id}}", image)
    done = LocalHost().run(command, timeout=30.0)
    return done.stdout.decode().strip() if done.exit_code == 0 else None


def wanted_image(session: Session) -> str:
    """The operator's image; where there is none here, the one that all hosts already agree on."""
    image = session.cluster.settings.image
    local = local_image_id(image)
    if local is not None:
        return local
    found = {state.image_id for state in session.states().values()}
    if len(found) == 1 and (only := found.pop()) is not None:
        return only
    flavor = " --flavor cpu" if image.endswith(":cpu") else ""
    held = ((node, state.image_id) for node, state in session.states().items())
    got = ", ".join(f"{id_[:19]} on {node}" if id_ else f"none on {node}" for node, id_ in held)
    raise ClusterError(
        Problem(image, "is not on this machine, and not the same on every host", got, f"run tridock image{flavor} here")
    )


def _send(session: Session, image_id: str, nodes: tuple[str, ...]) -> None:
    """Compresses the image once, then sends the file to all of ``nodes`` at the same time."""
    image = session.cluster.settings.image
    with tempfile.TemporaryDirectory(prefix="tridock-image-") as folder, _progress() as progress:
        archive = Path(folder) / "image.tar.gz"
        _save(image, archive, progress)
        size = archive.stat().st_size
        bars = {node: progress.add_task(f"send to {node}", total=size) for node in nodes}

        def send(node: str, host: Host) -> None:
            done = host.pipe(
                _chunks(archive), Command.of("docker", "load", "--quiet"),
                progress=lambda count: progress.advance(bars[node], count),
            )  # fmt: skip
            done.checked(node)
            # A saved image carries its name; an older one of that name on the host loses it to this one.
            host.run(Command.of("docker", "tag", image_id, image), timeout=30.0).checked(node)

        session.each(send, only=nodes)


def _save(image: str, archive: Path, progress: Progress) -> None:
    size = int(
        LocalHost().run(Command.of("docker", "image", "inspect", "--format", "{{.Size}}", image), timeout=30.0).stdout
    )
    bar = progress.add_task(f"compress {image}", total=size)
    compressor = next(argv for argv in _COMPRESSORS if shutil.which(argv[0]))
    with (
        archive.open("wb") as out,
        subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as save,
        subprocess.Popen(compressor, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.PIPE) as compress,
    ):
        assert save.stdout is not None
        assert compress.stdin is not None
        try:
            while chunk := save.stdout.read(_CHUNK):
                compress.stdin.write(chunk)
                progress.advance(bar, len(chunk))
        except BrokenPipeError:
            pass  # the compressor has said why
        finally:
            save.stdout.close()
            compress.stdin.close()
        # A line or two each, which fit into a pipe: nobody waits for the other.
        error = _last_line(compress.stderr) or _last_line(save.stderr)
    progress.update(bar, completed=size)
    if save.wait() or compress.wait():
        free = f"{shutil.disk_usage(archive.parent).free / 1e9:.1f} GB free in {archive.parent.parent}"
        raise ClusterError(
            Problem(
                f"docker save {image}",
                "could not be written to a temporary file",
                f"{error or f'exit codes {save.returncode} and {compress.returncode}'}, {free}",
                "free some space there, or set TMPDIR to a larger disk",
            )
        )


def _last_line(errors: IO[bytes] | None) -> str:
    assert errors is not None
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _verify(session: Session, wanted: str) -> None:
    wrong = [(node, state.image_id) for node, state in session.states().items() if state.image_id != wanted]
    if wrong:
        raise ClusterError(
            Problem(node, f"holds another image after loading than {wanted}", str(found), "look at docker load there")
            for node, found in wrong
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    )
