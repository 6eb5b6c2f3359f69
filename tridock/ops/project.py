"""A folder to work in, and the image, from the files that Tridock brings along; a checkout is not needed."""

import filecmp
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tridock.contracts import file_locks
from tridock.errors import Problem, RequestError
from tridock.project_files import ROOT, files_of, recipe_files, recipes, starter_files

_LOCK_S: Final = 6 * 3600.0
"""Another command's build, or its way to slow hosts, may take hours."""


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """What ``tools/build-image.sh`` is asked for; an empty text is the flavor's default."""

    flavor: str = "gpu"
    base_image: str = ""
    image: str = ""
    ca: str = ""
    megatron: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    """More labels of the image."""


def init(folder: Path, recipe: str = "", *, force: bool = False) -> list[Path]:
    """Copies the starter files, or those of a recipe, into ``folder`` and returns those that were not there.

    Raises :class:`RequestError` with every file that is there and differs, and then copies none; ``force`` replaces
    them.
    """
    if not starter_files():
        raise RequestError(_inside_the_image("tridock init"))
    if recipe and recipe not in (known := recipes()):
        raise RequestError(Problem("--recipe", "names none", recipe, f"choose one of {', '.join(known)}"))
    files = files_of(recipes()[recipe]) if recipe else starter_files()
    new = [name for name, own in files.items() if not _same(own, folder / name)]
    RequestError.raise_for(
        Problem(str(folder / name), "exists and differs", "", "move it away, or replace it with --force")
        for name in new
        if os.path.lexists(folder / name) and not force
    )
    for name in new:
        todo = "name a folder in which you may write"
        with RequestError.in_place_of(OSError, folder / name, "cannot be written", todo):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(files[name], folder / name)
    return new


def build_image(options: ImageOptions, folder: Path) -> int:
    """Runs ``tools/build-image.sh`` and returns its exit code; ``folder`` is where the user's Compose files are."""
    sources = recipe_files()
    if not sources:
        raise RequestError(_inside_the_image("tridock image"))
    # The script runs in another folder.
    ca, megatron = (
        str(Path(text).resolve()) if text and Path(text).exists() else text for text in (options.ca, options.megatron)
    )
    arguments = [options.flavor, options.base_image, options.image, ca, megatron, str(folder.resolve())]
    labels = "\n".join(f"{name}={value}" for name, value in options.labels)
    if (ROOT / "tridock").is_dir():  # a checkout
        return _run(ROOT, arguments, labels)
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tridock" / "image"
    place.mkdir(parents=True, exist_ok=True)
    with (place.parent / "image.lock").open("w") as lock:
        wait_for_lock(lock, "another command builds an image")
        # upstream/ and locks/wheels/ stay: what a build has fetched.
        for name, source in sources.items():
            _copy(source, place / name)
        return _run(place, arguments, labels)


def wait_for_lock(lock: IO[str], what: str) -> None:
    """Locks a file until it is closed; says ``what`` has it first, where another command does.

    Raises :class:`RequestError` if it still has it after hours.
    """
    if not file_locks.try_lock(lock.fileno()):
        print(f"{what}, {file_locks.holder_of(lock.fileno())}; waiting for it", file=sys.stderr)
        file_locks.wait_for_lock(lock.fileno(), what, _LOCK_S, "see whether that command hangs, and end it")


def _run(root: Path, arguments: list[str], labels: str) -> int:
    environ = {**os.environ, "LABELS": labels}
    return subprocess.run(["tools/build-image.sh", *arguments], cwd=root, env=environ, check=False).returncode


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copy(source, target)
        return
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "_project"))


def _same(own: Path, there: Path) -> bool:
    return there.is_file() and filecmp.cmp(own, there, shallow=False)


def _inside_the_image(command: str) -> Problem:
    return Problem(command, "cannot find the project files", f"none in {ROOT}", "run it where Tridock is installed")
