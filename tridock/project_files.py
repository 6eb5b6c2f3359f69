"""The repository's files that commands use: configs, hostfiles, Compose files, the image's recipe.

A checkout and the image have them beside the package, a wheel inside it (``pyproject.toml`` lists them).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parent
_IN_THE_WHEEL: Final = _PACKAGE / "_project"
ROOT: Final = _IN_THE_WHEEL if _IN_THE_WHEEL.is_dir() else _PACKAGE.parent
"""The folder with these files."""

STARTER: Final = ("configs", "hostfiles", "docker-compose.yml", "docker-compose.gpu.yml", "fabfile.py")
"""The files that ``tridock init`` copies into a new folder."""


def project_file(path: Path, folder: Path = Path()) -> Path:
    """Returns the file ``path`` in ``folder``, else Tridock's own file of this name (``configs/demo.yaml``)."""
    here, own = folder / path, ROOT / path
    named = not path.is_absolute() and ".." not in path.parts and path.parts[:1] and path.parts[0] in STARTER
    return own if named and not here.exists() and own.is_file() else here


def recipe_files() -> dict[str, Path]:
    """Returns the files that ``tools/build-image.sh`` needs, by their path in a checkout. Empty inside the image."""
    if not (ROOT / "Dockerfile").is_file():
        return {}
    names = ("Dockerfile", "Dockerfile.wrap", ".dockerignore", "configs", "entrypoint", "locks", "patches", "tools")
    return {name: ROOT / name for name in names} | {"tridock": _PACKAGE}


def starter_files() -> dict[Path, Path]:
    """Returns the files of :data:`STARTER` by their path in a checkout. Empty inside the image."""
    return files_of(ROOT, STARTER)


def recipes() -> dict[str, Path]:
    """Returns the folders of recipes (what labs train, with others' programs) by their names."""
    return {path.parent.name: path.parent for path in sorted(ROOT.glob("configs/recipes/*/README.md"))}


def files_of(root: Path, names: Sequence[str] = ("",)) -> dict[Path, Path]:
    """Returns files in ``root``, or only those of ``names``, without hidden ones, by their path in it."""
    found = (path for name in names for path in (root / name, *(root / name).rglob("*")))
    return {path.relative_to(root): path for path in found if path.is_file() and path.name[0] != "."}
