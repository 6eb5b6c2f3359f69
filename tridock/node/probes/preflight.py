"""What a launch wants to know of a node before anything is written there, in one answer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.errors import ClusterError
from tridock.node.probes import ports


def look(files: Sequence[str], read: Sequence[str], *, head: bool, port: int | None) -> dict[str, object]:
    """The fingerprints of ``files`` and the content of the JSON files ``read``.

    With ``head`` also a port for the rendezvous, and what is in the image. A file that cannot be read has None.
    ``port`` is the one asked for, or None for any; where there is none, ``port_problem`` says why.
    """
    answer: dict[str, object] = {
        "files": {name: _fingerprint(Path(name)) for name in files},
        "read": {name: _json(Path(name)) for name in read},
    }
    if head:
        answer |= _port(port)
        answer["image_manifest"] = _json(Path(run_folder.CODE, "manifest.json"))
    return answer


def _fingerprint(path: Path) -> dict[str, object] | None:
    """Size and SHA-256; of tokens and images the size alone: they may be terabytes. A token index holds every length.

    Of a vocabulary (``.json``) also how many entries it has.
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


def _port(wanted: int | None) -> dict[str, object]:
    try:
        if wanted is None:
            return {"port": ports.free_port()}
        ports.require_free(wanted)
        return {"port": wanted}
    except ClusterError as error:
        return {"port_problem": str(error)}


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
