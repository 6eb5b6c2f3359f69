"""Megatron's command line and DeepSpeed's JSON: golden, and never at odds."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.experiments import make_plan
from tridock.engines import rank_program
from tridock.engines.megatron_lm.program import megatron_arguments
from tridock.engines.megatron_lm.rules import OWNED
from tridock.experiment import Experiment

GOLDEN = Path(__file__).parents[2] / "golden" / "megatron"
RUN = "/workspace/runs/tiny-20260102-030405-abcd"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero2-fp16": (2, {"parallel": {"zero_stage": 2}, "precision": "fp16"}),
    "3d": (
        8,
        {
            "parallel": {
                "zero_stage": 1,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
            },
            "activations": {
                "checkpoint_activations": True,
                "partition_activations": True,
                "contiguous_checkpointing": True,
                "synchronize_each_layer": True,
                "checkpoint_in_cpu": True,
            },
            "megatron_args": ["--num-workers", "0"],
        },
    ),
    "ddp": (2, {"parallel": {"strategy": "ddp"}, "batch": {"micro_batch_size": 4}}),
}


def experiment(**fields: Any) -> Experiment:
    base: dict[str, Any] = {
        "name": "tiny",
        "engine": "megatron-deepspeed",
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
        | fields.pop("activations", {}),
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "data": {"data_path": "data/x", "vocab_file": "data/vocab.json", "merge_file": "/corpus/merges.txt"},
        "optimizer": {"lr_warmup_iters": 3, "clip_grad": 0.5},
        "precision": "fp32",
        "train": {"train_iters": 30},
    }
    return Experiment.model_validate(base | fields)


def arguments(ranks: int, **fields: Any) -> dict[str, str | None]:
    given = experiment(**fields)
    plan = make_plan(given, {"node-1": range(ranks)}, "e.yaml")
    argv = megatron_arguments(given, plan, RUN)
    values = (*argv[1:], "--")
    return {
        word: None if value.startswith("--") else value
        for word, value in zip(argv, values, strict=True)
        if word.startswith("--")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_golden_command_line(layout: str) -> None:
    ranks, fields = LAYOUTS[layout]
    found = arguments(ranks, **json.loads(json.dumps(fields)))
    lines = [option if value is None else f"{option} {value}" for option, value in found.items()]
    assert "\n".join(lines) + "\n" == (GOLDEN / f"{layout}.txt").read_text()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_is_known_to_belong_to_the_experiment(layout: str) -> None:
    ranks, fields = LAYOUTS[layout]
    found = arguments(ranks, **json.loads(json.dumps(fields)))
    assert found.keys() - {"--num-workers"} <= OWNED.keys()


@settings(deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from(["fp32", "fp16"]),
    st.sampled_from([0, 1, 2, 3]),
)
def test_megatron_and_deepspeed_never_disagree(
    tensor: int, stages: int, data: int, micro: int, steps: int, precision: str, zero: int
) -> None:
    stage = max(min(zero, 1) if stages > 1 else zero, int(precision == "fp16"))
    parallel = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "zero_stage": stage,
    }
    batch = {"micro_batch_size": micro, "global_batch_size": micro * data * steps}
    wanted = experiment(parallel=parallel, batch=batch, precision=precision)
    plan = make_plan(wanted, {"n": range(tensor * stages * data)}, "e.yaml")
    program = rank_program(wanted, plan, "id", RUN)
    given_arguments = arguments(tensor * stages * data, parallel=parallel, batch=batch, precision=precision)
    config = json.loads(program.files["ds_config.json"])
    assert config["train_micro_batch_size_per_gpu"] == int(given_arguments["--batch-size"] or 0) == micro
    assert config["gradient_accumulation_steps"] == int(given_arguments["--gas"] or 0) == steps
    assert config["train_batch_size"] == micro * steps * data
    assert config["zero_optimization"]["stage"] == int(given_arguments["--zero-stage"] or 0) == stage
    assert config["gradient_clipping"] == float(given_arguments["--clip-grad"] or 0)
    assert config.get("fp16", {}).get("enabled", False) == ("--fp16" in given_arguments)
    assert "bf16" not in config


def test_without_deepspeed_there_is_no_json() -> None:
    ranks, fields = LAYOUTS["ddp"]
    wanted = experiment(**fields)
    program = rank_program(wanted, make_plan(wanted, {"n": range(ranks)}, "e.yaml"), "id", RUN)
    assert program.module == "tridock.train.megatron_lm.pretrain_gpt2"
    assert program.arguments[:2] == ("--run-folder", RUN)
    assert program.files == {}
    assert "--deepspeed" not in program.arguments


def test_a_load_and_a_save() -> None:
    train = {"train_iters": 30, "load": "runs/a/checkpoints", "save_interval": 10, "eval_interval": 5}
    found = arguments(2, train=train)
    assert found["--load"] == "/workspace/runs/a/checkpoints"
    assert found["--save"] == f"{RUN}/checkpoints"
    assert (found["--save-interval"], found["--eval-interval"]) == ("10", "5")
    found = arguments(2, train={"train_iters": 30, "checkpoint_folder": "checkpoints/345m"})
    assert found["--save"] == "/workspace/checkpoints/345m"
    train = {"train_iters": 30, "save": False}
    found = arguments(2, train=train)
    assert not {"--save", "--save-interval", "--load"} & found.keys()
