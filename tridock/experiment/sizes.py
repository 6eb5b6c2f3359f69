"""The number of weights of the whole model."""

from __future__ import annotations

from tridock.experiment import resnet
from tridock.experiment.schema import Model


def model_parameters(model: Model, rows: int) -> int:
    """Weights of the whole GPT, each once: 12 matrices of hidden x hidden a layer, 13 vectors, both tables (the token
    table of ``rows``), and the last norm."""
    if model.is_vision:
        return resnet.parameters(model)
    width = model.hidden_size
    tables = rows + (model.max_position_embeddings or model.seq_length)
    return model.num_layers * (12 * width * width + 13 * width) + tables * width + 2 * width
