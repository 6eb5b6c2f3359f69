"""A compact GPT-2: pre-LayerNorm, learned positions, tied embeddings (Radford et al., 2019)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tridock.errors import Problem, RequestError
from tridock.experiment.schema import Model
from tridock.train.models.cross_entropy import cross_entropy
from tridock.train.models.layered import LayeredModel

TENSOR_PARALLEL_OFFSET: Final = 2718
"""Megatron's offset between the seed that tensor parallel ranks share and the first rank's own."""


@contextmanager
def tensor_parallel_random_numbers(tensor_parallel_rank: int, device: torch.device) -> Iterator[None]:
    """Inside, a rank draws other numbers than its tensor parallel neighbours; afterwards the same ones again.

    The seed comes from the host's generator, whose state the neighbours share. Restoring that state, as a resumed run
    and activation recomputation do, restores these numbers too.
    """
    seed = int(torch.randint(1 << 62, (), device="cpu")) + TENSOR_PARALLEL_OFFSET + tensor_parallel_rank
    generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    shared = generator.get_state()
    try:
        generator.manual_seed(seed)
        yield
    finally:
        generator.set_state(shared)


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    padded_vocab_size: int
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float
    checkpoint_activations: bool
    kv_channels: int | None = None

    @classmethod
    def of(cls, model: Model, vocab_size: int) -> Self:
        """The shape of an experiment's model; the vocabulary is padded as Megatron pads it."""
        multiple = model.make_vocab_size_divisible_by
        return cls(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            max_position_embeddings=model.max_position_embeddings or model.seq_length,
            padded_vocab_size=math.ceil(vocab_size / multiple) * multiple,
            hidden_dropout=model.hidden_dropout,
            attention_dropout=model.attention_dropout,
            init_method_std=model.init_method_std,
            checkpoint_activations=model.checkpoint_activations,
            kv_channels=model.kv_channels,
        )


class Attention(nn.Module):
    """Causal self-attention over all heads at once: [batch, sequence, hidden] to the same.

    A tensor parallel rank has some of the heads; query, key and value of a head are adjacent, as in Megatron.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.kv_channels is None and shape.hidden_size % shape.num_attention_heads:
            # Otherwise the rest of the width would silently become further heads.
            what, todo = f"must divide hidden_size {shape.hidden_size}", "change one of the two"
            raise RequestError(Problem("model.num_attention_heads", what, str(shape.num_attention_heads), todo))
        self.head_size = shape.kv_channels or shape.hidden_size // shape.num_attention_heads
        self.dropout = shape.attention_dropout
        self.tensor_parallel_rank: int | None = None
        width = shape.num_attention_heads * self.head_size
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * width)
        self.dense = nn.Linear(width, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        # [batch, sequence, heads * 3 * head size] -> three of [batch, heads, sequence, head size]
        split = self.query_key_value(x).view(batch, sequence, -1, 3, self.head_size)
        query, key, value = split.permute(3, 0, 2, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if dropout and self.tensor_parallel_rank is not None:
            mixed = self._attend_with_own_dropout(query, key, value)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.dense(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    @torch.compiler.disable  # random states are no part of a graph
    def _attend_with_own_dropout(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with tensor_parallel_random_numbers(self.tensor_parallel_rank, query.device):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)


class Layer(nn.Module):
    """One transformer layer: attention and a four times wider MLP, each on a residual branch."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(shape.hidden_size)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.hidden_size)
        self.dense_h_to_4h = nn.Linear(shape.hidden_size, 4 * shape.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * shape.hidden_size, shape.hidden_size)
        self.dropout = nn.Dropout(shape.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.input_norm(x)))
        wide = F.gelu(self.dense_h_to_4h(self.mlp_norm(x)), approximate="tanh")
        return x + self.dropout(self.dense_4h_to_h(wide))


class GPT(LayeredModel):
    """``model(tokens, labels)``: both int64 [batch, sequence]; returns the mean cross-entropy in nats, fp32, a scalar.

    The output layer is the token embedding. As in Megatron the padding rows of the vocabulary take part in the softmax.
    ``keep`` turns it into a pipeline stage.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.is_first = self.is_last = True
        self.token_embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.position_embedding = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.dropout = nn.Dropout(shape.hidden_dropout)
        # Keyed by their numbers in the whole model, whatever stage they end up in.
        self.layers = nn.ModuleDict({str(number): Layer(shape) for number in range(shape.num_layers)})
        self.final_norm = nn.LayerNorm(shape.hidden_size)
        self.initialize_modules()

    def keep(self, layers: range) -> None:
        """Keeps the stage with these layers: the first has the embeddings, the last the norm and the output layer."""
        self.is_first, self.is_last = layers.start == 0, layers.stop == self.shape.num_layers
        for number in set(range(self.shape.num_layers)) - set(layers):
            del self.layers[str(number)]
        if not self.is_first:
            del self.position_embedding
        if not self.is_last:
            del self.final_norm
        if not (self.is_first or self.is_last):
            del self.token_embedding

    def initialize(self, name: str, module: nn.Module) -> bool:
        """N(0, std) for weights, 0 for biases; projections into the residual stream: std / sqrt(2 layers) (GPT-2)."""
        if not isinstance(module, nn.Linear | nn.Embedding):
            return False
        std = self.shape.init_method_std
        if name.endswith(("attention.dense", "dense_4h_to_h")):
            std /= math.sqrt(2.0 * self.shape.num_layers)
        nn.init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        return True

    def compile_layers(self) -> None:
        """Compiles each layer when it first runs; all layers share the compiled code."""
        for layer in self.layers.values():
            layer.compile()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """``x``: tokens, or in a later stage the previous one's activations [batch, sequence, hidden].

        Returns the loss; without labels the logits [batch, sequence, vocabulary], or this stage's activations.
        """
        if self.is_first:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.token_embedding(x) + self.position_embedding(positions))
        recompute = self.shape.checkpoint_activations and self.training
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        if not self.is_last:
            return x
        logits = self.output(self.final_norm(x))
        return logits if labels is None else cross_entropy(logits, labels)

    def output(self, x: Tensor) -> Tensor:
        """The logits [batch, sequence, vocabulary]: the output layer is the token embedding."""
        weight = self.token_embedding.weight
        if isinstance(weight, DTensor):
            x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        return F.linear(x, weight)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight matrices and embeddings decay; biases and norms (one dimension) do not, as in Megatron."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # DeepSpeed's, where it has partitioned the weight
        (decayed if len(shape) > 1 else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
