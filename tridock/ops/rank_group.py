"""Ranks that measure together without a run: the command that starts them on nodes, and what they print."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tridock.remote import Completed

_MODULE: Final = "tridock.train.allreduce"
_TIME_IS_UP: Final = 142  # 128 + SIGALRM


@dataclass(frozen=True, slots=True)
class Reduced:
    """What came of one attempt: rank 0's result, or the errors of the nodes that failed."""

    result: Mapping[str, Any] | None
    error: str = ""


def reduce_command(
    slots: Mapping[str, Sequence[int]], address: str, port: int, limit: int, module: str = _MODULE
) -> tuple[str, ...]:
    """The argv that the first of the nodes runs; pdsh puts a node's number for ``%n``. One node alone needs no ssh.

    ``module``: what the ranks run, with the all-reduce's arguments.
    """
    world = base64.urlsafe_b64encode(json.dumps({node: list(numbers) for node, numbers in slots.items()}).encode())
    rank = "0" if len(slots) == 1 else "%n"
    program = (
        "python", "-P", "-m", module, "--world", world.decode(), "--node-rank", rank,
        "--master-addr", address, "--master-port", str(port), "--limit", str(limit),
    )  # fmt: skip
    if len(slots) == 1:
        return program
    # As DeepSpeed's launcher calls it; every word is plain for the remote shell.
    return ("pdsh", "-S", "-R", "ssh", "-f", "1024", "-u", str(limit + 2), "-w", ",".join(slots), *program)


def parse(done: Completed, limit: int) -> Reduced:
    """Reads the ranks' JSON lines, with pdsh's ``node: `` before them or without."""
    results, failures = [], []
    for line in done.stdout.decode(errors="replace").splitlines():
        node, _, text = line.partition("{")
        try:
            result = json.loads("{" + text)
        except ValueError:
            continue
        if "error" in result:
            failures.append(f"rank {result['rank']} on {node.strip(': ')}: {result['error']}".replace(" on :", ":"))
        else:
            results.append(result)
    if results and not failures and done.exit_code == 0:
        return Reduced(results[0])
    if failures:
        return Reduced(None, failures[0].replace("; ", ", "))
    if done.exit_code == _TIME_IS_UP:
        return Reduced(None, f"no end within {limit} s")
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return Reduced(None, lines[-1].strip() if lines else f"no end within {limit} s")
