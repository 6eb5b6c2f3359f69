"""Trains a tokenizer in a separate process, because the library ignores Ctrl-C for minutes.

The process reads texts, a JSON string per line, and prints the tokenizer as JSON.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Final

from tridock.data.tokenize.tokenizer import BytePairTokenizer
from tridock.errors import Problem, RunError

_PR_SET_PDEATHSIG: Final = 1


def learn(texts: Iterable[str], vocab_size: int) -> BytePairTokenizer:
    """Trains a tokenizer. The process ends with the caller. Raises :class:`RunError` if it is killed."""
    command = [sys.executable, "-m", __name__, str(vocab_size), str(os.getpid())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    # In its own process group a terminal's Ctrl-C does not reach it; this process kills it.
    learner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
    assert learner.stdin is not None
    assert learner.stdout is not None
    try:
        for text in texts:
            learner.stdin.write(json.dumps(text).encode() + b"\n")
        learner.stdin.close()
        tokenizer = learner.stdout.read()
    except BrokenPipeError:
        tokenizer = b""
    finally:
        learner.kill()
        learner.wait()
    if not tokenizer:
        todo = "look for `Out of memory` in dmesg, then give less text or a smaller --vocab-size"
        raise RunError(Problem("tokenizer training process", "was killed", "", todo))
    return BytePairTokenizer.from_json(tokenizer.decode())


def _main(vocab_size: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:
        sys.stdout.write(BytePairTokenizer.train(map(json.loads, sys.stdin.buffer), vocab_size).to_json())


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
