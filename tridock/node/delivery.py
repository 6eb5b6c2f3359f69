"""Files of a checkpoint that come from other nodes before a run starts: copied by rsync, verified and listed."""

import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tridock.contracts import cluster_ssh
from tridock.contracts.checkpoint_files import Delivery, Manifest, damage, read_manifest
from tridock.contracts.checkpoints import MANIFEST
from tridock.contracts.codec import decode
from tridock.contracts.file_locks import wait_for_lock
from tridock.contracts.run_folder import write_atomic
from tridock.errors import Problem, RunError
from tridock.progress import size_text

# Two copies may have one size and time, a bad one and a good one.
_FILES = ("--files-from=-", "--from0", "--no-implied-dirs", "--copy-links", "--times", "--ignore-times")
_LOCK, _LOCK_S = ".files.lock", 60.0
_OPTIONS = (*_FILES, "--timeout=300", "--out-format=%l")


def receive_checkpoint(folder: Path) -> None:
    """Copies the files of the :class:`Delivery` on stdin into a checkpoint's folder, each from a node that has it; from
    the next one if it is not whole. Prints the bytes of each that arrives.

    ``files.json`` names them once all are there; what an earlier call has left stays. Raises :class:`RunError` with
    those of which no copy arrives whole.
    """
    wanted = decode(Delivery, sys.stdin.buffer.read())
    problems: dict[str, Problem] = {}
    with RunError.in_place_of(OSError, folder, "could not be written", "free space there or fix its permissions"):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_another_save(folder, wanted)
        lacking = [name for name in wanted.files if any(damage(folder, wanted.files, [name], read=True))]
        _require_space(folder, sum(wanted.files[name].size for name in lacking))
        untried = {name: list(wanted.nodes[name]) for name in lacking}
        while left := [name for name, nodes in untried.items() if nodes]:
            by_node = defaultdict[str, list[str]](list)
            for name in left:
                by_node[untried[name].pop(0)].append(name)
            for node, names in by_node.items():
                said = _copy(node, folder, names)
                for name in names:
                    if found := next(damage(folder, wanted.files, [name], read=True), None):
                        problems[name] = Problem(f"{folder / name} from {node}", found.what, said or found.got, _TODO)
                    else:
                        untried[name] = []
                        problems.pop(name, None)
        RunError.raise_for(problems.values())
        with (folder.parent / _LOCK).open("a") as lock:  # a node that shares the folder may list its part now
            wait_for_lock(lock.fileno(), lock.name, _LOCK_S)
            manifest = read_manifest(folder)
            if isinstance(manifest, Problem):  # this node had nothing of it
                manifest = Manifest({}, {**wanted.files, **wanted.elsewhere}, wanted.ill)
            write_atomic(folder / MANIFEST, manifest.with_more(wanted.files).to_bytes())


_TODO = "try again; or continue from another checkpoint"


def _refuse_another_save(folder: Path, wanted: Delivery) -> None:
    if not isinstance(own := read_manifest(folder), Problem):
        what, todo = "belongs to a different save of this iteration", "continue from another checkpoint"
        RunError.raise_for(
            Problem(str(folder / name), what, f"sha256 {own.here[name].sha256[:12]}… is listed", todo)
            for name, entry in wanted.files.items()
            if own.here.get(name, entry) != entry
        )


def _require_space(folder: Path, size: int) -> None:
    if (free := shutil.disk_usage(folder).free) < size:
        what, got = f"has no space for {size_text(size)} of a checkpoint", f"{size_text(free)} are free"
        raise RunError(Problem(str(folder), what, got, "free space there, or choose other nodes"))


def _copy(node: str, folder: Path, names: Iterable[str]) -> str:
    """Copies files from the same folder of a node; returns the first line of an error, whose others follow from it."""
    argv = ("rsync", f"--rsh={shlex.join(cluster_ssh.SUPERVISOR)}", *_OPTIONS, f"{node}:{folder}/", f"{folder}/")
    listed = "".join(f"./{name}\0" for name in names).encode(errors="surrogateescape")
    try:
        done = subprocess.run(argv, input=listed, stderr=subprocess.PIPE, check=False)
    except FileNotFoundError:
        todo = "build the image again with tridock image, then run tridock up"
        raise RunError(Problem("rsync", "is not in this node's image", "", todo)) from None
    return done.stderr.decode(errors="replace").strip().partition("\n")[0] if done.returncode else ""
