"""Two ranks that do what fails, one fault after another, each reported as a rank of a run reports it.

``python -m tests.distributed.faults FOLDER``: every fault has a run's folder of its own below, named as the rule.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch._C._distributed_c10d import _dump_fr_trace

from tests.distributed.ranks import free_port
from tests.patience import STEP_S
from tridock.contracts.run_folder import FLIGHT
from tridock.train.checkpoints.pickles import safe_distributed_load
from tridock.train.rank import process_group, run, signals

FOLDER = Path(sys.argv[1])
FIRST = os.environ["RANK"] == "0"


def host_out_of_memory() -> None:
    torch.empty(1 << 52)


def address_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        dist.TCPStore("127.0.0.1", server.getsockname()[1], 1, is_master=True)


@contextmanager
def limited(what: int, soft: int) -> Any:
    before, hard = resource.getrlimit(what)
    resource.setrlimit(what, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (before, hard))


def too_many_open_files() -> None:
    with limited(resource.RLIMIT_NOFILE, 64), ExitStack() as stack:
        while True:
            stack.enter_context(Path(os.devnull).open())


def too_many_processes() -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    done = threading.Event()
    try:
        with limited(resource.RLIMIT_AS, size + (64 << 20)):
            while True:
                threading.Thread(target=done.wait, daemon=True).start()
    finally:
        done.set()


def disk_full() -> None:
    torch.save(torch.zeros(100_000), "/dev/full")


def missing_file() -> None:
    np.memmap(FOLDER / "none.bin")


def index_maps_missing() -> None:
    np.load(FOLDER / "text_train_indexmap_10ns_16sl_1234s_doc_idx.npy")


def permission() -> None:
    Path("/sys/kernel/tridock").write_text("x")


def checkpoint_corrupted() -> None:
    path = FOLDER / "model.pt"
    torch.save(torch.zeros(1000), path)
    path.write_bytes(path.read_bytes()[:2000])
    torch.load(path)


class Unknown:
    """What an earlier version may have put into a checkpoint."""


def checkpoint_of_another_version() -> None:
    torch.save({"args": Unknown()}, FOLDER / "other.pt")
    torch.load(FOLDER / "other.pt", weights_only=True)


def metadata_of_another_version() -> None:
    """torch then looks for files of each rank, which never were: not they are what is missing."""
    (FOLDER / "distributed").mkdir()
    (FOLDER / "distributed" / ".metadata").write_bytes(pickle.dumps(Unknown()))
    with safe_distributed_load():
        checkpoint.load({"a": torch.zeros(1)}, checkpoint_id=str(FOLDER / "distributed"), no_dist=True)


def checkpoint_of_another_layout() -> None:
    torch.nn.Linear(3, 3).load_state_dict(torch.nn.Linear(3, 4).state_dict())


def missing_module() -> None:
    __import__("tridock_none")


def version_mismatch() -> None:
    torch.save(1, FOLDER / "x", compressed=True)  # type: ignore[call-arg]


def vocabulary_too_small() -> None:
    torch.nn.Embedding(4, 2)(torch.tensor([4]))


def no_such_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "tridock0"
    try:
        meet(1)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def rendezvous() -> None:
    changes = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port()), "DEEPSPEED_TIMEOUT": "0.01"}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        process_group.join()
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def ended_from_outside() -> None:
    signals.listen(FOLDER)
    signals._EXIT_SECONDS = 9999.0  # it goes through another fault afterwards
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)


def meet(world_size: int, name: str = "alone", seconds: float = STEP_S) -> None:
    store = dist.FileStore(str(FOLDER / f"store-{name}"), world_size)
    place = int(os.environ["RANK"]) if world_size > 1 else 0
    if world_size > 1:
        (FOLDER / f"{name}-{place}").touch()
        wait_for(f"{name}-{1 - place}")  # it has more faults to go through before
    dist.init_process_group("gloo", store=store, rank=place, world_size=world_size, timeout=timedelta(seconds=seconds))


def wait_for(name: str) -> None:
    while not (FOLDER / name).exists():
        time.sleep(0.05)


def collective_timeout() -> None:
    meet(2, "late", 4.0)
    dist.all_reduce(torch.zeros(4))
    try:
        if FIRST:
            dist.all_reduce(torch.zeros(4))
        wait_for("timed-out")
    finally:
        (FOLDER / "timed-out").touch()
        # As NCCL's watchdog does; Gloo has none.
        flight = FOLDER / "runs" / "collective-timeout" / f"{FLIGHT}{os.environ['RANK']}"
        flight.write_bytes(_dump_fr_trace())


def collectives_differ() -> None:
    meet(2, "differ")
    dist.all_reduce(torch.zeros(4 if FIRST else 4096))


def another_rank_has_gone() -> None:
    meet(2, "gone")
    if FIRST:
        dist.all_reduce(torch.zeros(4))


ALONE: dict[str, Callable[[], None]] = {
    "host-out-of-memory": host_out_of_memory,
    "address-in-use": address_in_use,
    "too-many-open-files": too_many_open_files,
    "too-many-processes": too_many_processes,
    "disk-full": disk_full,
    "missing-file": missing_file,
    "index-maps-missing": index_maps_missing,
    "permission": permission,
    "checkpoint-corrupted": checkpoint_corrupted,
    "checkpoint-of-another-version": checkpoint_of_another_version,
    "checkpoint-of-another-version, distributed": metadata_of_another_version,
    "checkpoint-of-another-layout": checkpoint_of_another_layout,
    "import": missing_module,
    "version-mismatch": version_mismatch,
    "vocabulary-too-small": vocabulary_too_small,
    "rendezvous": rendezvous,
    "terminated": ended_from_outside,
}
TOGETHER: dict[str, Callable[[], None]] = {
    "peer-lost": another_rank_has_gone,
    "collective-timeout": collective_timeout,
    "no-such-interface": no_such_interface,
}
LAST: dict[str, Callable[[], None]] = {"collectives-differ": collectives_differ}


def main() -> None:
    """All of them; the faults of one rank are the first's. The last one ends a process where it stands.

    Both have to make as many process groups: torch counts them, and so finds the same one on all ranks.
    """
    for name, fault in {**TOGETHER, **(ALONE if FIRST else {}), **LAST}.items():
        folder = FOLDER / "runs" / name
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        output = os.open(folder / f"logs/rank-{os.environ['RANK']}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        run._run_guarded(folder, fault)
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
