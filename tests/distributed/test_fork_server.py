"""A process of the fork server is what Python from scratch would be, but for the imports that it has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import fork_server
from tests.patience import STEP_S

pytestmark = pytest.mark.distributed

REPORT = """
import json, os, random, signal, sys
import numpy
print(json.dumps({
    "argv": sys.argv, "name": __name__, "path": sys.path[0], "cwd": os.getcwd(), "stdin": sys.stdin.read(),
    "environ": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "SIGINT": str(signal.getsignal(signal.SIGINT)), "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
    "descriptors": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
}))
print(numpy.random.random(), random.random(), file=sys.stderr)
"""


def environment() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "ONLY": "this"}


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_it_sees_what_a_new_process_sees(tmp_path: Path, kind: str) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    argv = {"-c": ["-c", REPORT], "-m": ["-m", "report"], "file": [str(tmp_path / "report.py")]}[kind]
    argv += ["one", "--two"]
    done = subprocess.run(
        [sys.executable, *argv], env=environment(), cwd=tmp_path, input="given", capture_output=True, text=True
    )
    forked = [fork_server.run(argv, "torch", environment(), tmp_path, "given") for _ in range(2)]
    assert json.loads(forked[0].stdout) == json.loads(done.stdout)
    # Each draws its own numbers.
    assert len({number for one in forked for number in one.stderr.split()}) == 4


@pytest.mark.parametrize(
    ("script", "code", "stderr"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("import os; os.kill(os.getpid(), 11)", -signal.SIGSEGV, ""),
        ("import atexit, sys; atexit.register(lambda: sys.stderr.write('end'))", 0, "end"),
    ],
)
def test_its_end_is_told_as_it_was(script: str, code: int, stderr: str) -> None:
    done = fork_server.run(["-c", script], "torch", environment())
    assert (done.returncode, done.stderr) == (code, stderr)


def test_it_can_be_waited_for_and_killed() -> None:
    with Path(os.devnull).open("r+") as nothing:
        streams = [nothing.fileno()] * 3
        process = fork_server.start(
            ["-c", "import time; time.sleep(9999)"], "torch", environment(), Path.cwd(), *streams
        )
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    process.kill()
    assert process.wait(STEP_S) == process.poll() == -signal.SIGKILL
    process.kill()  # nothing happens to what has its number now


@pytest.mark.parametrize(
    ("imports", "has", "lacks"),
    [
        ("torch", "torch", "deepspeed"),
        ("deepspeed", "deepspeed", "megatron"),
        ("megatron-core", "megatron", "deepspeed"),
    ],
)
def test_it_has_the_imports_and_torch_as_it_is(imports: str, has: str, lacks: str) -> None:
    script = f"""
import sys
assert "{has}" in sys.modules and "{lacks}" not in sys.modules
import torch
assert not torch.distributed.is_initialized()
print(torch.empty, torch.compile.__module__, torch.cuda.device_count(), torch.Tensor.to.__qualname__)
"""
    done = fork_server.run(["-c", script], imports, environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.partition(" at 0x")[0] == "<built-in method empty of type object"
    assert done.stdout.partition("> ")[2] == "torch 0 TensorBase.to\n"
