"""The two NumPy arrays of an image model: their types and shapes, read without NumPy on a node too."""

import array
import ast
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tridock.errors import Problem, RequestError

SUFFIXES: Final = ("_images.npy", "_labels.npy")
"""File name endings after ``data.data_path``."""
UINT8: Final = "|u1"
INT64: Final = "<i8"
_MAGIC: Final = b"\x93NUMPY"
_BLOCK: Final = 1 << 20
_NAMES: Final = {UINT8: "uint8", INT64: "int64"}


@dataclass(frozen=True, slots=True)
class ImageArrays:
    """Types, as NumPy's ``dtype.str``, and shapes of images and labels; the smallest and largest of labels in int64."""

    images: tuple[str, tuple[int, ...]]
    labels: tuple[str, tuple[int, ...]]
    label_range: tuple[int, int] | None = None

    def problems(self, prefix: str, height: int, width: int, classes: int) -> Iterator[Problem]:
        """Yields what does not fit a model of these images and classes."""
        kind, shape = self.images
        if kind != UINT8 or shape[1:] != (3, height, width):
            what, todo = f"must be uint8 of [N, 3, {height}, {width}]", "set model.img_h and model.img_w, or correct it"
            yield Problem(prefix + SUFFIXES[0], what, _shown(kind, shape), todo)
        if self.labels != (INT64, shape[:1]):
            todo = "create it again, with one label per image"
            yield Problem(prefix + SUFFIXES[1], f"must be int64 of {list(shape[:1])}", _shown(*self.labels), todo)
        elif self.label_range is not None and not 0 <= self.label_range[0] <= self.label_range[1] < classes:
            got = "{} to {}".format(*self.label_range)
            yield Problem(
                prefix + SUFFIXES[1], f"has labels outside 0 to {classes - 1}", got, "raise model.num_classes"
            )


def read_arrays(prefix: Path) -> ImageArrays:
    """Returns what the headers and the labels of ``<prefix>_images.npy`` and ``<prefix>_labels.npy`` say.

    Raises :class:`RequestError` if one is not such a file, and OSError if it cannot be read.
    """
    images, labels = (prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES)
    with images.open("rb") as file:
        first = _header(images, file)
    with labels.open("rb") as file:
        second = _header(labels, file)
        return ImageArrays(first, second, _range(file) if second[0] == INT64 else None)


def not_an_array(path: Path, got: str) -> RequestError:
    """Returns the error of a file that NumPy does not read."""
    todo = "save it with numpy.save, or set data.data_path to what stands before the ending"
    return RequestError(Problem(str(path), "cannot be read as an array of numpy", got, todo))


def _header(path: Path, file: BinaryIO) -> tuple[str, tuple[int, ...]]:
    """Reads the header of NumPy's format 1.0 to 3.0."""
    try:
        start = file.read(8)
        if start[:6] != _MAGIC:
            raise ValueError("no header of the format")
        form = "<H" if start[6] == 1 else "<I"
        (length,) = struct.unpack(form, file.read(struct.calcsize(form)))
        found = ast.literal_eval(file.read(min(length, _BLOCK)).decode())
        return str(found["descr"]), tuple(int(size) for size in found["shape"])
    except (ValueError, KeyError, TypeError, IndexError, SyntaxError, struct.error) as error:
        raise not_an_array(path, str(error)) from None


def _range(file: BinaryIO) -> tuple[int, int] | None:
    """Returns the smallest and largest number in the rest of a file of int64; None of an empty one."""
    found: list[int] = []
    while block := file.read(_BLOCK):
        values = array.array("q", block[: len(block) // 8 * 8])
        found = [min([*found, *values]), max([*found, *values])] if values else found
    return (found[0], found[1]) if found else None


def _shown(kind: str, shape: tuple[int, ...]) -> str:
    return f"{_NAMES.get(kind, kind)} of {list(shape)}"
