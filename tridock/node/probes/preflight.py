"""What a launch asks of a node before it writes anything there, in one answer."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Fingerprint, PreflightAnswer
from tridock.node.probes import ports


def preflight(
    files: Sequence[str], read: Sequence[str], *, load: str | None = None, head: bool, port: int | None
) -> PreflightAnswer:
    """The fingerprints of ``files`` and the content of the JSON files ``read``; None for a file that cannot be read.

    With ``head`` also a port for the rendezvous (``port``, or a random one for None) and the image's manifest.
    """
    return PreflightAnswer(
        files={name: _fingerprint(Path(name)) for name in files},
        read={name: _json(Path(name)) for name in read},
        loads=load is None or Path(load).is_dir(),
        rendezvous=ports.rendezvous_port(port) if head else None,
        image_manifest=_json(Path(run_folder.CODE, "manifest.json")) if head else None,
    )


def _fingerprint(path: Path) -> Fingerprint | None:
    try:
        with path.open("rb") as file:
            digest = (
                None if path.name.endswith((".bin", "_images.npy")) else hashlib.file_digest(file, "sha256").hexdigest()
            )
        size = path.stat().st_size
    except OSError:
        return None
    content = _json(path) if path.suffix == ".json" else None
    return Fingerprint(size, digest, entries=len(content) if isinstance(content, dict) else None)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
