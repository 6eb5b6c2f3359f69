"""Extras: libraries that some commands need beyond the base installation, and how to add them to this installation.

No message has ``tridock`` as a package for pip to look up: on the package index the name belongs to whoever takes it.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from tridock.errors import ClusterError, Problem
from tridock.project_files import ROOT

if TYPE_CHECKING:
    from importlib.metadata import Distribution

EXTRAS: Final[Mapping[str, Sequence[str]]] = {
    "data": ("gigatoken", "numpy", "pyarrow", "sentencepiece", "simdjson", "tiktoken", "tokenizers", "zstandard"),
    "report": ("matplotlib",),
    "remote": ("aiohttp",),
    "trackers": ("mlflow", "tensorboard", "wandb"),
    "notify": ("apprise",),
    "train": ("deepspeed", "megatron", "torch"),
}
"""Optional modules by the extra that installs them (``locks/data.in``, ``locks/report.in``)."""
_OF_TRACKERS: Final = ("trackers", "notify")
_TARGETS: Final = {**dict.fromkeys(_OF_TRACKERS, "trackers"), "remote": "remote"}
"""Targets of the Makefile for what ``make venv`` leaves out."""


def install_command(module: str) -> str:
    """Returns the command, for a shell, that adds the extra with an optional module to this installation.

    A checkout has its Makefile, and an installation the wheel's file, if that is still where it was (PEP 610). Without
    either, the libraries are named one by one.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # 20 ms, and every command imports this module

    extra = next(extra for extra, modules in EXTRAS.items() if module in modules)
    if (ROOT / "Makefile").is_file():
        return shlex.join(("make", "-C", str(ROOT), _TARGETS.get(extra, "venv")))
    try:
        installed = distribution("tridock")
    except PackageNotFoundError:  # in the image
        if extra == "remote":
            return shlex.join((sys.executable, "-m", "pip", "install", *EXTRAS[extra]))
        return "make image TRACKERS=yes" if extra in _OF_TRACKERS else "make image"
    wheel = _source_of(installed)
    if wheel is not None and Path(sys.prefix, "uv-receipt.toml").is_file():
        # The new extras replace the tool's earlier ones.
        extras = [name for name, modules in EXTRAS.items() if name != extra and all(map(find_spec, modules))]
        return shlex.join(("uv", "tool", "install", f"{wheel}[{','.join((*extras, extra))}]"))
    has_pip = find_spec("pip") is not None
    pip = (sys.executable, "-m", "pip", "install") if has_pip else ("uv", "pip", "install", "--python", sys.executable)
    return shlex.join((*pip, *([f"{wheel}[{extra}]"] if wheel is not None else _libraries(installed, extra))))


def _source_of(installed: Distribution) -> Path | None:
    """Returns the wheel or the folder that this was installed from, if it is on this machine."""
    url = urlsplit(json.loads(installed.read_text("direct_url.json") or "{}").get("url", ""))
    path = Path(unquote(url.path))
    return path if url.scheme == "file" and path.exists() else None


def _libraries(installed: Distribution, extra: str) -> Iterator[str]:
    for requirement in installed.requires or ():
        library, _, condition = requirement.partition(";")
        if f"extra == '{extra}'" in condition.replace('"', "'"):
            yield library.strip()


@contextmanager
def extras_explained() -> Iterator[None]:
    """Converts the ImportError of an optional module into a :class:`ClusterError` that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if all(module not in modules for modules in EXTRAS.values()):
            raise
        raise ClusterError(Problem(module, "is not installed", "", install_command(module))) from None
