"""A launch's query of a node before it writes anything there, in one answer."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.node_answers import Fingerprint, PreflightAnswer
from tridock.contracts.supervision import contract
from tridock.node.probes import ports
from tridock.node.probes.accelerators import cuda_driver
from tridock.node.probes.limits_and_space import memory


def preflight(
    files: Sequence[str],
    read: Sequence[str],
    *,
    load: str | None = None,
    tokenizers: Sequence[str] = (),
    packages: Sequence[str] = (),
    multicast: bool = False,
    head: bool,
    port: int | None,
) -> PreflightAnswer:
    """Returns the fingerprints of ``files`` and the content of the JSON files ``read``; None for an unreadable file.

    With ``head``, also returns a rendezvous port (``port``, or a random one for None), the image's manifest, and the
    contract.
    """
    return PreflightAnswer(
        files={name: _fingerprint(Path(name)) for name in files},
        read={name: _json(Path(name)) for name in read},
        loads=load is None or Path(load).is_dir(),
        has_tokenizer=not tokenizers or any(map(os.path.isfile, tokenizers)),
        missing_packages=tuple(name for name in packages if importlib.util.find_spec(name) is None),
        multicast=cuda_driver().multicast if multicast else None,
        memory=memory(),
        rendezvous=ports.rendezvous_port(port) if head else None,
        image_manifest=_json(Path(run_folder.CODE, "manifest.json")) if head else None,
        contract=contract() if head else None,
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
