"""Checkpoints survive: kills, preemption, damage, full disks; of the engines torch and megatron-core."""

from __future__ import annotations

import argparse
import os
import pickle
import random
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.cases import thinned
from tests.distributed import fork_server
from tests.distributed.disturbed import EVERY, ITERATIONS, live_through, named
from tests.distributed.ranks import Started, events, make_run, metrics, rank_environment, run
from tests.distributed.test_restart import Training
from tests.patience import WORK_S
from tridock.contracts import heartbeat
from tridock.node.agent.processes import find_processes
from tridock.node.agent.runs import list_runs
from tridock.train.checkpoints.pickles import megatron_classes, safe_distributed_load, safe_torch_load

pytestmark = pytest.mark.distributed

DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1}
ENGINES: dict[str, tuple[str, str, str, int, dict[str, Any]]] = {
    "ddp": ("tridock.train.__main__", "torch", "ddp.pt", 0, {"parallel.strategy": "ddp"}),
    "zero2": ("tridock.train.__main__", "deepspeed", "*zero_pp_rank_1*", 1, {
        "parallel.strategy": "zero", "parallel.zero_stage": 2,
    }),
    "fsdp": ("tridock.train.__main__", "torch", "__1_0.distcp", 1, {"parallel.strategy": "fsdp"}),
    "megatron-core": ("tridock.train.megatron_core.pretrain_gpt", "megatron-core", "__1_0.distcp", 1, {
        "engine": "megatron-core", "parallel.strategy": "ddp", "parallel.pipeline_model_parallel_size": 2,
    }),
}  # fmt: skip


@pytest.mark.parametrize("engine", thinned(ENGINES, ("zero2", "fsdp", "megatron-core")))
def test_what_happens_to_a_run_does_not_change_its_losses(workspace: Path, engine: str) -> None:
    module, imports, victim, writer, own = ENGINES[engine]

    def begin(name: str, fault: str | None, **fields: Any) -> tuple[Path, Started]:
        common = {**own, **DROPOUT, "train.train_iters": ITERATIONS}
        folder = make_run(workspace, f"{engine}-{name}", 2, **common, **fields)
        arguments = ["-m", module] if fault is None else ["-m", "tests.distributed.checkpointed", module, fault]
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        return folder, Started([*arguments, "--run-folder", str(folder)], folder, 2, env, imports)

    live_through(begin, victim, writer)


def test_one_folder_for_all_starts(workspace: Path) -> None:
    """Megatron's ``--save`` and ``--load`` of one folder: the first start finds nothing, the second continues."""
    both = {"train.checkpoint_folder": "saved/", "train.load": "saved", "train.save": True}
    both["optimizer.lr_decay_iters"] = 6
    first = make_run(workspace, "first-start", 1, **both, **{"train.train_iters": 2})
    done = run(first, 1)
    assert done.codes == [0], done.out[0]
    assert f"{workspace}/saved holds no checkpoint yet: training begins from scratch\n" in done.out[0]
    assert not (first / "checkpoints").exists()
    (workspace / "saved/.latest.4242.0a1b2c3d.part").write_text("iter_0000002")  # of a rank that was killed
    second = make_run(workspace, "second-start", 1, **both, **{"train.train_iters": 4})
    assert run(second, 1).codes == [0]
    assert not [path.name for path in (workspace / "saved").iterdir() if path.name.startswith(".")]
    assert [iteration for iteration, split in metrics(second) if split == "train"] == [3, 4]
    assert "checkpoint_loaded" in events(second)
    for name in ("2", "4"):
        (workspace / f"saved/iter_000000{name}" / "ddp.pt").write_bytes(b"damaged")
    damaged = run(make_run(workspace, "third-start", 1, **both, **{"train.train_iters": 6}), 1)
    assert damaged.codes == [2]
    assert f"train.load: no complete checkpoint is in {workspace}/saved" in damaged.out[0]


class Evil:
    """Does something when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def test_deepspeed_unpickles_nothing_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    torch.save({"optimizer": Evil(tmp_path / "done")}, tmp_path / "optim_states.pt")
    with safe_torch_load(), pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "optim_states.pt", weights_only=False)  # as DeepSpeed does
    assert not (tmp_path / "done").exists()


def test_metadata_holds_nothing_foreign(tmp_path: Path) -> None:
    """As torch's reader of a distributed checkpoint loads it."""
    from torch.distributed.checkpoint import FileSystemReader

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "done")))
    with safe_distributed_load(), pytest.raises(pickle.UnpicklingError) as caught:
        FileSystemReader(tmp_path).read_metadata()
    assert str(caught.value) == "posix.mkdir does not belong into a checkpoint's .metadata"
    assert not (tmp_path / "done").exists()


def test_what_megatron_v115_saves_and_nothing_foreign(tmp_path: Path) -> None:
    states = {
        "args": argparse.Namespace(num_layers=2, params_dtype=torch.float16, betas=(0.9, 0.95)),
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    torch.save(states, tmp_path / "good.pt")
    torch.save({"args": Evil(tmp_path / "done")}, tmp_path / "bad.pt")
    with safe_torch_load(megatron_classes()):
        found = torch.load(tmp_path / "good.pt", map_location="cpu")
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            torch.load(tmp_path / "bad.pt", weights_only=False)
    assert (found["args"], found["random_rng_state"]) == (states["args"], states["random_rng_state"])
    assert (found["np_rng_state"][1] == states["np_rng_state"][1]).all()
    assert not (tmp_path / "done").exists()


class AsGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 pickles a member of an enum."""

    def __init__(self, owner: type, name: str) -> None:
        self.asked = owner, name

    def __reduce__(self) -> tuple[object, tuple[type, str]]:
        return getattr, self.asked


def test_an_enum_of_another_python_is_read_and_no_other_attribute(tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import ZeroStageEnum

    torch.save({"stage": AsGetattr(ZeroStageEnum, "gradients")}, tmp_path / "good.pt")
    torch.save({"stage": AsGetattr(ZeroStageEnum, "mro")}, tmp_path / "bad.pt")
    with safe_torch_load():
        assert torch.load(tmp_path / "good.pt") == {"stage": ZeroStageEnum.gradients}
        with pytest.raises(pickle.UnpicklingError, match="is no member of an enum"):
            torch.load(tmp_path / "bad.pt")


def test_so_are_those_of_metadata(tmp_path: Path) -> None:
    """Debian 12's Python, which the CPU image has, names the memory format of every tensor in this way."""
    from torch.distributed.checkpoint import FileSystemReader, Metadata
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING as MEMORY_FORMAT

    def read(name: str) -> object:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({"a": AsGetattr(MEMORY_FORMAT, name)})))  # type: ignore[dict-item]
        return FileSystemReader(tmp_path).read_metadata().state_dict_metadata["a"]

    with safe_distributed_load():
        assert read("TORCH_CONTIGUOUS_FORMAT") is MEMORY_FORMAT.TORCH_CONTIGUOUS_FORMAT
        with pytest.raises(pickle.UnpicklingError, match="is no member of an enum"):
            read("mro")


def test_and_the_paths_of_python_3_13(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, Metadata

    pickled = pickle.dumps(Metadata({}, {tmp_path: "a"}), protocol=2)  # type: ignore[arg-type]
    (tmp_path / ".metadata").write_bytes(re.sub(rb"\bcpathlib(\._local)?\n", rb"cpathlib._local\n", pickled))
    with safe_distributed_load():
        assert FileSystemReader(tmp_path).read_metadata().planner_data == {tmp_path: "a"}


REFERENCED = """
import sys, weakref
from pathlib import Path
from tridock.errors import Problem, RunError
from tridock.train.rank import process_group, run, signals

class Model: pass
kept = []

def program():
    model = Model()
    kept.append(weakref.ref(model))
    try:
        raise RunError(Problem("a", "b", "c", "d"))
    except RunError as error:
        raise {"preempted": signals.Preempted(3), "agreed": process_group.AgreedError(error)}[sys.argv[2]]

process_group.barrier = lambda: None
process_group.leave = lambda: print("gone" if kept[0]() is None else "referenced", flush=True)
run.run_rank(Path(sys.argv[1]), program)
"""


@pytest.mark.parametrize("how", ["preempted", "agreed"])
def test_the_model_goes_before_the_process_group(tmp_path: Path, how: str) -> None:
    """DDP's reducer would take the group down while it keeps Python's lock, for which Gloo's threads may wait."""
    done = fork_server.run(["-c", REFERENCED, str(tmp_path), how], "torch", rank_environment())
    assert "gone" in done.stdout.splitlines(), done.stderr


def everything_of(run: Training) -> list[int]:
    """All processes of a job, as a scheduler knows them: `tridock train`, the supervisor, the launcher, the ranks."""
    found = [run.process.pid]
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdecimal() and run.folder.name.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGUSR1, "all"),
        pytest.param(signal.SIGTERM, "train", marks=pytest.mark.full),
        pytest.param(signal.SIGUSR1, "train", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "all", marks=pytest.mark.full),
    ],
)
def test_a_scheduler_that_ends_a_job_leaves_a_checkpoint(workspace: Path, number: signal.Signals, whom: str) -> None:
    """It tells every process, as Slurm does, or only the one that it knows."""
    endless = make_run(workspace, f"endless-{whom}-{number.name}", 2, **EVERY, **{"train.train_iters": 10**6})
    arguments = ["--set", "train.save_interval=0", "--set", "restart.max=2"]
    run = Training(workspace, endless / "experiment.yaml", *arguments)
    run.until(lambda: (beat := heartbeat.read(run.folder, 0)) is not None and beat.phase == heartbeat.TRAIN)
    for pid in everything_of(run) if whom == "all" else [run.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    output = run.process.communicate(timeout=WORK_S)[0]
    assert run.process.returncode == 85, output
    assert (run.folder / "exit_code").read_text() == "85\n"
    (saved,) = named(run.folder, "checkpoint_saved")
    (event,) = named(run.folder, "run_preempted")
    assert saved["iteration"] == event["iteration"]
    assert run.restarts() == []
    assert output.splitlines()[-1] == f"continue it with tridock resume runs/{run.folder.name}"
    assert f"preempted: saved after iteration {event['iteration']}, as SIGTERM or SIGUSR1 asked\n" in output
    assert find_processes(run.folder.name) == []
    (listed,) = [it for it in list_runs(workspace) if it.run_id == run.folder.name]
    assert listed.state == "preempted"
