"""Data, tokenizer and checkpoint that do not fit the experiment: refused before any rank starts."""

from __future__ import annotations

from typing import Any

import pytest

from tridock.engines import ENGINES
from tridock.engines.megatron_lm.checkpoint_layout import CheckpointLayout, checkpoint_problems
from tridock.experiment import Experiment
from tridock.experiment.inputs import data_problems
from tridock.experiment.training import training_fields


def experiment(**sections: Any) -> Experiment:
    base: dict[str, Any] = {
        "name": "t",
        "engine": "megatron-deepspeed",
        "model": {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
        "batch": {"micro_batch_size": 1},
        "data": {"data_path": "data/t"},
        "train": {"train_iters": 1},
    }
    for name, fields in sections.items():
        base[name] = {**base.get(name, {}), **fields}
    return Experiment.model_validate(base)


def shown(problems: Any) -> list[str]:
    return [str(problem) for problem in problems]


def test_what_nobody_knows_is_no_problem() -> None:
    assert shown(data_problems(experiment(model={"vocab_size": 5}), "data/t", None, 7)) == []
    assert shown(data_problems(experiment(), "data/t", {}, 7)) == []
    assert shown(data_problems(experiment(), "data/t", {"vocab_size": 7, "tokens": 65}, None)) == []
    assert shown(data_problems(experiment(), "data/t", {"vocab_size": 7, "tokens": 65}, 7)) == []
    assert shown(checkpoint_problems(experiment(), 2, None)) == []


def test_json_files_of_somebody_elses_are_no_problem() -> None:
    somebodys: Any = ["a", "list"]
    assert shown(data_problems(experiment(), "data/t", somebodys, 7)) == []
    assert shown(checkpoint_problems(experiment(), 2, somebodys)) == []
    assert shown(checkpoint_problems(experiment(), 2, {"zero_stage": 0, "of_a_later_release": 1})) == []


def test_a_vocabulary_and_a_sequence_that_do_not_match_the_data() -> None:
    wrong = experiment(model={"vocab_size": 5})
    assert shown(data_problems(wrong, "data/t", {"vocab_size": 7, "tokens": 64}, 6)) == [
        "data.vocab_file: the data was made with 7 tokens; got 6 tokens; "
        "name the files of the tokenizer that made the data",
        "model.vocab_size: is smaller than the tokenizer of the data, which has 7 tokens; got 5; "
        "leave it out, or raise it",
        "model.seq_length: is longer than all of data/t, 64 tokens; got 64; lower it, or name a larger data set",
    ]


def test_a_checkpoint_of_the_same_layout() -> None:
    written = CheckpointLayout.of(experiment(), 2).to_json()
    assert shown(checkpoint_problems(experiment(), 2, written)) == []
    assert (
        shown(checkpoint_problems(experiment(), 2, {"model": {"num_layers": 9}, "strategy": "fsdp"})) == []
    )  # torch's


def test_a_checkpoint_of_another_training() -> None:
    written = CheckpointLayout.of(experiment(), 2).to_json() | {"training": training_fields(experiment())}
    other = experiment(train={"train_iters": 1, "load": "ck", "seed": 5})
    assert shown(checkpoint_problems(other, 2, written)) == [
        "train.seed: the checkpoint ck was saved with 1234; got 5; "
        "use the same, or choose the new values: --set 'train.override_checkpoint=[train.seed]'"
    ]
    chosen = {"train_iters": 1, "load": "ck", "seed": 5, "override_checkpoint": ["train.seed"]}
    assert shown(checkpoint_problems(experiment(train=chosen), 2, written)) == []


@pytest.mark.parametrize(
    ("parallel", "replicas", "theirs"),
    [
        ({"tensor_model_parallel_size": 2}, 2, "TP2 PP1 DP2, ZeRO-0"),
        ({"pipeline_model_parallel_size": 2}, 2, "TP1 PP2 DP2, ZeRO-0"),
        ({}, 4, "TP1 PP1 DP4, ZeRO-0"),
        ({"zero_stage": 1}, 2, "TP1 PP1 DP2, ZeRO-1"),
        ({"strategy": "ddp"}, 2, "TP1 PP1 DP2, DDP"),
    ],
)
def test_a_checkpoint_of_another_layout(parallel: dict[str, Any], replicas: int, theirs: str) -> None:
    written = CheckpointLayout.of(experiment(parallel=parallel), replicas).to_json()
    assert shown(checkpoint_problems(experiment(), 2, written)) == [
        f"train.load: was written with {theirs}, and Megatron v1.1.5 loads a checkpoint on no other layout; "
        "got TP1 PP1 DP2, ZeRO-0 here; "
        "go back to that layout, or use engine megatron-core, whose checkpoints load on any"
    ]
    assert shown(ENGINES["torch"].program.checkpoint_problems(experiment(), 2, written)) == []


def test_a_checkpoint_of_another_model() -> None:
    written = CheckpointLayout.of(experiment(model={"num_layers": 6, "hidden_size": 32}), 2).to_json()
    assert shown(checkpoint_problems(experiment(), 2, written)) == [
        "model.num_layers: the checkpoint of train.load has 6; got 4; set it to 6, or leave train.load out",
        "model.hidden_size: the checkpoint of train.load has 32; got 64; set it to 32, or leave train.load out",
    ]
