"""Texts that anybody may have chosen (names of runs and files, values of fields), made fit to be shown."""

from __future__ import annotations

from typing import Final

_LONGEST: Final = 4000


def printable(text: str, longest: int = _LONGEST) -> str:
    """Without control characters and halves of surrogate pairs, and not longer than ``longest``."""
    clean = "".join(sign if sign.isprintable() or sign in "\n\t" else "\N{REPLACEMENT CHARACTER}" for sign in text)
    return clean if len(clean) <= longest else f"{clean[: longest - 1]}…"


def one_line(text: str, longest: int = 60) -> str:
    """A name for a legend or a heading."""
    return printable(" ".join(text.split()), longest) or "?"


def gib(size: float) -> str:
    """``1.50 GiB``; less than a hundredth in MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else f"{size / 2**20:.2f} MiB"


def seconds(time: float) -> str:
    """A step's time: ``1.44 s``, ``430 ms``."""
    return f"{time:.2f} s" if time >= 1 else f"{time * 1000:.3g} ms" if time < 0.1 else f"{time * 1000:.0f} ms"
