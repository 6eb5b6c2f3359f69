"""ResNet-50 in numbers, and what an experiment may say of it."""

from typing import Any

import pytest

from tests.experiments import with_fields
from tridock.engines import rules_of
from tridock.errors import RequestError
from tridock.experiment import Experiment, dump_experiment, parse_experiment, resnet
from tridock.experiment.parameters import causal_flops_per_token, model_flops_per_token, model_parameters

BASE: dict[str, Any] = {
    "name": "a",
    "model": {"preset": "resnet50"},
    "parallel": {"strategy": "ddp"},
    "batch": {"micro_batch_size": 2, "global_batch_size": 8},
    "data": {"data_path": "data/x"},
    "train": {"train_iters": 10},
}


def experiment(**fields: Any) -> Experiment:
    return with_fields(BASE, fields)


def test_the_numbers_of_the_literature() -> None:
    model = experiment().model
    assert model_parameters(model, 1000) == 25_557_032
    assert model_flops_per_token(model, 1000) / 6 == pytest.approx(4.09e9, rel=1e-3)  # multiplications, forward
    assert causal_flops_per_token(model, 1000) == model_flops_per_token(model, 1000)
    assert len(list(resnet.convolutions(model))) == 53


def test_fewer_classes_and_larger_images() -> None:
    other = experiment(**{"model.num_classes": 10, "model.img_h": 448}).model
    assert resnet.parameters(other) == 25_557_032 - 990 * 2049
    convolutions = resnet.forward_flops(experiment().model) - 2 * 2048 * 1000
    assert resnet.forward_flops(other) == 2 * convolutions + 2 * 2048 * 10


def test_it_reads_itself_again() -> None:
    written = experiment(**{"model.num_classes": 10})
    assert parse_experiment(dump_experiment(written), "here") == written
    assert rules_of(written).padded_vocab_size(10, written) == 10


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{preset: resnet50, hidden_size: 64}", "preset resnet50 has no hidden_size"),
        ("{preset: resnet50, checkpoint_activations: true}", "preset resnet50 has no checkpoint_activations"),
        ("{preset: resnet50, vocab_size: 9, seq_length: 3}", "preset resnet50 has no seq_length, vocab_size"),
        ("{preset: gpt2, seq_length: 8, img_h: 3, num_classes: 2}", "only preset resnet50 has img_h, num_classes"),
    ],
)
def test_fields_of_the_other_kind(model: str, said: str) -> None:
    text = (
        f"name: a\nmodel: {model}\nbatch: {{micro_batch_size: 1}}\ndata: {{data_path: x}}\ntrain: {{train_iters: 1}}\n"
    )
    with pytest.raises(RequestError) as caught:
        parse_experiment(text, "here")
    (problem,) = caught.value.problems
    assert (problem.where, problem.what, problem.todo) == ("here: model", said, "correct it")
