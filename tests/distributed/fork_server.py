"""Fresh Python processes that need not import torch: a server has imported what they need, and forks one on request.

``start(["-m", MODULE, …], imports="deepspeed", …)`` gives what ``subprocess.Popen([sys.executable, "-m", MODULE, …])``
would: a process with its own arguments, environment, working directory, standard streams and end. What differs: its
parent is the server, and /proc shows the server's command line and environment. Tests of a process's start (signals
while it imports, the command line, what ``/proc`` shows) start real ones.

A server serves one set of imports, and is itself a fork of the one whose imports it adds to. It has a single thread, no
process group and no CUDA context, as a fork needs it. It ends with the process of the tests.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
PARENTS: dict[str, str | None] = {"torch": None, "deepspeed": "torch", "megatron-core": "torch"}
"""Sets of imports, and the set that each adds to."""
MODULES = {
    "torch": (
        "torch._dynamo", "torch.distributed.checkpoint._fsspec_filesystem", "torch.distributed.fsdp",
        "torch.distributed.pipelining", "torch.distributed.tensor.parallel", "torch.nn.parallel.distributed",
        "torch.profiler._cupti_monitor", "torch.utils.serialization.config",
        "tridock.experiment", "tridock.train.trainer", "tridock.train.rank.run", "tridock.train.rank.process_group",
        "tridock.train.rank.metrics", "tridock.train.parallel.mesh_strategy", "tridock.train.parallel.pipeline",
        "tridock.train.checkpoints.sharded",
    ),
    # The last four DeepSpeed imports on its way.
    "deepspeed": (
        "deepspeed", "deepspeed.runtime.engine", "deepspeed.runtime.zero.muon.muon_optimizer",
        "deepspeed.runtime.zero.stage3", "deepspeed.ops.adam", "deepspeed.runtime.superoffload.superoffload_stage3",
        "deepspeed.module_inject.auto_ep_layer",
    ),
    "megatron-core": ("tridock.train.megatron_core.strategy",),
}  # fmt: skip


class Process:
    """A fork, with the calls of ``subprocess.Popen`` that the tests need."""

    def __init__(self, args: Sequence[str], report: int) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._report = os.fdopen(report, "rb", buffering=0)
        first = self._report.readline()
        assert first, f"the fork server has died before it could start {args}"
        self.pid = int(first)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            last = self._report.readline()
            assert last, f"the fork server has died before process {self.pid}"
            self._report.close()
            self.returncode = int(last)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(
    argv: Sequence[str], imports: str, env: Mapping[str, str], cwd: Path, stdin: int, stdout: int, stderr: int
) -> Process:
    """``python argv``: ``-m MODULE``, ``-c SCRIPT`` or a file, and its arguments. The descriptors stay the caller's."""
    order = {"argv": list(argv), "env": dict(env), "cwd": str(cwd)}
    report, write = os.pipe()
    try:
        socket.send_fds(_server(imports), [json.dumps(order).encode()], [write, stdin, stdout, stderr])
    finally:
        os.close(write)
    return Process(argv, report)


def run(
    argv: Sequence[str], imports: str, env: Mapping[str, str], cwd: Path = ROOT, text: str = ""
) -> subprocess.CompletedProcess[str]:
    """Starts a process, gives it the text, waits, and gives its output."""
    with ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        given.write(text)
        given.seek(0)
        code = start(argv, imports, env, cwd, given.fileno(), out.fileno(), err.fileno()).wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(argv), code, out.read(), err.read())


@cache
def _server(imports: str) -> socket.socket:
    """The socket to the server of these imports, which is started first."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        if (parent := PARENTS[imports]) is not None:
            socket.send_fds(_server(parent), [json.dumps({"imports": imports}).encode()], [theirs.fileno()])
            atexit.register(ours.close)
            return ours
        # Settings that count at an import.
        env = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        env |= {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.fork_server", imports, str(theirs.fileno())],
            env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


# ---- in the server ---------------------------------------------------------------------------------------------------


@contextmanager
def _nothing_replaced() -> Iterator[None]:
    """What is put in place of torch's functions meanwhile goes again: each rank does that itself, and says so."""
    import torch

    spaces: list[Any] = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module]
    before = [dict(vars(space)) for space in spaces]
    yield
    for space, names in zip(spaces, before, strict=True):
        for name, value in dict(vars(space)).items():
            if name not in names and isinstance(space, type):
                delattr(space, name)
            elif names.get(name, value) is not value:
                setattr(space, name, names[name])


def _import(imports: str) -> None:
    core = imports == "megatron-core"
    with _nothing_replaced() if core else nullcontext():
        if core:
            importlib.import_module("tridock.compat.megatron_core").prepare("cpu", 1)
        for name in MODULES[imports]:
            with suppress(ModuleNotFoundError) if "._" in name else nullcontext():  # not every torch has it
                importlib.import_module(name)
    gc.collect()
    gc.freeze()  # it stays in memory that all forks share
    assert len(os.listdir("/proc/self/task")) == 1, f"importing {imports} has started a thread"  # noqa: PTH208


def _serve(orders: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Forks until the tests have gone, and tells each process's end; returns in the forks, with their order."""
    processes: dict[int, tuple[int, int]] = {}  # by the descriptor that tells the end: the id, and where to tell it
    while True:
        for ready in select.select([orders, *processes], [], [])[0]:
            if ready is not orders:
                pid, report = processes.pop(ready)
                _tell(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(report)
                os.close(ready)
                continue
            message, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 4)
            if not message:
                _end(pid for pid, _ in processes.values())
            order = json.loads(message)
            if (pid := os.fork()) == 0:
                orders.close()
                for pair in processes.items():
                    os.close(pair[0])
                    os.close(pair[1][1])
                return order, descriptors
            if "argv" in order:
                _tell(descriptors[0], pid)
                processes[os.pidfd_open(pid)] = pid, descriptors.pop(0)
            for descriptor in descriptors:
                os.close(descriptor)


def _tell(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for it
        os.write(report, f"{number}\n".encode())


def _end(processes: Iterable[int]) -> NoReturn:
    """Kills what is left, and waits for the servers that this one has forked, which have been let go, too."""
    for pid in processes:
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    sys.exit()


def _become(order: dict[str, Any], report: int, streams: Sequence[int]) -> None:
    """Makes this fork the process that is asked for, but for its program."""
    os.close(report)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in streams:
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.path[1:1] = [path for path in order["env"].get("PYTHONPATH", "").split(":") if path and path not in sys.path]
    importlib.import_module("numpy").random.seed()


def _run(argv: list[str]) -> None:
    """As ``python argv``."""
    kind, *arguments = argv
    if kind == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[1:]]
        vars(sys.modules["__main__"]).clear()
        exec(arguments[0], {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(kind).parent)
        sys.argv = argv
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Serves; returns in each fork when its program ends, and Python ends as it always does."""
    imports, orders = sys.argv[1], socket.socket(fileno=int(sys.argv[2]))
    while True:
        _import(imports)
        order, descriptors = _serve(orders)
        if "argv" in order:
            break
        imports, orders = order["imports"], socket.socket(fileno=descriptors[0])
    _become(order, descriptors[0], descriptors[1:])
    _run(order["argv"])


if __name__ == "__main__":
    main()
