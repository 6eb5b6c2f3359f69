"""How many weights a rank of the GPT holds, to the weight.

A layer has 12 matrices of hidden x hidden (query, key, value, output, and eight of the MLP) and 13 vectors of that
width: three biases of the attention's input, one of its output, four of the MLP's input, one of its output, and two
norms of two. Tensor parallel ranks share the matrices and the biases of what they split.
"""

from __future__ import annotations

from dataclasses import dataclass

from tridock.experiment import Experiment, resnet
from tridock.layout.shape import layers_of_stage

GPT2_TOKENS = 50257
"""The vocabulary that is taken for granted where the experiment leaves it to its data."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Weights of one rank, by what they are for."""

    layers: int
    embedding: int
    """The token table, this rank's rows."""
    positions: int
    final_norm: int
    head: int
    """A copy of the tied tables that the last stage of a pipeline holds."""

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.positions + self.final_norm + self.head


def vocab_size(experiment: Experiment) -> int:
    """Tokens of the tokenizer; GPT-2's where the experiment does not say."""
    return experiment.model.vocab_size or GPT2_TOKENS


def layer_parameters(experiment: Experiment) -> int:
    """Of one layer on one tensor parallel rank; of a model of images, of its largest block."""
    if experiment.model.is_vision:
        return resnet.largest_block(experiment.model)
    width, tensor = experiment.model.hidden_size, experiment.parallel.tensor_model_parallel_size
    return 12 * width * width // tensor + 7 * width // tensor + 6 * width


def parameters_of_stage(experiment: Experiment, stage: int, rows: int, *, copies_positions: bool = False) -> Parameters:
    """Of each rank of a stage, whatever its place in the tensor, context and data parallel groups.

    ``rows``: of the token table, over all tensor parallel ranks. ``copies_positions``: the last stage of a pipeline
    holds a copy of the position table too.
    """
    model, stages = experiment.model, experiment.parallel.pipeline_model_parallel_size
    if model.is_vision:
        head = resnet.head_parameters(model)
        return Parameters(resnet.parameters(model) - head, 0, 0, 0, head)
    width = model.hidden_size
    # Where the rows do not divide evenly, the first rank has the most.
    rows = -(-rows // experiment.parallel.tensor_model_parallel_size)
    table, positions = rows * width, (model.max_position_embeddings or model.seq_length) * width
    first, last = stage == 0, stage == stages - 1
    copied = last and not first
    return Parameters(
        layers=layers_of_stage(experiment, stage) * layer_parameters(experiment),
        embedding=table if first else 0,
        positions=positions if first else 0,
        final_norm=2 * width if last else 0,
        head=table + (positions if copies_positions else 0) if copied else 0,
    )
