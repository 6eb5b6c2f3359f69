"""What the saves of every engine have to stand: a rank is killed at any point of one, again and again."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

from tests.distributed.disturbed import Begin, finish, iterations, named
from tests.distributed.killed import count_file
from tests.distributed.ranks import losses
from tests.patience import WORK_S
from tridock.contracts.checkpoint_files import is_complete
from tridock.contracts.checkpoints import saved_in

SEED = 20260101
DEATHS = (-signal.SIGKILL, -signal.SIGXFSZ)


def survive(begin: Begin, workspace: Path, name: str, points: int) -> None:
    """Kills so many runs, each of which continues from what the one before has left in their one folder.

    Every kill is one of a process, at a random point from the constructor of ``Checkpoints`` to the end of the run's
    second save: before a change of the folder, or within a file. The other rank runs until it misses the first, and
    is killed too, as a supervisor does. Every run is a real one, and its losses are those of a run left alone. At the
    end only whole checkpoints and their pointers are there.
    """
    folder, chance = workspace / name, random.Random(SEED)
    last = 2 * points + 8
    length = {"train.train_iters": last, "train.eval_interval": 0}
    saves = {
        "train.save": True,
        "train.save_interval": 1,
        "train.keep_checkpoints": 2,
        "train.checkpoint_folder": name,
        "train.load": name,
        **length,
    }
    whole, ranks = begin("whole", None, **{"train.save": False}, **length)
    finish(ranks, 0)
    expected, seen = losses(whole), set[int]()
    for number in range(2):  # the second removes checkpoints too
        counted, ranks = begin(f"counted-{number}", "count", **saves)
        finish(ranks, 0)
        seen |= {*iterations(counted)}
    operations = [int(count_file(folder, rank).read_text()) for rank in range(2)]
    within_files = 0
    for number in range(points):
        whole_ones = sorted(it for it, path in saved_in(folder).items() if is_complete(path))
        loads = chance.choice(whole_ones) if chance.random() < 0.2 else whole_ones[-1]
        given: dict[str, Any] = {} if loads == whole_ones[-1] else {
            "train.load": f"{name}/{saved_in(folder)[loads].name}"
        }  # fmt: skip
        if chance.random() < 0.7:
            kind, place = "operation", chance.randint(1, sum(operations))
            rank = int(place > operations[0])
            place -= rank * operations[0]
        else:
            sizes = [path.stat().st_size for path in saved_in(folder)[whole_ones[-1]].rglob("*") if path.is_file()]
            kind, rank, place = "bytes", chance.randrange(2), chance.randrange(chance.choice(sizes))
        run, ranks = begin(f"killed-{number}", f"{kind}:{rank}:{place}", **{**saves, **given})
        with ranks:
            code = ranks.processes[rank].wait(WORK_S)
        said = f"{kind}:{rank}:{place}\n" + "".join(path.read_text() for pair in ranks.outputs for path in pair)
        assert code in DEATHS, said
        within_files += code == -signal.SIGXFSZ
        assert "is not saved" not in said
        loaded = [event["iteration"] for event in named(run, "checkpoint_loaded")]
        assert loaded in ([], [loads]), said
        if (run / "metrics.jsonl").exists():
            assert losses(run).items() <= expected.items(), said
            seen |= {*iterations(run)}
        for aside in folder.glob("*.set-aside-*"):
            assert is_complete(aside), said
            shutil.rmtree(aside)
    assert within_files >= points // 25  # a rank of ddp writes none
    final, ranks = begin("final", None, **saves)
    finish(ranks, 0)
    assert losses(final).items() <= expected.items()
    assert seen | {*iterations(final)} == set(range(1, last + 1))
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") or path.is_dir()]
    assert sorted(left) == sorted(path.name for path in saved_in(folder).values())
    assert sorted(saved_in(folder)) == [last - 1, last]
