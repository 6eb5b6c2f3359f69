"""The same thing on many hosts: under a cap, one outcome a host, every failure reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from tridock.errors import ClusterError, Problem, TridockError
from tridock.remote.host import Host

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """What came of one host: a value, or the error."""

    value: T | None = None
    error: TridockError | None = None


def on_all(hosts: Mapping[str, Host], action: Callable[[str, Host], T], cap: int) -> dict[str, Outcome[T]]:
    """Runs ``action`` on every host, at most ``cap`` at once; an error of one host does not stop the others."""

    def attempt(name: str) -> Outcome[T]:
        try:
            return Outcome(value=action(name, hosts[name]))
        except TridockError as error:
            return Outcome(error=error)

    pool = ThreadPoolExecutor(max_workers=max(1, min(cap, len(hosts))))
    try:
        futures = {name: pool.submit(attempt, name) for name in hosts}
        return {name: future.result() for name, future in futures.items()}
    finally:
        # After Ctrl-C nothing new is begun; what is under way is left to end on its own.
        pool.shutdown(wait=False, cancel_futures=True)


def raise_failures(outcomes: Mapping[str, Outcome[T]]) -> dict[str, T]:
    """The values by host; or one error with the problems of all hosts that failed."""
    errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    if errors:
        problems: list[Problem] = [problem for error in errors for problem in error.problems]
        kind = type(errors[0]) if len({type(error) for error in errors}) == 1 else ClusterError
        raise kind(problems)
    return {name: outcome.value for name, outcome in outcomes.items()}  # type: ignore[misc]
