"""What a launch asks of a node before it writes anything there, in one answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.node.probes import ports


def preflight(files: Sequence[str], read: Sequence[str], *, head: bool, port: int | None) -> dict[str, object]:
    """The fingerprints of ``files`` and the content of the JSON files ``read``; None for a file that cannot be read.

    With ``head`` also a port for the rendezvous (``port``, or a random one for None) and the image's manifest;
    ``port_problem`` says why there is no port.
    """
    answer: dict[str, object] = {
        "files": {name: _fingerprint(Path(name)) for name in files},
        "read": {name: _json(Path(name)) for name in read},
    }
    if head:
        answer |= ports.rendezvous_port(port)
        answer["image_manifest"] = _json(Path(run_folder.CODE, "manifest.json"))
    return answer


def _fingerprint(path: Path) -> dict[str, object] | None:
    """Size and SHA-256; of tokens and images the size alone, as they may be terabytes.

    Of a vocabulary (``.json``) also its number of entries.
    """
    try:
        with path.open("rb") as file:
            digest = (
                None if path.name.endswith((".bin", "_images.npy")) else hashlib.file_digest(file, "sha256").hexdigest()
            )
        found: dict[str, object] = {"bytes": path.stat().st_size, "sha256": digest}
    except OSError:
        return None
    if path.suffix == ".json" and isinstance(content := _json(path), dict):
        found["entries"] = len(content)
    return found


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
