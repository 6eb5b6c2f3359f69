"""A launch's query of a node before it writes anything there, in one answer."""

import errno
import hashlib
import importlib.util
import json
import mmap
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from tridock.contracts import run_folder
from tridock.contracts.checkpoints import LATEST, TRACKER, checkpoint_name, holds_checkpoint
from tridock.contracts.node_answers import Fingerprint, NvmeFolder, PreflightAnswer
from tridock.contracts.pretrained import StoredWeights
from tridock.contracts.run_folder import CHECKPOINTS
from tridock.contracts.supervision import contract
from tridock.node.probes import ports
from tridock.node.probes.accelerators import cuda_driver
from tridock.node.probes.limits_and_space import memory, soft_limit
from tridock.node.probes.pretrained import format_of, stored_weights


def preflight(
    files: Sequence[str],
    read: Sequence[str],
    *,
    load: str | None = None,
    weights: str | None = None,
    tokenizers: Sequence[str] = (),
    packages: Sequence[str] = (),
    multicast: bool = False,
    nvme: Sequence[str] = (),
    head: bool,
    port: int | None,
) -> PreflightAnswer:
    """Returns the fingerprints of ``files`` and the content of the JSON files ``read``; None for an unreadable file.

    With ``head``, also returns a rendezvous port (``port``, or a random one for None), the image's manifest, and the
    contract.
    """
    resumes = Path(load) if load is not None and weights is None else None
    lacks, inside = _lacking(resumes) if resumes is not None and resumes.is_dir() else (None, None)
    return PreflightAnswer(
        files={name: _fingerprint(Path(name)) for name in files},
        read={name: _json(Path(name)) for name in read},
        loads=load is None or Path(load).is_dir(),
        load_lacks=lacks,
        load_inside=inside,
        load_format=(format_of(resumes) or None) if resumes is not None else None,
        weights=_weights(weights),
        has_tokenizer=not tokenizers or any(map(os.path.isfile, tokenizers)),
        missing_packages=tuple(name for name in packages if not _has_package(name)),
        multicast=cuda_driver().multicast if multicast else None,
        memory=memory(),
        memlock=soft_limit(resource.RLIMIT_MEMLOCK),
        nvme={name: _nvme_folder(Path(name)) for name in nvme},
        rendezvous=ports.rendezvous_port(port) if head else None,
        image_manifest=_json(Path(run_folder.CODE, "manifest.json")) if head else None,
        contract=contract() if head else None,
    )


def _weights(given: str | None) -> StoredWeights | None:
    kind, _, folder = (given or "").partition(":")
    return stored_weights(kind, Path(folder)) if folder and Path(folder).is_dir() else None


def _lacking(folder: Path) -> tuple[str | None, str | None]:
    """Returns what a folder lacks to hold a checkpoint, and the folder in it that holds one; None and None if it does.

    Whether a checkpoint is complete is for the ranks to say: they read all of its files.
    """
    if holds_checkpoint(folder) or format_of(folder) is not None:
        return None, None
    inside = next((str(it) for it in (folder / CHECKPOINTS,) if holds_checkpoint(it)), None)
    found = "empty" if not any(folder.iterdir()) else "no file of a checkpoint"
    if checkpoint_name(folder.name):
        return found, inside
    return found if found == "empty" else f"neither {TRACKER} nor {LATEST} nor folders iter_… or global_step…", inside


def _has_package(name: str) -> bool:
    """Whether Python finds the module ``name``. Does not import the packages around it, which may take seconds."""
    outer, *inner = name.split(".")
    found = importlib.util.find_spec(outer)
    for part in inner:
        if found is not None:
            found = PathFinder.find_spec(part, found.submodule_search_locations or [])
    return found is not None


def _nvme_folder(folder: Path) -> NvmeFolder:
    probe = folder / f".tridock-nvme-{os.getpid()}"
    try:
        file = os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)
        try:
            os.write(file, mmap.mmap(-1, mmap.PAGESIZE))  # aligned
        finally:
            os.close(file)
        found = os.statvfs(folder)
    except OSError as error:
        direct = error.errno == errno.EINVAL
        return NvmeFolder("its file system has no direct I/O" if direct else (error.strerror or str(error)).lower())
    finally:
        with suppress(OSError):
            probe.unlink()
    return NvmeFolder(None, found.f_bavail * found.f_frsize, folder.stat().st_dev)


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
