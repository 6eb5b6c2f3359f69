"""What a launch refuses because of what a node lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan, with_fields
from tridock.contracts.node_answers import NvmeFolder, PreflightAnswer
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.ops.runs.node_problems import multicast_problems, nvme_problems, package_problems, too_little_memory
from tridock.ops.runs.preflight import preflight_argv


def test_layers_of_a_package_that_a_nodes_image_lacks() -> None:
    fields = {
        "name": "t",
        "engine": "megatron-core",
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1},
    }
    asked = "--package=transformer_engine"
    assert asked not in preflight_argv(Experiment.model_validate(fields), head=False)
    experiment = with_fields(fields, {"model.transformer_impl": "transformer_engine"})
    assert asked in preflight_argv(experiment, head=False)
    answers = {name: PreflightAnswer({}, missing_packages=("transformer_engine",)) for name in ("a", "b")}
    (problem,) = package_problems(Path("t.yaml"), experiment, {**answers, "c": PreflightAnswer({})})
    assert str(problem) == (
        "t.yaml: model.transformer_impl: needs the Python package transformer_engine; got not on a, b; "
        "leave the field out, or build the image on a base that has it"
    )


def test_an_overlap_that_a_nodes_gpus_cannot_do() -> None:
    fields = {
        "name": "t",
        "engine": "megatron-core",
        "precision": "bf16",
        "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 8},
        "parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t_document"},
        "train": {"train_iters": 1},
    }
    assert "--multicast" not in preflight_argv(Experiment.model_validate(fields), head=False)
    experiment = with_fields(fields, {"parallel.tp_comm_overlap": True})
    assert {"--multicast", "--package=transformer_engine"} <= {*preflight_argv(experiment, head=False)}
    answers = {name: PreflightAnswer({}, multicast=has) for name, has in (("a", True), ("b", False))}
    (problem,) = multicast_problems(Path("t.yaml"), experiment, answers)
    assert str(problem) == (
        "t.yaml: parallel.tp_comm_overlap: needs GPUs with CUDA multicast (Hopper and newer, with NVSwitch); "
        "got none on b; leave it out"
    )
    by_ipc = with_fields(fields, {"parallel.tp_comm_overlap": True, "env": {"UB_SKIPMC": "1"}})
    assert not list(multicast_problems(Path("t.yaml"), by_ipc, answers))
    assert "--multicast" not in preflight_argv(by_ipc, head=False)


OFFLOADING: dict[str, Any] = {
    "name": "t",
    "model": {"preset": "gpt3-13b", "seq_length": 2048},
    "parallel": {"zero_stage": 2},
    "batch": {"micro_batch_size": 1},
    "data": {"data_path": "data/t_document"},
    "train": {"train_iters": 10, "save_interval": 5},
    "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
}


def test_a_compiler_and_a_source_that_a_nodes_image_lacks() -> None:
    fields = {**OFFLOADING, "train": {"train_iters": 1, "compile": True}, "env": {"CXX": "clang++", "TOKEN": "secret"}}
    asked = preflight_argv(Experiment.model_validate(fields), head=False)
    assert asked[:3] == ("preflight", "--needs=compiler", "--rank-env=CXX=clang++")
    assert "secret" not in str(asked)
    without = Problem("train.compile", "needs a C++ compiler", "no g++ on the PATH", "install g++")
    answers = {"a": PreflightAnswer({}, lacks=(without,)), "b": PreflightAnswer({}, lacks=(without,))}
    (problem,) = package_problems(
        Path("t.yaml"), Experiment.model_validate(fields), {**answers, "c": PreflightAnswer({})}
    )
    assert str(problem) == "t.yaml: train.compile: needs a C++ compiler; got no g++ on the PATH on a, b; install g++"


def test_a_hosts_memory_for_offloaded_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 12.9 billion parameters the sixteenth of each rank, 18 bytes each; a checkpoint's copy is 2 and 12 / 16."""
    experiment = Experiment.model_validate(OFFLOADING)
    plan = make_plan(experiment, {"a": range(8), "b": range(8)}, "t.yaml")
    memory = {"a": 64 << 30, "b": 1 << 40}
    (problem,) = too_little_memory(Path("t.yaml"), experiment, plan, memory)
    assert str(problem) == (
        "t.yaml: deepspeed.zero_optimization: the offloaded states of 8 ranks need 108.4 GiB of a's memory; "
        "got 64.0 GiB; use more nodes, or offload less"
    )
    assert capsys.readouterr().err == ""
    assert list(too_little_memory(Path("t.yaml"), experiment, plan, {**memory, "a": 120 << 30})) == []
    assert capsys.readouterr().err.startswith(
        "warning: t.yaml: deepspeed.zero_optimization: with copies of a checkpoint, offloaded states need "
    )
    nothing = Experiment.model_validate(OFFLOADING | {"deepspeed": {}})
    assert list(too_little_memory(Path("t.yaml"), nothing, plan, {"a": 1, "b": 1})) == []
    assert list(too_little_memory(Path("t.yaml"), experiment, plan, {"a": None, "b": None})) == []


def test_states_that_do_not_fit_on_a_nodes_nvme() -> None:
    """Of 12.9 billion parameters the sixteenth of each rank, 16 bytes each; four buffers of 1e8 and a tensor."""
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    fields = with_fields(OFFLOADING, {"parallel.zero_stage": 3})
    experiment = Experiment.model_validate(
        OFFLOADING | {"parallel": {"zero_stage": 3}, "deepspeed": {"zero_optimization": zero}}
    )
    asked = {"--nvme=/nvme", "--package=deepspeed.ops.aio.async_io_op"}
    assert not asked & {*preflight_argv(fields, head=False)}
    assert asked <= {*preflight_argv(experiment, head=False)}
    plan = make_plan(experiment, {"a": range(8), "b": range(8)}, "t.yaml")
    good = PreflightAnswer({}, nvme={"/nvme": NvmeFolder(None, 97 << 30)})
    assert list(nvme_problems(Path("t.yaml"), experiment, plan, {"a": good, "b": good})) == []
    answers = {
        "a": PreflightAnswer({}, nvme={"/nvme": NvmeFolder("no such file or directory")}),
        "b": PreflightAnswer({}, nvme={"/nvme": NvmeFolder(None, 95 << 30)}, memlock=8 << 20),
    }
    where = "t.yaml: deepspeed.zero_optimization.offload_optimizer.nvme_path"
    assert [*map(str, nvme_problems(Path("t.yaml"), experiment, plan, answers))] == [
        f"{where}: cannot be written on a; got /nvme: no such file or directory; "
        "make the folder there, for the user of the nodes, and mount it into them (container.mounts)",
        f"{where}: 8 ranks of b need 96.4 GiB on NVMe; got 95.0 GiB free in /nvme; free space, or use more nodes",
        f"{where}: each rank locks 1772 MiB of b's memory for transfers to NVMe; got a limit of 8 MiB; "
        "raise the limit (container.ulimits.memlock), or lower sub_group_size",
    ]
    assert list(nvme_problems(Path("t.yaml"), fields, plan, {})) == []
