"""A short all-reduce over all slots of some nodes, to test their network before a run.

``python -P -m tridock.train.allreduce --node-rank N --world BASE64 …`` on each node imports torch once and forks the
ranks. It prints one JSON object per line: rank 0's result, or a rank's error. No process outlives ``--limit`` seconds.
"""

import argparse
import base64
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from tridock.contracts import environment
from tridock.contracts.codec import encode

_ROUNDS = 4
_REPORT_S = 4.0
"""Time that a rank reserves within the limit, to report why the others did not come."""
_SLOW = 0.3
"""The share of the limit above which importing torch counts as slow; on an idle machine it takes a twentieth."""
_MEGABYTES = {"gloo": 8, "nccl": 256}


class Measure(Protocol):
    """A rank's measurement; rank 0 prints its result as JSON."""

    def __call__(self, rank: int, slot: int, timeout: timedelta, nodes: int) -> object: ...


def main(measure: Measure | None = None) -> int:
    """Runs this node's ranks with ``measure``; returns 0 if all succeeded, 142 after a timeout, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", required=True, help="base64 of a JSON object: node to slots, in order")
    parser.add_argument("--node-rank", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    parser.add_argument("--limit", type=int, required=True, help="seconds")
    given = parser.parse_args()
    world: dict[str, list[int]] = json.loads(base64.urlsafe_b64decode(given.world))
    signal.alarm(given.limit)  # before torch is imported: from a cold disk that alone may exceed the limit
    began = time.monotonic()
    import torch  # noqa: F401 (once, for the ranks that are forked below)

    load_s = time.monotonic() - began
    slots = list(world.values())
    os.environ |= {"MASTER_ADDR": given.master_addr, "MASTER_PORT": given.master_port}
    os.environ["WORLD_SIZE"] = str(sum(map(len, slots)))
    first = sum(map(len, slots[: given.node_rank]))
    # Forked before anything touches a GPU: CUDA does not survive a fork.
    remaining = signal.getitimer(signal.ITIMER_REAL)[0]
    # A slow import leaves less time for the rest: then the machine is slow, and not the network.
    slow = f" (to load torch took {load_s:.0f} of {given.limit} s: its processors or its disk are busy)"
    why = slow if load_s > given.limit * _SLOW else ""
    places = enumerate(slots[given.node_rank])
    of_rank = functools.partial(measure or _measure, nodes=len(slots))
    children = [_fork(of_rank, first + place, slot, max(1, int(remaining)), why) for place, slot in places]
    signal.alarm(0)  # the ranks have alarms of their own
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(code == -signal.SIGALRM for code in codes):
        return 128 + signal.SIGALRM
    return 1 if any(codes) else 0


def _fork(measure: Callable[[int, int, timedelta], object], rank: int, slot: int, limit: int, why: str) -> int:
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    signal.alarm(limit)  # alarms are not inherited
    code = 1
    try:
        code = _rank(measure, rank, slot, why)
    finally:
        sys.stdout.flush()
        os._exit(code)  # Gloo's threads may abort a process whose work is done


def _rank(measure: Callable[[int, int, timedelta], object], rank: int, slot: int, why: str) -> int:
    """Measures, and prints the result or the error, followed by ``why``; returns the exit code."""
    # Imported before the remaining time is read: on a busy machine the import takes seconds, too.
    from tridock.train.rank import device  # noqa: F401
    from tridock.train.rank.collective_errors import reason

    remaining = signal.getitimer(signal.ITIMER_REAL)[0]
    try:
        result = measure(rank, slot, timedelta(seconds=max(2.0, remaining - _REPORT_S)))
    except Exception as error:
        signal.alarm(0)  # to report it takes no time
        print(json.dumps({"rank": rank, "error": reason(error) + why}), flush=True)
        return 1
    if rank == 0:
        print(encode(result), flush=True)
    return 0


def join(rank: int, slot: int, timeout: timedelta) -> tuple[Any, str]:
    """Joins the group of all ranks; returns this rank's device and the backend."""
    import torch.distributed as dist

    from tridock.train.rank.device import choose_device

    os.environ["CUDA_VISIBLE_DEVICES"] = _device_of(slot)
    device = choose_device(0)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)
    return device, backend


def _measure(rank: int, slot: int, timeout: timedelta, nodes: int) -> object:  # noqa: ARG001  of other measures
    """Sums over all ranks and checks the sum. Bandwidth is nccl-tests' ``busbw``: 2 (n - 1) / n x bytes / seconds."""
    import torch
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    began = time.perf_counter()
    device, backend = join(rank, slot, timeout)
    on_gpu = device.type == "cuda"
    values = torch.empty(_MEGABYTES[backend] << 18, device=device)  # of four bytes each
    seconds = []
    for _ in range(_ROUNDS):
        values.fill_(rank + 1)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(values)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if not bool((values == size * (size + 1) / 2).all()):
            raise RuntimeError("the sum is wrong: data was damaged on its way")
    moved = 2 * (size - 1) / size * values.nbytes
    joined = time.perf_counter() - began - sum(seconds)
    return {
        "ranks": size,
        "backend": backend,
        "bytes": values.nbytes,
        "seconds": min(seconds),
        "bus_bytes_per_second": moved / min(seconds),
        "join_seconds": joined,
    }


def _device_of(slot: int) -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES for a slot, within the node's own; empty for a slot beyond those."""
    visible = os.environ.get(environment.DEVICES, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return str(slot) if visible is None else "".join(visible.split(",")[slot : slot + 1])


if __name__ == "__main__":
    sys.exit(main())
