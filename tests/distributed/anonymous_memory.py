"""How much memory of its own a process has while it builds runs, and takes while it exports them.

Memory-mapped files do not count: the kernel can drop their pages. Arguments: ``build RUN...`` as one rank of a world,
or ``export RUN...``; prints ``{run: bytes}``. The first run is there for what is imported with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

FILE_BYTES = 8 << 20
"""Of an exported file, instead of gigabytes, which would hide the rest."""


M_MMAP_THRESHOLD = -3


def give_back_what_is_freed() -> None:
    """Large blocks are mapped one by one from now on: otherwise the allocator keeps some that nobody holds any more."""
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 << 10) == 1


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def most_during(work: Callable[[], object]) -> int:
    """The most memory of its own that the process had during the work."""
    gc.collect()
    done = threading.Event()
    found = [own_bytes()]

    def sample() -> None:
        while not done.is_set():
            found.append(own_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        kept = work()
        found.append(own_bytes())
        del kept
    finally:
        done.set()
        thread.join()
    return max(found)


def build(folders: list[Path]) -> dict[str, int]:
    from tridock.experiment import load_experiment
    from tridock.train import __main__ as torch_program
    from tridock.train.megatron_core import pretrain_gpt
    from tridock.train.rank import process_group
    from tridock.train.trainer import Trainer

    ranks = process_group.join()
    experiments = [load_experiment(folder / "experiment.yaml") for folder in folders]
    engine = (pretrain_gpt if experiments[0].engine == "megatron-core" else torch_program).engine(ranks)
    found = {}
    for folder, experiment in zip(folders, experiments, strict=True):
        found[folder.name] = most_during(partial(Trainer, experiment, folder, folder.parent.parent, ranks, engine))
    return found


def export(folders: list[Path]) -> dict[str, int]:
    from tridock.train.huggingface import export as program

    program.FILE_BYTES = FILE_BYTES
    found = {}
    for folder in folders:
        gc.collect()
        before = own_bytes()
        output = folder.parent / f"{folder.name}-hf"
        found[folder.name] = most_during(partial(program.export, folder, output, quiet=True)) - before
    return found


if __name__ == "__main__":
    from tridock.train.rank.run import end

    give_back_what_is_freed()
    what = {"build": build, "export": export}[sys.argv[1]]
    print(json.dumps(what([Path(word) for word in sys.argv[2:]])), flush=True)
    end(0, at_once=True)
