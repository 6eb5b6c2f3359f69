"""What the checkpoints of every engine have to stand: a run is killed, preempted, robbed of a file and of its disk."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.distributed.ranks import Finished, Started, losses, read_lines
from tests.patience import WORK_S

Begin = Callable[..., tuple[Path, Started]]
"""Starts two ranks: the run's name, a fault of ``checkpointed`` or None, and fields."""
ITERATIONS = 40
EVERY = {"train.save": True, "train.save_interval": 1}


def live_through(begin: Begin, victim: str, writer: int) -> None:
    """One run after another, each from the checkpoints of the one before; their losses are those of a run left alone.

    ``victim`` is a pattern for the file that is damaged, ``writer`` a rank that writes to the disk.
    """
    whole, ranks = begin("whole", None, **{"train.save": False})
    finish(ranks, 0)

    killed, ranks = begin("killed", "paused:3", **EVERY)
    with ranks:
        wait_for(killed, "checkpoint_saved", 2, ranks)
        wait_until(lambda: 4 in iterations(killed), ranks)  # a step beyond the checkpoint that is being written
        for process in ranks.processes:
            process.kill()
    assert [event["iteration"] for event in saved(killed)] == [1, 2]

    preempted, ranks = begin("preempted", "slow:5", **EVERY, **load(killed))
    wait_for(preempted, "checkpoint_saved", 2, ranks)
    ranks.processes[1].send_signal(signal.SIGUSR1)  # one rank gets the signal: all save after the same step
    finish(ranks, 85)
    event = read_lines(preempted / "events.jsonl")[-1]
    assert (event["event"], event["iteration"]) == ("run_preempted", iterations(preempted)[-1])
    assert named(preempted, "checkpoint_loaded")[0]["iteration"] == 2
    newest = saved(preempted)[-1]
    assert newest["iteration"] == event["iteration"]

    damaged = next(Path(newest["folder"]).glob(victim))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    full = event["iteration"] + 2
    last, ranks = begin("last", f"full:{full}:{writer}", **EVERY, **load(preempted), **{"train.keep_checkpoints": 2})
    finished = finish(ranks, 0)

    (rejected,) = named(last, "checkpoint_rejected")
    assert rejected["folder"] == newest["folder"]
    assert len(rejected["reasons"]) == 1
    assert f"{damaged}: has changed since it was saved; got sha256 " in rejected["reasons"][0]
    assert f"warning: {newest['folder']} is passed over:\n{rejected['reasons'][0]}" in finished.out[0]
    assert named(last, "checkpoint_loaded")[0]["iteration"] == event["iteration"] - 1
    (failed,) = named(last, "checkpoint_failed")
    assert failed["iteration"] == full
    assert ": the checkpoint could not be written; got " in failed["reason"]
    assert f"warning: iteration {full} is not saved, and the run continues:\n{failed['reason']}" in finished.out[0]
    assert [event["iteration"] for event in saved(last)] == [
        number for number in range(event["iteration"], ITERATIONS + 1) if number != full
    ]
    kept = {Path(event["folder"]) for event in saved(last)[-2:]}
    assert {path for path in (last / "checkpoints").iterdir() if path.is_dir()} == kept

    expected = losses(whole)
    for folder in (killed, preempted, last):
        assert losses(folder).items() <= expected.items(), folder.name
    assert {*iterations(killed), *iterations(preempted), *iterations(last)} == set(range(1, ITERATIONS + 1))


def load(folder: Path) -> dict[str, Any]:
    """The field that continues a run."""
    return {"train.load": f"runs/{folder.name}/checkpoints"}


def finish(ranks: Started, code: int) -> Finished:
    """Waits; all ranks leave with the code."""
    with ranks:
        finished = ranks.wait()
    assert finished.codes == [code] * len(finished.codes), finished.out[0][-3000:] + finished.err[0][-3000:]
    for text in (*finished.out, *finished.err):
        assert "Traceback" not in text, text
    return finished


def named(folder: Path, event: str) -> list[dict[str, Any]]:
    """The events of a name."""
    path = folder / "events.jsonl"
    return [line for line in read_lines(path) if line["event"] == event] if path.exists() else []


def saved(folder: Path) -> list[dict[str, Any]]:
    """What a run has saved."""
    return named(folder, "checkpoint_saved")


def iterations(folder: Path) -> list[int]:
    """The iterations that a run has logged."""
    return sorted(number for number, split in losses(folder) if split == "train")


def wait_for(folder: Path, event: str, count: int, ranks: Started) -> None:
    """Until the event has come so often."""
    wait_until(lambda: len(named(folder, event)) >= count, ranks)


def wait_until(condition: Callable[[], bool], ranks: Started) -> None:
    deadline = time.monotonic() + WORK_S
    while not condition():
        assert time.monotonic() < deadline
        assert ranks.processes[0].poll() is None, ranks.outputs[0][0].read_text() + ranks.outputs[0][1].read_text()
        time.sleep(0.02)
