"""A small experiment for the tests of this folder."""

from typing import Any

from tests.experiments import with_fields
from tridock.experiment import Experiment


def experiment(**fields: Any) -> Experiment:
    """Dotted names change fields: ``experiment(**{"train.seed": 7})``."""
    base: dict[str, Any] = {
        "name": "a",
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 8},
        "batch": {"micro_batch_size": 2, "global_batch_size": 8},
        "data": {"data_path": "data/x", "split": "80,10,10"},
        "train": {"train_iters": 10},
    }
    return with_fields(base, fields)
