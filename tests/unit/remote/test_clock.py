"""Limits on waiting in a process that is stopped, as by Ctrl-Z, and continues."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.patience import STEP_S
from tridock.remote import clock

ROOT = Path(__file__).parents[3]
LIMIT_S = 10.0
WAITING: Mapping[str, str] = {
    "the output of a run, followed": """
from tridock.contracts.run_folder import END
from tridock.ops.runs import logs

logs.SILENCE_S = LIMIT_S
end = "".join(f"\\{byte:03o}" for byte in END)
stream = LocalHost().stream(Command.of("sh", "-c", f"{script}; printf '{end}'"))
ready()
print(b"".join(logs.LogStream(stream, "a", "run-1")).decode())
""",
    "a command on a host": """
ready()
print(LocalHost().run(Command.of("sh", "-c", script), timeout=LIMIT_S).checked("a").stdout.decode())
""",
    "a line of a command that stays": """
from tridock.ops.hosts.attached import AWAIT_KEEPALIVES, AttachedCommand

command = AttachedCommand(LocalHost(), Command.of("sh", "-c", f"{script}; {AWAIT_KEEPALIVES}"), "fails")
ready()
print(command.line(LIMIT_S))
command.end()
""",
    "a program here": """
from tridock.remote import clock

ready()
print(clock.run(["sh", "-c", f"{script}; cat"], LIMIT_S, stdin=b", asked", start_new_session=True).stdout.decode())
""",
    "another node of a run": """
from tridock.ops.runs.rendezvous import Terms, lead

ready()
lead(PORT, Terms(0, 2, 1, "a"), "run-1", lambda _: None, LIMIT_S)
print("trained")
""",
}
BEGIN = """
import sys
from tridock.command import Command
from tridock.remote import LocalHost

def ready():
    print("ready", flush=True)
    sys.stdin.readline()

there, LIMIT_S, PORT = {there!r}, {limit}, {port}
script = f"until [ -e {{there}} ]; do sleep 0.2; done; echo trained"
"""


@contextmanager
def running(there: Path, port: int) -> Iterator[dict[str, subprocess.Popen[str]]]:
    begin = BEGIN.format(there=str(there), limit=LIMIT_S, port=port)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    processes = {
        name: subprocess.Popen(
            [sys.executable, "-c", begin + script],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name, script in WAITING.items()
    }
    try:
        yield processes
    finally:
        there.touch()
        for process in processes.values():
            process.kill()
            process.communicate()


def test_time_in_which_a_command_was_stopped_counts_in_no_limit(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    there = tmp_path / "there"
    with running(there, port) as processes:
        for process in processes.values():
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
        for process in processes.values():  # all at once: the limit of one runs, too, while another still imports
            assert process.stdin is not None
            process.stdin.write("begin\n")
            process.stdin.flush()
        time.sleep(1)
        for process in processes.values():
            process.send_signal(signal.SIGSTOP)
        time.sleep(LIMIT_S + 2)
        for process in processes.values():
            process.send_signal(signal.SIGCONT)
        time.sleep(1)
        there.touch()
        said = dict.fromkeys(processes, "")
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), STEP_S) as node:
            node.sendall(b'{"node_rank": 1, "nnodes": 2, "nproc": 1, "experiment_sha256": "a"}\n')
            node.recv(4096)
        for name, process in processes.items():
            out, errors = process.communicate(timeout=STEP_S)
            said[name] = out.replace("\n", "") or errors.splitlines()[-1]
    assert said == {**dict.fromkeys(WAITING, "trained"), "a program here": "trained, asked"}


def test_a_limit_is_kept_by_a_process_that_runs() -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        clock.run(["sleep", "9999"], 1.2)
    assert time.monotonic() - began >= 1.2
