"""A lock that another process holds: the wait has a limit, and the error names the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tridock.contracts.file_locks import wait_for_lock
from tridock.errors import RequestError

HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_holder_is_named_and_its_end_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    argv = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        descriptor = os.open(path, os.O_RDWR)
        with pytest.raises(RequestError) as caught:
            wait_for_lock(descriptor, path, 0.1)
        assert str(caught.value).startswith(f"{path}: is locked for more than 0.1 s; got process {holder.pid} (")
        holder.kill()
    wait_for_lock(descriptor, path, 300)
    os.close(descriptor)
