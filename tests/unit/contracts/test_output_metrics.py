"""Losses in the output of programs that nobody here wrote, as these print them."""

from __future__ import annotations

from typing import Any

import pytest

from tridock.contracts.output_metrics import OutputMetrics, reader_of

NANOGPT = r"iter (?P<iteration>\d+): loss (?P<loss>\S+),"


def read(pattern: str, *lines: str) -> list[dict[str, Any]]:
    metrics = OutputMetrics(pattern)
    return [record for line in lines for record in metrics.records(line)]


@pytest.mark.parametrize(
    ("pattern", "lines", "records"),
    [
        (
            NANOGPT,
            ["node-1: iter 7: loss 4.3698, time 66.02ms, mfu 0.00%", "step 20: train loss 4.1605, val loss 4.1855"],
            [{"iteration": 7, "loss": 4.3698}],
        ),
        (
            "hf-trainer",
            [
                "{'loss': 2.5, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.1}",
                "{'loss': '2.25', 'learning_rate': '4e-05', 'epoch': '0.2'}",
                "{'eval_loss': 2.0, 'eval_runtime': 1.5, 'epoch': 0.2}",
                "{'train_runtime': 3.1, 'train_loss': 2.3, 'epoch': 1.0}",
            ],
            [
                {"iteration": 1, "loss": 2.5, "grad_norm": 1.25, "lr": 5e-05},
                {"iteration": 2, "loss": 2.25, "lr": 4e-05},
                {"iteration": 2, "split": "valid", "loss": 2.0},
            ],
        ),
        (
            "lightning",
            [
                "Epoch 0:  50%|#####     | 30/60 [00:01<00:01, 25.1it/s, v_num=0, train_loss_step=0.25]",
                "Epoch 1: 100%|##########| 60/60 [00:02<00:00, 25.1it/s, v_num=0, train_loss=0.125]",
            ],
            [{"iteration": 30, "loss": 0.25}, {"iteration": 120, "loss": 0.125}],
        ),
        (
            "megatron",
            [
                " iteration      100/    1000 | consumed samples:  800 | elapsed time per iteration (ms): 12.5 |"
                " learning rate: 1.500E-04 | lm loss: 6.5E+00 | grad norm: 1.5 | number of nan iterations:   0 |"
            ],
            [{"iteration": 100, "lr": 1.5e-4, "loss": 6.5, "grad_norm": 1.5}],
        ),
        (
            "key=value",
            ["[rank0] step=3 loss=2.5 lr=1e-3", "epoch: 1, step: 4, loss: 2.25, grad_norm: 0.5", "loss of appetite: 3"],
            [{"iteration": 3, "loss": 2.5, "lr": 1e-3}, {"iteration": 4, "loss": 2.25, "grad_norm": 0.5}],
        ),
    ],
)
def test_what_programs_print(pattern: str, lines: list[str], records: list[dict[str, Any]]) -> None:
    assert read(pattern, *lines) == records


def test_several_ranks_may_print_the_same_iteration() -> None:
    lines = [f"step={step} loss={step}" for step in (0, 0, 1, 0, 1, 2)]
    assert [it["iteration"] for it in read("key=value", *lines)] == [0, 1, 2]


def test_a_loss_that_is_no_number_is_kept() -> None:
    assert [str(it["loss"]) for it in read("key=value", "step=1 loss=nan")] == ["nan"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("loss (", "is no regular expression: missing ), unterminated subpattern at position 5"),
        (
            r"loss (\d+)",
            "must be one of hf-trainer, lightning, megatron, key=value, or a regular expression with a group"
            " (?P<loss>…)",
        ),
    ],
)
def test_a_pattern_that_finds_no_loss_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the message is compared
        reader_of(pattern)
    assert str(refusal.value) == message


def test_what_every_node_prints_without_an_iteration_is_counted_once() -> None:
    metrics = OutputMetrics("hf-trainer", ["node-2"])
    lines = [f"{node}: {{'loss': '{loss}'}}" for loss in (2.5, 2.25) for node in ("node-1", "node-2")]
    found = [record for line in (*lines, "{'eval_loss': 2.0}") for record in metrics.records(line)]
    assert [(it["iteration"], it["loss"]) for it in found] == [(1, 2.5), (2, 2.25), (2, 2.0)]
    counted = OutputMetrics("key=value", ["2"])
    assert [it["iteration"] for it in counted.records("2: step=7 loss=1")] == [7]
