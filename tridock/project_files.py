"""The repository's files that commands use: configs, hostfiles, Compose files, the image's recipe.

In a checkout and in the image they stand beside the package; the wheel has them inside (``pyproject.toml`` lists them).
"""

from pathlib import Path
from typing import Final

_PACKAGE: Final = Path(__file__).parent
_IN_THE_WHEEL: Final = _PACKAGE / "_project"
ROOT: Final = _IN_THE_WHEEL if _IN_THE_WHEEL.is_dir() else _PACKAGE.parent
"""The folder that holds them."""

STARTER: Final = ("configs", "hostfiles", "docker-compose.yml", "docker-compose.gpu.yml", "fabfile.py")
"""What a folder of one's own begins with: ``tridock init``."""


def project_file(path: Path, folder: Path = Path()) -> Path:
    """The file ``path`` of ``folder``; if there is none, Tridock's own file of this name (``configs/demo.yaml``)."""
    here, own = folder / path, ROOT / path
    named = not path.is_absolute() and ".." not in path.parts and path.parts[:1] and path.parts[0] in STARTER
    return own if named and not here.exists() and own.is_file() else here


def recipe_files() -> dict[str, Path]:
    """The image's recipe: what ``tools/build-image.sh`` needs, by its path in a checkout. Empty inside the image."""
    if not (ROOT / "Dockerfile").is_file():
        return {}
    names = ("Dockerfile", "Dockerfile.wrap", ".dockerignore", "configs", "entrypoint", "locks", "patches", "tools")
    return {name: ROOT / name for name in names} | {"tridock": _PACKAGE}


def starter_files() -> dict[Path, Path]:
    """The files of :data:`STARTER` by their path in a checkout. Empty inside the image."""
    found = (path for name in STARTER for path in ((ROOT / name), *(ROOT / name).rglob("*")))
    return {path.relative_to(ROOT): path for path in found if path.is_file() and path.name[0] != "."}
