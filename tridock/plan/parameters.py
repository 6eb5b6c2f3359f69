"""How many weights a rank holds, to the weight, as each engine builds the GPT.

A layer has 12 matrices of hidden x hidden (query, key, value, output, and eight of the MLP) and 13 vectors of that
width: three biases of the attention's input, one of its output, four of the MLP's input, one of its output, and two
norms of two. Tensor parallel ranks share the matrices and the biases of what they split.
"""

from __future__ import annotations

from dataclasses import dataclass

from tridock.experiment import Experiment, resnet
from tridock.experiment.sizes import padded_vocab_size

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


def rows_of_vocabulary(experiment: Experiment) -> int:
    """Rows of the token table, the padding included, over all tensor parallel ranks."""
    return padded_vocab_size(vocab_size(experiment), experiment)


def layer_parameters(experiment: Experiment) -> int:
    """Of one layer on one tensor parallel rank; of a model of images, of its largest block."""
    if experiment.model.is_vision:
        return resnet.largest_block(experiment.model)
    width, tensor = experiment.model.hidden_size, experiment.parallel.tensor_model_parallel_size
    return 12 * width * width // tensor + 7 * width // tensor + 6 * width


def layers_of_stage(experiment: Experiment, stage: int) -> int:
    """Layers of one stage, all its runs of an interleaved pipeline together.

    Where they do not come out even, which DeepSpeed's pipeline alone allows, the first stages have one more
    (its ``partition_method="type:transformer"``).
    """
    each, rest = divmod(experiment.model.num_layers, experiment.parallel.pipeline_model_parallel_size)
    return each + (1 if stage < rest else 0)


def parameters_of_stage(experiment: Experiment, stage: int) -> Parameters:
    """Of each rank of a stage, whatever its place in the tensor, context and data parallel groups."""
    model, stages = experiment.model, experiment.parallel.pipeline_model_parallel_size
    if model.is_vision:
        head = resnet.head_parameters(model)
        return Parameters(resnet.parameters(model) - head, 0, 0, 0, head)
    width = model.hidden_size
    # Where they do not come out even, which engine torch alone allows, the first rank has the most.
    rows = -(-rows_of_vocabulary(experiment) // experiment.parallel.tensor_model_parallel_size)
    table, positions = rows * width, (model.max_position_embeddings or model.seq_length) * width
    first, last = stage == 0, stage == stages - 1
    copied = last and not first
    # Megatron v1.1.5's last stage is handed the embedding whole, with the positions that it has no use for.
    with_positions = positions if experiment.engine == "megatron-deepspeed" else 0
    return Parameters(
        layers=layers_of_stage(experiment, stage) * layer_parameters(experiment),
        embedding=table if first else 0,
        positions=positions if first else 0,
        final_norm=2 * width if last else 0,
        head=table + with_positions if copied else 0,
    )
