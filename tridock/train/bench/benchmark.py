"""``torchrun … -m tridock.train --mode …``, with the options of ``trainer.py`` in PyTorch's data parallel benchmark.

The ranks start before the run exists. Rank 0 calls the planner, names the run, and sends the name to the others through
torchrun's store. The run folder is like any other; torchrun supervises the ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from tridock.contracts.run_folder import EXPERIMENT, PLAN, new_run_id, write_atomic
from tridock.errors import Problem, RequestError, TridockError
from tridock.experiment import Experiment, dump_experiment, load_experiment
from tridock.train.program import Engine, train
from tridock.train.rank.run import run_rank

MODES: Final = {
    "ddp": {"parallel.strategy": "ddp"},
    "fsdp": {"parallel.strategy": "fsdp"},
    "pdp": {"parallel.strategy": "ddp", "parallel.use_tp_pp_dp_mapping": "true"},
    "tp": {"parallel.strategy": "ddp"},
}
_SPANNED: Final = {"pdp": "parallel.pipeline_model_parallel_size", "tp": "parallel.tensor_model_parallel_size"}
_KEY: Final = "tridock/run"
_PATIENCE: Final = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Place:
    """This process among those that torchrun has started."""

    rank: int
    world_size: int
    local_world_size: int
    local_rank: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Place:
        names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        return cls(*(int(env.get(name, default)) for name, default in names.items()))


def start(engine: Engine, argv: Sequence[str]) -> int:
    """Agrees with the other ranks on a run, and runs this rank; returns its exit code."""
    options, place = _options(argv), Place.of(os.environ)
    workspace = options.workspace.absolute()
    try:
        answer = agree_on_run(place, os.environ, lambda: _named(options, workspace, place))
    except TridockError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if answer["code"]:
        return int(answer["code"])
    folder = workspace / "runs" / answer["run"]
    if place.local_rank == 0 and not (folder / EXPERIMENT).exists():  # a node that shares no folder with the first
        write_atomic(folder / EXPERIMENT, answer["experiment"].encode())
    return run_rank(folder, lambda: train(folder, workspace, engine, None))


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tridock.train", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the experiment; what follows changes it")
    parser.add_argument(
        "--mode", choices=MODES, help="pdp: a pipeline of data parallel replicas; without it the experiment's strategy"
    )
    parser.add_argument(
        "--ndevice_per_proc", type=int, default=1, help="pdp, tp: devices that one copy of the model spans"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="changes a field")
    parser.add_argument("--workspace", type=Path, default=Path(), help="where data/ and runs/ lie; here")
    return parser.parse_args(argv)


def agree_on_run(place: Place, env: Mapping[str, str], name: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns rank 0's answer on every rank."""
    if place.world_size == 1:
        return name()
    if env.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        todo = "start it with torchrun; under another launcher use tridock train, tridock launch or tridock slurm"
        raise RequestError(Problem("tridock.train", "cannot find torchrun's store", f"{place.world_size} ranks", todo))
    import torch.distributed as dist

    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False, timeout=_PATIENCE)
    key = f"{_KEY}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if place.rank:
        answer: dict[str, Any] = json.loads(store.get(key))
        return answer
    try:
        found = name()
    except TridockError as error:
        store.set(key, json.dumps({"code": error.exit_code}))
        raise
    store.set(key, json.dumps(found))
    return found


def _named(options: argparse.Namespace, workspace: Path, place: Place) -> dict[str, Any]:
    """Names the run and writes its first files; if the planner refuses, returns its exit code."""
    changes = [*overrides(options.mode, options.ndevice_per_proc, place.world_size), *options.set]
    experiment = load_experiment(options.config, changes)
    if experiment.parallel.strategy == "zero":
        todo = "give --mode, or start it with tridock train or tridock launch"
        where = f"{options.config}: parallel.strategy"
        raise RequestError(Problem(where, "is not for torchrun, under which DeepSpeed has no settings", "zero", todo))
    changes += _whole_pipeline(experiment, place.world_size)
    nodes = place.world_size // place.local_world_size
    plan = [sys.executable, "-P", "-m", "tridock.cli", "plan", str(options.config), "--json"]
    plan += ["--nodes", str(nodes), "--gpus-per-node", str(place.local_world_size)]
    done = subprocess.run(
        [*plan, *(word for one in changes for word in ("--set", one))], capture_output=True, check=False
    )
    if done.returncode not in (0, RequestError.exit_code) or not done.stdout:
        sys.stderr.write(done.stderr.decode())
        return {"code": done.returncode or 1}
    document = json.loads(done.stdout)
    for problem in document["problems"]:
        print(f"{options.config}: {problem['message']}", file=sys.stderr)
    if document["problems"]:
        return {"code": done.returncode}
    experiment = load_experiment(options.config, changes).resolved(document["data_parallel_size"])
    run, text = new_run_id(experiment.name), dump_experiment(experiment)
    folder = workspace / "runs" / run
    write_atomic(folder / PLAN, done.stdout)
    write_atomic(folder / EXPERIMENT, text.encode())
    print(f"run {run}: {place.world_size} ranks of torchrun's, {document['layout']}; folder {folder}", flush=True)
    return {"code": 0, "run": run, "experiment": text}


def overrides(mode: str | None, ndevice_per_proc: int, world_size: int) -> list[str]:
    """Returns the ``--set`` overrides of a mode; none without a mode. Each process drives one device here, so a replica
    on n devices needs n processes."""
    if mode is None:
        if ndevice_per_proc != 1:
            what, todo = "says how many devices a model spans, and no --mode how", "give --mode pdp or --mode tp"
            raise RequestError(Problem("--ndevice_per_proc", what, str(ndevice_per_proc), todo))
        return []
    fields = {**MODES[mode], "parallel.zero_stage": 0}
    if mode in _SPANNED:
        if ndevice_per_proc < 2:
            what, got = f"must be 2 or more with --mode {mode}", str(ndevice_per_proc)
            raise RequestError(Problem("--ndevice_per_proc", what, got, "give the devices that one model spans"))
        if world_size % ndevice_per_proc:
            what = f"one process drives one device: {ndevice_per_proc} devices a model want a multiple of as many"
            todo = f"give torchrun --nproc_per_node {ndevice_per_proc}, or use ptd_benchmark.sh, which does"
            raise RequestError(Problem("--ndevice_per_proc", what, f"{world_size} processes", todo))
        fields[_SPANNED[mode]] = ndevice_per_proc
    elif ndevice_per_proc != 1:
        what, todo = f"--mode {mode} has a whole model on each device", "leave it out, or use --mode pdp"
        raise RequestError(Problem("--ndevice_per_proc", what, str(ndevice_per_proc), todo))
    return [f"{field}={value}" for field, value in fields.items()]


def _whole_pipeline(experiment: Experiment, world_size: int) -> Iterator[str]:
    """If the experiment omits its global batch, yields one with a micro-batch per stage: fewer leave stages idle."""
    stages = experiment.parallel.pipeline_model_parallel_size
    if stages > 1 and experiment.batch.global_batch_size is None:
        replicas = world_size // (stages * experiment.parallel.tensor_model_parallel_size)
        yield f"batch.global_batch_size={experiment.batch.micro_batch_size * replicas * stages}"
