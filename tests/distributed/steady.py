"""Ranks that train nothing, for tests of what surrounds ranks: ``python steady.py RUN_FOLDER RANKS STEPS [LOAD]``.

They write a heartbeat at every step and a checkpoint's pointer after every tenth, and continue from there if LOAD is
given. Anything else is on request: a file ``<rank>-<word>`` in the run's folder is taken away and done; in the phase
that HELD names they wait for a file ``go`` there.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tridock.contracts import heartbeat
from tridock.contracts.checkpoints import MANIFEST, newest
from tridock.contracts.events import append_event
from tridock.contracts.run_folder import write_atomic

STEP_S = float(os.environ.get("STEP_S", "0.05"))
LONG_STEP_S = 9.0
HELD = os.environ.get("HELD")


def hang_for_ever() -> None:
    """A frame that no collective has."""
    time.sleep(9999)


def launch(folder: Path, ranks: int, arguments: list[str]) -> int:
    """Starts the ranks and looks after them once a second, as DeepSpeed's launcher does; leaves their end to others."""
    command = [sys.executable, __file__, str(folder)]
    running = [
        subprocess.Popen([*command, "rank", *arguments], env=os.environ | {"RANK": str(rank)}) for rank in range(ranks)
    ]
    while any(process.poll() is None for process in running):
        time.sleep(1.0)
    return max((abs(process.returncode) for process in running), default=0)


def train(folder: Path, rank: int, steps: int, load: bool) -> None:
    """One rank."""
    found = newest(folder / "checkpoints") if load else None
    first = found[0] if found else 0
    (folder / heartbeat.FOLDER).mkdir(exist_ok=True)
    faulthandler.register(heartbeat.STACKS_SIGNAL, heartbeat.stacks_path(folder, rank).open("w"), all_threads=True)
    heartbeat.start(folder, rank)
    hold(folder, heartbeat.START)
    heartbeat.beat(heartbeat.FIRST_STEP, first)
    hold(folder, heartbeat.FIRST_STEP)
    iteration = first
    for iteration in range(first + 1, steps + 1):
        time.sleep(STEP_S)
        heartbeat.beat(heartbeat.TRAIN, iteration)
        if iteration % 10 == 0 and rank == 0:
            manifest = json.dumps({"iteration": iteration, "files": {}})
            write_atomic(folder / "checkpoints" / f"iter_{iteration:07d}" / MANIFEST, manifest.encode())
        if obey(folder, rank):
            break
    for phase in (heartbeat.EVAL, heartbeat.SAVE, heartbeat.END):
        heartbeat.beat(phase)
        hold(folder, phase)
    if rank == 0:
        append_event(folder, "run_finished", iteration=iteration)


def hold(folder: Path, phase: str) -> None:
    """Waits for ``go`` if that is the phase to wait in."""
    while phase == HELD and not (folder / "go").exists():
        time.sleep(STEP_S)
        if phase == heartbeat.EVAL:  # a micro-batch
            heartbeat.touch()


def obey(folder: Path, rank: int) -> bool:
    """Does what is asked for; returns whether the training is to end here, as after its last step."""
    for order in folder.glob(f"{rank}-*"):
        order.unlink()
        word = order.name.partition("-")[2]
        if word == "finish":
            return True
        if word == "work":  # one step of many micro-batches
            end = time.monotonic() + LONG_STEP_S
            while time.monotonic() < end:
                time.sleep(STEP_S)
                heartbeat.touch()
        if word == "hang":
            hang_for_ever()
        if word == "lose":  # another rank
            heartbeat.beat(heartbeat.LOST, code=4)
            os._exit(4)
        if word.startswith("exit"):
            os._exit(int(word.removeprefix("exit")))
        if word.startswith("fail"):
            code = int(word.removeprefix("fail"))
            append_event(folder, "run_failed", rank=rank, reason="asked to", agreed=code == 5)
            heartbeat.beat(heartbeat.FAILED, code=code)
            os._exit(code)
    return False


if __name__ == "__main__":
    where, what, *rest = sys.argv[1:]
    if what == "rank":
        train(Path(where), int(os.environ["RANK"]), int(rest[0]), len(rest) > 1)
    else:
        sys.exit(launch(Path(where), int(what), rest))
