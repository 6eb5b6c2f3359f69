"""The weights in a transformers folder by their names there."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from tridock.contracts.pretrained import DOWNLOAD
from tridock.contracts.safetensors_files import read_folder
from tridock.errors import Problem, RequestError


class Stored(Protocol):
    """Whole weights by transformers' names, read one by one."""

    folder: Path

    @property
    def names(self) -> Collection[str]: ...

    def read(self, name: str) -> Tensor: ...


class Safetensors:
    """The files of ``save_pretrained``. Raises :class:`RequestError` if one is missing, damaged or not complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = read_folder(folder)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: shape for name, (_, shape) in self._files.items()}

    @property
    def names(self) -> Collection[str]:
        return self._files.keys()

    def read(self, name: str) -> Tensor:
        from safetensors import SafetensorError, safe_open

        file = self.folder / self._files[name][0]
        try:
            with safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise RequestError(Problem(str(file), "cannot be read", str(error), DOWNLOAD)) from None
        return tensor
