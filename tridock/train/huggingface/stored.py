"""The weights in a transformers folder by their names there."""

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from tridock.contracts.pretrained import CONFIG, INDEX, SINGLE
from tridock.errors import Problem, RequestError


class Stored(Protocol):
    """Whole weights by transformers' names, read one by one."""

    folder: Path

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


class Safetensors:
    """The files of ``save_pretrained``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def read(self, name: str) -> Tensor:
        with self._open(self._files[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    @cached_property
    def _files(self) -> Mapping[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            return dict(json.loads(index.read_bytes())["weight_map"])
        with self._open(SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            todo = "download all of the model, with its weights as safetensors"
            raise RequestError(Problem(str(self.folder / file), "cannot be read", str(error), todo)) from None


def read_config(folder: Path) -> dict[str, Any]:
    """Reads ``config.json`` of a transformers folder. Raises :class:`RequestError` if it cannot be read."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        todo = "name a folder that transformers' save_pretrained has written, with config.json and model.safetensors"
        raise RequestError(Problem(str(folder / CONFIG), "cannot be read", got, todo)) from None
    return config
