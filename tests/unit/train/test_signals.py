"""What a rank does on SIGTERM and SIGUSR1: real signals to real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

BEGINNING = """
import ctypes, os, sys, time
from pathlib import Path
from tridock.train.rank import signals
os.environ["RANK"] = "3"
signals._EXIT_SECONDS = signals.BURST_SECONDS = 0.3
signals.STEP_SECONDS = 1.0
signals.listen(Path(sys.argv[1]))
"""
# A limit that is not the subject: a busy machine takes its time to end a Python.
LOOP = """
signals._EXIT_SECONDS = 600.0
steps = 0
with signals.save_on_signal():
    while not signals.save_requested(lambda here: here):
        time.sleep(0.01)
        steps += 1
        if steps == 1:
            print("ready", flush=True)
    print("asked", steps > 0, flush=True)
    time.sleep(float(sys.argv[2]))
print("done", flush=True)
os._exit(5)
"""
# A mutex locked twice waits in C for ever, as a collective does whose other ranks have stopped.
BLOCKED = """
mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
lock(mutex)
"""
ASKED = "asked True\n"
LAST_LINE = "rank 3: stopped by SIGTERM inside a collective\n"


def signalled(
    folder: Path, program: str, *numbers: int, argument: str = "0", pause: float = 1.2, heard: str = ""
) -> tuple[int, str, float]:
    """Exit code, output and seconds of a rank that gets the signals, ``pause`` apart, once it says that it is ready.

    ``heard``: the line by which it says that it has got the first one. Signals that wait for it together are one.
    """
    command: Sequence[str] = [sys.executable, "-c", BEGINNING + program, str(folder), argument]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            started = time.monotonic()
            for count, number in enumerate(numbers):
                if count:
                    assert not heard or process.stdout.readline() == heard
                    time.sleep(pause)
                process.send_signal(number)
            said = heard + process.stdout.read()
            return process.wait(), said, time.monotonic() - started
        finally:
            process.kill()


def test_sigterm_stops_the_main_thread(tmp_path: Path) -> None:
    program = """
signals._EXIT_SECONDS = 600.0
try:
    print("ready", flush=True)
    time.sleep(9999)
except signals.Stopped:
    print("stopped", flush=True)
    os._exit(7)
"""
    code, said, _ = signalled(tmp_path, program, signal.SIGTERM)
    assert (code, said) == (7, "stopped\n")


def test_sigterm_ends_a_rank_whose_way_out_is_blocked(tmp_path: Path) -> None:
    program = f"""
try:
    print("ready", flush=True)
    time.sleep(9999)
except signals.Stopped:
    {BLOCKED.strip().replace(chr(10), chr(10) + "    ")}
    lock(mutex)
"""
    code, said, _ = signalled(tmp_path, program, signal.SIGTERM)
    assert (code, said) == (143, LAST_LINE)


def test_sigterm_in_a_finalizer_is_not_lost(tmp_path: Path) -> None:
    program = """
import signal
signals._EXIT_SECONDS = 600.0
class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)

print("ready", flush=True)
try:
    thing = Thing()
    del thing
    time.sleep(9999)
except signals.Stopped:
    print("stopped", flush=True)
    os._exit(0)
"""
    assert signalled(tmp_path, program)[:2] == (0, "stopped\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_that_saves_is_asked_after_its_step(tmp_path: Path, number: int) -> None:
    # Longer than a step may take: the time is over once the step is.
    code, said, _ = signalled(tmp_path, LOOP, number, argument="1.5")
    assert (code, said) == (5, "asked True\ndone\n")


def test_a_launcher_that_repeats_the_signal_is_no_second_one(tmp_path: Path) -> None:
    program = f"signals.BURST_SECONDS = 600.0{LOOP}"
    code, said, _ = signalled(tmp_path, program, signal.SIGTERM, signal.SIGTERM, argument="1.5", pause=0.05)
    assert (code, said) == (5, "asked True\ndone\n")


def test_sigterm_at_the_limit_leaves_a_save_alone_that_sigusr1_began(tmp_path: Path) -> None:
    code, said, _ = signalled(tmp_path, LOOP, signal.SIGUSR1, signal.SIGTERM, argument="4", pause=1.0, heard=ASKED)
    assert (code, said) == (5, "asked True\ndone\n")


def test_a_second_sigterm_ends_a_rank_that_saves(tmp_path: Path) -> None:
    code, said, _ = signalled(tmp_path, LOOP, signal.SIGTERM, signal.SIGTERM, argument="9999", heard=ASKED)
    assert code == 1
    assert said.splitlines()[-1].endswith("Stopped")


def test_who_stops_the_run_wants_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / ".stopped").touch()
    code, said, _ = signalled(tmp_path, LOOP, signal.SIGTERM, argument="9999")
    assert code == 1
    assert said.splitlines()[-1].endswith("Stopped")


def test_a_step_that_does_not_end_is_left(tmp_path: Path) -> None:
    program = f"""
with signals.save_on_signal():
    print("ready", flush=True)
    {BLOCKED.strip().replace(chr(10), chr(10) + "    ")}
    lock(mutex)
"""
    code, said, seconds = signalled(tmp_path, program, signal.SIGTERM)
    assert (code, said) == (143, LAST_LINE)
    assert seconds > 0.9


def test_sigusr1_gives_a_step_all_the_time_it_takes(tmp_path: Path) -> None:
    program = f"""
import threading
with signals.save_on_signal():
    threading.Timer(1.0, lambda: os._exit(9)).start()
    print("ready", flush=True)
    {BLOCKED.strip().replace(chr(10), chr(10) + "    ")}
    lock(mutex)
"""
    assert signalled(tmp_path, program, signal.SIGUSR1)[:2] == (9, "")
