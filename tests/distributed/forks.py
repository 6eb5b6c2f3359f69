"""What the pretended ranks share: cases in, answers out, and forks in which libraries may leave what they like."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import TextIO

from tridock.experiment import Experiment

SLOW = ("torch._dynamo", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3")
"""Imported on the way by DeepSpeed: to be imported before, or every fork waits for it."""


def attempt(work: Callable[[], bytes]) -> tuple[str, bytes]:
    """``runs`` and what ``work`` gives; or the first line of what stopped it, and nothing."""
    try:
        return "runs", work()
    except BaseException as error:  # whatever stops a rank stops the run; parsers exit
        return f"{type(error).__name__}: {error}".splitlines()[0], b""


def in_a_fork(work: Callable[[], bytes]) -> tuple[str, bytes]:
    """The same in a process of its own."""
    receive, send = get_context("fork").Pipe(duplex=False)
    process = get_context("fork").Process(target=lambda: send.send(attempt(work)))
    process.start()
    send.close()
    try:
        answer: tuple[str, bytes] = receive.recv()
    except EOFError:
        answer = "died", b""
    process.join()
    return answer


def cases() -> Iterator[tuple[Experiment, int]]:
    """The experiments and world sizes that come in."""
    for line in sys.stdin:
        fields, world_size = json.loads(line)
        yield Experiment.model_validate_json(json.dumps(fields)), world_size


def answers() -> TextIO:
    """Where the answers go. Whatever else is printed from here on goes nowhere."""
    file = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return file
