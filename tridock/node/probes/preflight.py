"""A launch's query of a node before it writes anything there, in one answer."""

import errno
import hashlib
import importlib.util
import mmap
import os
import resource
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TypeVar

from tridock.contracts import run_folder
from tridock.contracts.checkpoints import LATEST, LAYOUT, PROGRESS, TRACKER, checkpoint_name, holds_checkpoint, newest
from tridock.contracts.data_index import parts_of
from tridock.contracts.images import read_arrays
from tridock.contracts.node_answers import Fingerprint, NvmeFolder, PreflightAnswer
from tridock.contracts.prerequisites import COMPILER, compiler_problems, megatron_source
from tridock.contracts.pretrained import DEEPSPEED, FORMATS, MEGATRON, StoredWeights, config_folder, deepspeed_folder
from tridock.contracts.records import read_value
from tridock.contracts.run_folder import CHECKPOINTS
from tridock.contracts.supervision import contract
from tridock.contracts.tokenizers import TOKENIZER_SHA256, sha256_of_gpt2, sha256s_in
from tridock.errors import Problem, RequestError
from tridock.node.probes import ports
from tridock.node.probes.accelerators import cuda_driver
from tridock.node.probes.limits_and_space import memory, soft_limit, write_problem
from tridock.node.probes.pretrained import format_of, stored_weights

T = TypeVar("T")


def preflight(
    files: Sequence[str],
    read: Sequence[str],
    *,
    load: str | None = None,
    weights: str | None = None,
    tokenizers: Sequence[str] = (),
    tokenizer_of: str | None = None,
    progress_of: str | None = None,
    gpt2_files: Sequence[str] = (),
    packages: Sequence[str] = (),
    needs: Sequence[str] = (),
    rank_env: Iterable[tuple[str, str]] = (),
    multicast: bool = False,
    nvme: Sequence[str] = (),
    save: str | None = None,
    data: Sequence[str] = (),
    split: str = "",
    v115: bool = False,
    images: str | None = None,
    head: bool,
    port: int | None,
) -> PreflightAnswer:
    """Returns the fingerprints of ``files`` and the content of the JSON files ``read``; None for an unreadable file.

    With ``head``, also returns a rendezvous port (``port``, or a random one for None), the image's manifest, and the
    contract.
    """
    resumes = Path(load) if load is not None and weights is None else None
    found = {prefix: _read(partial(parts_of, Path(prefix), split, v115=v115)) for prefix in data}
    damage = next((problem for _, problem in found.values() if problem is not None), None)
    arrays, damage = _read(lambda: read_arrays(Path(images))) if images is not None else (None, damage)
    lacks, inside = _lacking(resumes) if resumes is not None and resumes.is_dir() else (None, None)
    return PreflightAnswer(
        files={name: _fingerprint(Path(name)) for name in files},
        read={name: read_value(Path(name)) for name in read},
        loads=load is None or Path(load).is_dir(),
        load_lacks=lacks,
        load_inside=inside,
        load_format=(format_of(resumes) or None) if resumes is not None else None,
        load_progress=_progress(Path(progress_of)) if progress_of is not None else None,
        weights=_weights(weights),
        has_tokenizer=not tokenizers or any(map(os.path.isfile, tokenizers)),
        tokenizers_of_weights=_tokenizers(tokenizer_of) if tokenizer_of is not None else None,
        tokenizer_of_files=sha256_of_gpt2(*map(Path, gpt2_files)) if gpt2_files else None,
        missing_packages=tuple(name for name in packages if not _has_package(name)),
        lacks=tuple(problem for name in needs for problem in _lacks(name, {**os.environ, **dict(rank_env)})),
        multicast=cuda_driver().multicast if multicast else None,
        memory=memory(),
        memlock=soft_limit(resource.RLIMIT_MEMLOCK),
        nvme={name: _nvme_folder(Path(name)) for name in nvme},
        save_problem="" if save is None else write_problem(Path(save)),
        parts={prefix: parts for prefix, (parts, _) in found.items() if parts is not None},
        images=arrays,
        damage=damage,
        rendezvous=ports.rendezvous_port(port) if head else None,
        image_manifest=read_value(Path(run_folder.CODE, "manifest.json")) if head else None,
        contract=contract() if head else None,
    )


def _weights(given: str | None) -> StoredWeights | None:
    kind, _, folder = (given or "").partition(":")
    return stored_weights(kind, Path(folder)) if folder and Path(folder).is_dir() else None


def _tokenizers(load: str) -> tuple[str, ...] | None:
    """Returns the SHA-256 of the tokenizer that weights go with, by the ways to read it; None if there are none yet."""
    kind, _, place = load.partition(":")
    folder = Path(place if kind in FORMATS else load)
    if kind == MEGATRON:
        return ()
    if kind in FORMATS:
        with suppress(OSError, RequestError):
            folder = (config_folder(folder, deepspeed_folder(folder)) if kind == DEEPSPEED else None) or folder
        return sha256s_in(folder)
    if not folder.is_dir() or not holds_checkpoint(folder):
        return None
    found = _progress(folder)
    sha256 = found.get(TOKENIZER_SHA256) if isinstance(found, dict) else None
    return (sha256,) if isinstance(sha256, str) else ()


def _progress(folder: Path) -> object:
    """Returns what a checkpoint, or the newest complete one in a folder, says of itself; None if there is none."""
    last = None if checkpoint_name(folder.name) else newest(folder)
    found = folder if last is None else last[1]
    return read_value(found / PROGRESS) or read_value(found / LAYOUT)


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


def _lacks(need: str, env: Mapping[str, str]) -> Iterator[Problem]:
    if need == COMPILER:
        on_gpus = env.get("DS_ACCELERATOR") != "cpu" and cuda_driver().error is None
        yield from compiler_problems("cuda" if on_gpus else "cpu", env)
        return
    try:
        megatron_source(env)
    except RequestError as error:
        yield from error.problems


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


def _read(read: Callable[[], T]) -> tuple[T | None, Problem | None]:
    try:
        return read(), None
    except RequestError as error:
        return None, error.problems[0]
    except (OSError, ValueError, struct.error):  # another check says what is missing; the ranks read all of it
        return None, None


def _fingerprint(path: Path) -> Fingerprint | None:
    try:
        with path.open("rb") as file:
            digest = (
                None if path.name.endswith((".bin", "_images.npy")) else hashlib.file_digest(file, "sha256").hexdigest()
            )
        size = path.stat().st_size
    except OSError:
        return None
    content = read_value(path) if path.suffix == ".json" else None
    return Fingerprint(size, digest, entries=len(content) if isinstance(content, dict) else None)
