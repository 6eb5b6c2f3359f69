"""Joining, agreeing on errors, parting: with a world of one in this process, and stand-ins for the others."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException

from tridock.errors import Problem, RequestError, RunError
from tridock.node.probes.ports import rendezvous_port
from tridock.train.rank import process_group
from tridock.train.rank.process_group import AgreedError, Ranks, agree_on_errors, join, mean_over_ranks


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRIDOCK_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    yield join()
    process_group.leave()


def test_a_process_started_alone_is_a_world_of_one(alone: Ranks) -> None:
    assert (alone.rank, alone.local_rank, alone.world_size, alone.first) == (0, 0, 1, True)
    assert (alone.device, alone.backend) == (torch.device("cpu"), "gloo")
    assert mean_over_ranks(torch.tensor(2.5)) == 2.5
    (peak,) = process_group.peak_memory_by_rank(alone)
    assert peak > 2**26
    memory = process_group.PeakMemory(alone)
    reported = [memory.metrics() for _ in range(9)]
    assert [number for number, peaks in enumerate(reported, start=1) if peaks] == [1, 2, 4, 8]
    assert reported[7]["memory_bytes"] >= [peak]
    process_group.barrier()


def test_ranks_leave_right_after_a_collective(alone: Ranks) -> None:
    """Gloo's threads need the GIL to free the last tensors: torch 2.6 held it and waited for them forever."""
    for _ in range(20):
        dist.all_reduce(torch.zeros(8))
        process_group.leave()
        join()


def test_leaving_twice_is_harmless(alone: Ranks) -> None:
    assert alone.world_size == 1
    process_group.leave()
    process_group.leave()
    assert not dist.is_initialized()


def test_another_world_than_the_planned_one(alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIDOCK_WORLD_SIZE", "1")
    process_group.check_world(alone)
    monkeypatch.setenv("TRIDOCK_WORLD_SIZE", "4")
    with pytest.raises(AgreedError) as caught:
        process_group.check_world(alone)
    assert caught.value.error.exit_code == 4
    assert str(caught.value.error) == (
        "world size: the plan has 4 ranks, but another number found each other; got 1; "
        "check the hostfile that the launcher read (logs/launcher.log) and that every node started its ranks"
    )


def test_ranks_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "DEEPSPEED_TIMEOUT": "0.02"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(rendezvous_port().port))
    with pytest.raises(RunError) as caught:
        join()
    assert re.sub(r"after \d+ seconds", "after N seconds", str(caught.value)) == (
        f"rendezvous: not all 2 ranks joined at 127.0.0.1:{os.environ['MASTER_PORT']}; "
        "got Timed out after N seconds waiting for clients. 1/2 clients joined; "
        "see the launcher's log for nodes that did not start, and that every node reaches this address"
    )


PROBLEM = Problem("data.data_path", "is missing", "", "make it")


def agreed_by(monkeypatch: pytest.MonkeyPatch, reports: list[object]) -> str:
    """What ``agree_on_errors`` raises where the ranks report this."""

    def gather(target: list[object], _own: object, group: object) -> None:
        target[:] = reports

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(AgreedError) as caught, agree_on_errors(Ranks(0, 0, len(reports), torch.device("cpu"))):
        pass
    return f"{caught.value.error.exit_code} {caught.value.error}"


def test_what_all_ranks_find_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed_by(monkeypatch, [(2, (PROBLEM,))] * 3) == "2 data.data_path: is missing; make it"


def test_what_some_ranks_find_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Problem("x", "is wrong", "1", "correct it")
    found = agreed_by(monkeypatch, [None, (2, (PROBLEM,)), None, (4, (PROBLEM, other))])
    assert found == "4 ranks 1, 3: data.data_path: is missing; make it\nrank 3: x: is wrong; got 1; correct it"


def test_agree_on_errors_lets_everything_else_pass(alone: Ranks) -> None:
    with agree_on_errors(alone):
        pass
    with pytest.raises(AgreedError) as caught, agree_on_errors(alone):
        raise RequestError(PROBLEM)
    assert isinstance(caught.value.error, RequestError)
    with pytest.raises(ZeroDivisionError), agree_on_errors(alone):
        _ = 1 / 0


@pytest.mark.parametrize(
    ("version", "gpus", "names"),
    [
        ("2.13.0", True, ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"]),
        # Its pipe exists only with the old name of the size.
        (
            "2.10.0a0+nv25.12",
            True,
            ["TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"],
        ),
        ("2.6.0", True, ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"]),
        ("2.13.0+cpu", False, []),
    ],
)
def test_flights_are_recorded_on_gpus_by_the_names_of_the_time(
    version: str, gpus: bool, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "3"}
    monkeypatch.setattr(process_group.os, "environ", environment)
    monkeypatch.setattr(process_group.torch, "__version__", version)
    monkeypatch.setattr(process_group.torch.cuda, "is_available", lambda: gpus)
    for rank in (3, 33):
        (tmp_path / f"flight-rank-{rank}").touch()
    process_group.enable_flight_recorder(tmp_path / "flight-rank-", tmp_path / "flight-")
    always = {"RANK", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"}
    assert sorted(set(environment) - always) == names
    assert {str(tmp_path / "flight-rank-"), str(tmp_path / "flight-")} <= set(environment.values()) or not gpus
    left = {"flight-rank-33"} if gpus else {"flight-rank-3", "flight-rank-33"}
    assert {path.name for path in tmp_path.iterdir()} == left  # torch makes the pipe


def test_no_pipe_is_asked_of_torch_where_none_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(process_group.os, "environ", environment)
    monkeypatch.setattr(process_group.torch.cuda, "is_available", lambda: True)
    process_group.enable_flight_recorder(Path("/r/logs/flight-rank-"), tmp_path / "missing" / "flight-")
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" in environment
    assert "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in environment


def test_a_flag_is_read_one_call_later(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    def all_reduce(flag: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: waits.append(int(flag)) or True)

    monkeypatch.setattr(process_group.dist, "all_reduce", all_reduce)
    any_rank = process_group.AnyRank(Ranks(0, 0, 2, torch.device("cpu")))
    assert [any_rank(True), list(waits)] == [False, []]
    assert [any_rank(False), list(waits)] == [True, [1]]
    assert [any_rank(False), list(waits)] == [False, [1, 0]]


def test_a_flag_on_a_gpu_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors have no values: to read one is an error."""
    event = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(record_event=lambda: event))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(process_group.dist, "all_reduce", lambda *_, **__: None)
    with FakeTensorMode():
        any_rank = process_group.AnyRank(Ranks(0, 0, 2, torch.device("cuda", 0)))
        assert not any_rank(True)
        with pytest.raises(DataDependentOutputException):
            any_rank(False)


@pytest.mark.parametrize("enabled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_tf32_is_the_experiments_and_not_the_images(enabled: bool) -> None:
    program = (
        "import torch; from tridock.train.rank.device import set_tf32;"
        f"set_tf32({enabled}); print(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)"
    )
    env = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": str(int(not enabled))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stdout == f"{enabled} {enabled}\n"
