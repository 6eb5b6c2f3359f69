"""Errors of writing: what the system said, and how a collective that writes gets through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def write_failure(error: BaseException) -> str | None:
    """What the system said of a failed write; None for an error of another kind, as of a collective."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # torch's own writer turns a full disk into this, and drops the reason.
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return "a file cut short (is the disk full?)"
    return None


@contextmanager
def kept_to_the_end(*places: tuple[Any, str]) -> Iterator[list[Exception]]:
    """Inside, errors of writing in the functions ``(owner, name)`` are kept, and the first is raised at the end.

    An engine writes in the middle of its collectives: a rank that left there would let the others wait for it. Gives
    the errors kept so far; what else fails on the way may be put to them.
    """
    kept: list[Exception] = []
    with ExitStack() as changes:
        for owner, name in places:
            changes.enter_context(replaced(owner, name, _keeping(getattr(owner, name), kept)))
        try:
            yield kept
        except Exception as error:
            if kept:
                raise kept[0] from error
            raise
    if kept:
        raise kept[0]


def _keeping(function: Callable[..., Any], kept: list[Exception]) -> Callable[..., Any]:
    def keep(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            if write_failure(error) is None:
                raise
            kept.append(error)

    return keep


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Meanwhile the attribute has another value."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
