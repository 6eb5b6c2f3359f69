"""Merges are learned in a process of its own: the library hears no Ctrl-C, for minutes, and no thread that is in it can
be ended. Texts go there as they are read, a JSON string a line; back comes the tokenizer as JSON."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Final

from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RunError

_PR_SET_PDEATHSIG: Final = 1


def learn(texts: Iterable[str], vocab_size: int) -> BytePairTokenizer:
    """A tokenizer of the texts. Whatever ends this ends the other process; :class:`RunError` where that is killed."""
    command = [sys.executable, "-m", __name__, str(vocab_size), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In a process group of its own a terminal's Ctrl-C does not reach it: it is this one that ends it.
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    assert learner.stdin is not None
    assert learner.stdout is not None
    try:
        for text in texts:
            learner.stdin.write(json.dumps(text).encode() + b"\n")
        learner.stdin.close()
        made = learner.stdout.read()
    except BrokenPipeError:
        made = b""
    finally:
        learner.kill()
        learner.wait()
    if not made:
        todo = "look for `Out of memory` in dmesg; then give less text or a smaller --vocab-size"
        raise RunError(Problem("the process that learns the merges", "was killed", "", todo))
    return BytePairTokenizer.from_json(made.decode())


def _texts() -> Iterator[str]:
    for line in sys.stdin.buffer:
        yield json.loads(line)


def _main(vocab_size: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        sys.stdout.write(BytePairTokenizer.train(_texts(), vocab_size).to_json())


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
