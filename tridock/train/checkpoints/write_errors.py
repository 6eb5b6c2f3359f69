"""Write errors: their message, and deferring them to the end of a collective that writes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


def write_failure(error: BaseException) -> str | None:
    """Returns the system's message of a failed write; None for an error of another kind, such as a collective's."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # torch's own writer raises this for a full disk, without the reason.
    if "inline_container" in str(error) or "PytorchStreamWriter" in str(error):
        return "a file cut short (is the disk full?)"
    return None


@contextmanager
def defer_write_errors(*places: tuple[Any, str]) -> Iterator[list[Exception]]:
    """Collects write errors of the functions ``(owner, name)`` inside the block; raises the first at its end.

    An engine writes between collectives, so a rank that raised there would leave the others waiting. Yields the list of
    errors, to which the caller may append.
    """
    errors: list[Exception] = []
    with ExitStack() as changes:
        for owner, name in places:
            changes.enter_context(replaced(owner, name, _deferring(getattr(owner, name), errors)))
        try:
            yield errors
        except Exception as error:
            if errors:
                raise errors[0] from error
            raise
    if errors:
        raise errors[0]


def _deferring(function: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    def call(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except Exception as error:
            if write_failure(error) is None:
                raise
            errors.append(error)

    return call


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replaces an attribute inside the block."""
    own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
