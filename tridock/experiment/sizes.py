"""Sizes of the whole GPT that follow from an experiment: rows of its vocabulary, number of its weights."""

from __future__ import annotations

import math

from tridock.experiment import resnet
from tridock.experiment.schema import Experiment, Model


def padded_vocab_size(tokens: int, experiment: Experiment) -> int:
    """Rows of the token table for that many tokens: what tensor parallel ranks share out in Megatron's multiples.

    Those of engine torch take part in the loss, and do not depend on the layout.
    """
    tensor = 1 if experiment.engine == "torch" else experiment.parallel.tensor_model_parallel_size
    multiple = experiment.model.make_vocab_size_divisible_by * tensor
    return math.ceil(tokens / multiple) * multiple


def model_parameters(model: Model, rows: int) -> int:
    """Weights of the whole GPT, each once: 12 matrices of hidden x hidden a layer, 13 vectors, both tables (the token
    table of ``rows``), and the last norm."""
    if model.is_vision:
        return resnet.parameters(model)
    width = model.hidden_size
    tables = rows + (model.max_position_embeddings or model.seq_length)
    return model.num_layers * (12 * width * width + 13 * width) + tables * width + 2 * width
