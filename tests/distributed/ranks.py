"""Real ranks on this machine's CPU: started as a launcher would, on a free port, with their output kept."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.dataset_writer import IndexedDatasetWriter
from tests.distributed import fork_server
from tests.experiments import with_fields
from tests.patience import WORK_S
from tridock.contracts.run_folder import DEEPSPEED_CONFIG, EXPERIMENT
from tridock.engines.deepspeed import deepspeed_config
from tridock.experiment import dump_experiment, load_experiment

ROOT = Path(__file__).parents[2]
VOCABULARY = 96


def free_port() -> int:
    """A port that nothing listens on, and that neither another of xdist's workers nor the kernel gives away."""
    first = 10_000 + 1_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.randrange(first, first + 1_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def make_data(workspace: Path, name: str = "small", documents: int = 240) -> None:
    """``data/<name>``: documents of counting numbers, so that there is something to learn."""
    with IndexedDatasetWriter(workspace / "data" / name, VOCABULARY) as writer:
        for number in range(documents):
            length, stride = 20 + number * 37 % 180, 1 + number % 3
            writer.add_document([(number * 11 + stride * place) % VOCABULARY for place in range(length)])


def make_run(workspace: Path, name: str, world_size: int, **fields: Any) -> Path:
    """The folder of a run with its experiment; dotted names change fields."""
    base: dict[str, Any] = {
        "name": "small",
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "seq_length": 16,
            "vocab_size": VOCABULARY,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "parallel": {"strategy": "ddp"},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "data": {"data_path": "data/small", "split": "80,10,10"},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "lr_warmup_iters": 3},
        "precision": "fp32",
        "train": {"train_iters": 8, "log_interval": 1, "eval_iters": 2, "save": False, "tensorboard": False},
    }
    experiment = with_fields(base, fields)
    folder = workspace / "runs" / name
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(dump_experiment(experiment))
    if experiment.parallel.strategy == "zero":
        (folder / DEEPSPEED_CONFIG).write_text(json.dumps(deepspeed_config(experiment, world_size)))
    return folder


@dataclass(frozen=True)
class Finished:
    """What became of the ranks: exit codes, and each one's standard output and error."""

    codes: list[int]
    out: list[str]
    err: list[str]
    seconds: float


Process = subprocess.Popen[bytes] | fork_server.Process


def process(argv: Sequence[str], env: Mapping[str, str], out: Path, err: Path, imports: str | None) -> Process:
    """``python argv`` with its output in files: a fork that has these imports, or a process from scratch."""
    with Path(os.devnull).open() as nothing, out.open("wb") as stdout, err.open("wb") as stderr:
        if imports is None:
            return subprocess.Popen([sys.executable, *argv], env=env, stdin=nothing, stdout=stdout, stderr=stderr)
        streams = nothing.fileno(), stdout.fileno(), stderr.fileno()
        return fork_server.start(argv, imports, env, Path.cwd(), *streams)


class Started:
    """Ranks that run. ``wait()`` for them; leaving the block kills what is left."""

    def __init__(
        self, argv: Sequence[str], folder: Path, world_size: int, env: Mapping[str, str], imports: str | None = None
    ) -> None:
        """With ``imports``, ranks are forks of a server that has them (:mod:`tests.distributed.fork_server`)."""
        port = free_port()
        self.began = time.monotonic()
        self.outputs = [(folder / f"out-{rank}", folder / f"err-{rank}") for rank in range(world_size)]
        self.processes = [
            process(argv, rank_environment() | place(rank, world_size, port) | dict(env), out, err, imports)
            for rank, (out, err) in enumerate(self.outputs)
        ]

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def wait(self) -> Finished:
        """Waits for all ranks."""
        deadline = time.monotonic() + WORK_S
        codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        out = [path.read_text() for path, _ in self.outputs]
        err = [path.read_text() for _, path in self.outputs]
        return Finished(codes, out, err, time.monotonic() - self.began)

    def until(self, text: str) -> None:
        """Waits until rank 0 has written this."""
        deadline = time.monotonic() + WORK_S
        while text not in self.outputs[0][0].read_text():
            assert time.monotonic() < deadline, f"no {text!r} in {self.outputs[0][0].read_text()}"
            assert self.processes[0].poll() is None, self.outputs[0][1].read_text()
            time.sleep(0.05)


def rank_environment() -> dict[str, str]:
    """This process's environment without what would make its children ranks of another run."""
    marks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_", "DEEPSPEED_", "DS_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(marks)}
    return inherited | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }


def place(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def start(folder: Path, world_size: int, *, from_scratch: bool = False, **env: str) -> Started:
    """The ranks of one run, each as ``python -m tridock.train``: forks, unless they are to start from scratch."""
    imports = None if from_scratch else imports_of(folder)
    return Started(["-m", "tridock.train", "--run-folder", str(folder)], folder, world_size, env, imports)


def imports_of(folder: Path) -> str:
    """What the ranks of a run of engine ``torch`` import."""
    return "deepspeed" if (folder / DEEPSPEED_CONFIG).exists() else "torch"


def run(folder: Path, world_size: int, *, from_scratch: bool = False, **env: str) -> Finished:
    """``start`` and ``wait``."""
    with start(folder, world_size, from_scratch=from_scratch, **env) as started:
        return started.wait()


def run_several(folders: Sequence[Path], world_size: int) -> Finished:
    """Several runs one after another in the same processes, which join each other once.

    For comparisons between runs; what a single process does at its start and its end is tested with ``run``.
    """
    core = load_experiment(folders[0] / EXPERIMENT).engine == "megatron-core"
    argv = ["-m", "tests.distributed.several", *map(str, folders)]
    with Started(argv, folders[0], world_size, {}, "megatron-core" if core else "deepspeed") as started:
        finished = started.wait()
    assert finished.codes == [0] * world_size, "\n".join(finished.err)
    return finished


class Trained:
    """Folders of runs by name. A batch is trained by one set of processes, when the first of its runs is asked for."""

    def __init__(self, *batches: tuple[int, Mapping[str, Path]]) -> None:
        """Batches: the number of ranks, and the folders."""
        self.waiting = list(batches)
        self.folders: dict[str, Path] = {}

    def __getitem__(self, name: str) -> Path:
        if name not in self.folders:
            batch = next(one for one in self.waiting if name in one[1])
            self.waiting.remove(batch)
            run_several(list(batch[1].values()), batch[0])
            self.folders |= batch[1]
        return self.folders[name]


def asked_for(request: pytest.FixtureRequest, cases: Mapping[str, Any], chosen: Container[str]) -> dict[str, Any]:
    """Of ``thinned`` cases those that this session tests: the chosen ones, or all."""
    full = any(item.get_closest_marker("full") for item in request.session.items if item.path == request.path)
    return {name: case for name, case in cases.items() if full or name in chosen}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A JSON lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The records of ``metrics.jsonl`` by iteration and split (``train`` for logged iterations)."""
    return {(line["iteration"], line.get("split", "train")): line for line in read_lines(folder / "metrics.jsonl")}


def losses(folder: Path) -> dict[tuple[int, str], float]:
    """The losses of ``metrics``."""
    return {place: record["loss"] for place, record in metrics(folder).items()}


def events(folder: Path) -> list[str]:
    """The names in ``events.jsonl``."""
    return [line["event"] for line in read_lines(folder / "events.jsonl")]


def check_communication(folder: Path) -> None:
    """Two ranks recorded once, for two steps, their share of communication; each has written a trace."""
    (event,) = [line for line in read_lines(folder / "events.jsonl") if line["event"] == "communication_measured"]
    assert event["iterations"] == 2
    assert 0.0 < event["exposed"] <= event["in_flight"] < 1.0
    assert len(event["exposed_by_rank"]) == 2
    assert abs(sum(event["exposed_by_rank"]) / 2 - event["exposed"]) < 1e-3
    traces = sorted(path.name for path in (folder / "profile").iterdir())
    assert traces == ["rank-0.json.gz", "rank-1.json.gz"]


def ask(program: Sequence[str], imports: str, cases: Sequence[object], **env: str) -> list[str]:
    """What ``python -m tests.distributed.PROGRAM …`` says, asked a line of JSON a case; its lines."""
    name, *argv = program
    done = fork_server.run(
        ["-m", f"tests.distributed.{name}", *argv],
        imports,
        rank_environment() | {"DS_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1", **env},
        text="".join(f"{json.dumps(case)}\n" for case in cases),
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()
