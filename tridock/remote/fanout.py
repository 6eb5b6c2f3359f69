"""Runs one action on many hosts in parallel: bounded concurrency, one outcome per host, every failure reported."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from tridock.errors import ClusterError, TridockError
from tridock.remote import clock
from tridock.remote.host import Host

T = TypeVar("T")

_ENDING_S: Final = 3.0  # for what an action undoes on its way out, such as a forwarded port


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """The result of one host: a value, or the error instead."""

    value: T | None = None
    error: Exception | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


def on_all(hosts: Mapping[str, Host], action: Callable[[str, Host], T], cap: int) -> dict[str, Outcome[T]]:
    """Runs ``action`` on every host, at most ``cap`` at once. A failure on one host does not stop the others.

    Ctrl-C starts no further action, ends the commands in use, and is raised in the caller once their actions have
    ended, after 3 s at the latest.
    """
    results: SimpleQueue[tuple[str, Outcome[T]]] = SimpleQueue()
    waiting, started, outcomes = deque(hosts), set[str](), dict[str, Outcome[T]]()

    def attempt(name: str) -> None:
        try:
            outcome = Outcome(value=action(name, hosts[name]))
        except Exception as error:
            outcome = Outcome(error=error)
        results.put((name, outcome))

    try:
        while len(outcomes) < len(hosts):
            while waiting and len(started) < max(1, cap):
                name = waiting.popleft()
                started.add(name)
                # Daemon threads: a host that hangs must not block the exit of the interpreter.
                threading.Thread(target=attempt, args=(name,), daemon=True).start()
            name, outcome = results.get()
            started.remove(name)
            outcomes[name] = outcome
    except BaseException:
        limit = clock.now() + _ENDING_S
        while started and clock.now() < limit:
            for name in started:
                hosts[name].close()  # again: an action may have been between two commands
            with suppress(Empty):
                started.remove(results.get(timeout=0.1)[0])
        raise
    return {name: outcomes[name] for name in hosts}


def raise_failures(outcomes: Mapping[str, Outcome[T]]) -> dict[str, T]:
    """Returns the values by host, or raises one error with the problem of every failed host and the others' names."""
    errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    for error in errors:
        if not isinstance(error, TridockError):
            raise error  # a bug of ours: its traceback says more than a list of hosts
    if errors:
        problems = [problem for error in errors if isinstance(error, TridockError) for problem in error.problems]
        # The twin's nodes are on one machine and report the same problem.
        problems = list(dict.fromkeys(problems))
        fine = [name for name, outcome in outcomes.items() if outcome.ok]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else ClusterError
        assert issubclass(kind, TridockError)
        raise kind(problems, unaffected=fine)
    return {name: outcome.value for name, outcome in outcomes.items()}  # type: ignore[misc]
