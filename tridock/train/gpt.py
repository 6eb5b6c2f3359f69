"""A compact GPT-2: pre-LayerNorm, learned positions, tied embeddings (Radford et al., 2019)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tridock.experiment.schema import Model


@dataclass(frozen=True, slots=True)
class Shape:
    """What the weights and the forward pass depend on."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    padded_vocab_size: int
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float
    checkpoint_activations: bool

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
        )


class Attention(nn.Module):
    """Causal self-attention over all heads at once: [batch, sequence, hidden] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        self.dropout = shape.attention_dropout
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * shape.hidden_size)
        self.dense = nn.Linear(shape.hidden_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        # [batch, sequence, 3 * hidden] -> three of [batch, heads, sequence, hidden / heads]
        split = self.query_key_value(x).view(batch, sequence, 3, self.heads, hidden // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return self.dense(mixed.transpose(1, 2).reshape(batch, sequence, hidden))


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


class GPT(nn.Module):
    """``model(tokens, labels)``: both int64 [batch, sequence]; gives the mean cross-entropy in nats, fp32, a scalar.

    The output layer is the token embedding. As in Megatron the padding rows of the vocabulary take part in the softmax.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.position_embedding = nn.Embedding(shape.max_position_embeddings, shape.hidden_size)
        self.dropout = nn.Dropout(shape.hidden_dropout)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.final_norm = nn.LayerNorm(shape.hidden_size)
        self._initialize()

    def _initialize(self) -> None:
        """N(0, std) for weights, zero for biases; what feeds the residual stream is scaled by 1 / sqrt(2 layers)."""
        std = self.shape.init_method_std
        residual_std = std / math.sqrt(2.0 * self.shape.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                onto_residual = name.endswith(("attention.dense", "dense_4h_to_h"))
                nn.init.normal_(module.weight, mean=0.0, std=residual_std if onto_residual else std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        recompute = self.shape.checkpoint_activations and self.training
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        logits = F.linear(self.final_norm(x), self.token_embedding.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight matrices and embeddings decay; biases and norms (one dimension) do not, as in Megatron."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
