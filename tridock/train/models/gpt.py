"""A compact GPT with GPT-2's layers (Radford et al., 2019) or Llama's, depending on the experiment's model."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tridock.errors import Problem, RequestError
from tridock.experiment.model import Model
from tridock.train.models.cross_entropy import cross_entropy
from tridock.train.models.layered import LayeredModel
from tridock.train.models.rotary import Rotation, rotated, rotation

TENSOR_PARALLEL_OFFSET: Final = 2718
"""Megatron's offset between the seed that tensor parallel ranks share and the first rank's own seed."""


@contextmanager
def tensor_parallel_random_numbers(tensor_parallel_rank: int, device: torch.device) -> Iterator[None]:
    """Makes tensor parallel ranks draw different random numbers inside the block, and the same ones after it.

    The seed comes from the CPU generator, whose state these ranks share. Restoring that state, as a resumed run and
    activation recomputation do, restores these numbers too.
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
    """An experiment's model, and the number of rows of its token table."""

    model: Model
    padded_vocab_size: int

    @classmethod
    def of(cls, model: Model, vocab_size: int) -> Self:
        """Returns the shape, with the vocabulary padded as in Megatron."""
        multiple = model.make_vocab_size_divisible_by
        return cls(model, math.ceil(vocab_size / multiple) * multiple)


def make_norm(model: Model, size: int) -> nn.Module:
    """Returns a norm of the model's kind over the last dimension, of ``size`` elements."""
    kind = nn.LayerNorm if model.normalization == "LayerNorm" else nn.RMSNorm
    return kind(size, eps=model.norm_epsilon)


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm of each head. All tensor parallel ranks have its weights, and each the gradients of its own heads.

    Of all heads together, a rank has its own heads' weights, and the ranks sum the squares: one all-reduce of a number
    a token, [batch, sequence, 1], and one of its gradient.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not isinstance(weight, DTensor) or weight.placements[0].is_replicate():
            return F.rms_norm(x, self.normalized_shape, _for_own_heads(weight, x), self.eps)
        heads: Any = DTensor.from_local(x.float(), weight.device_mesh, [Shard(2)], run_check=False)
        squares = heads.square().sum(-1, keepdim=True).redistribute(placements=[Replicate()])
        return (heads * (squares / weight.numel() + self.eps).rsqrt() * weight).to_local().to(x.dtype)


class HeadLayerNorm(nn.LayerNorm):
    """LayerNorm of each head, with weights and gradients as :class:`HeadRMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _for_own_heads(self.weight, x), _for_own_heads(self.bias, x)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


def _for_own_heads(weight: Tensor, x: Tensor) -> Tensor:
    whole = weight.to_local(grad_placements=[Partial()]) if isinstance(weight, DTensor) else weight
    return whole.to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention: [batch, sequence, hidden] to the same shape.

    A tensor parallel rank has some of the query groups. As in Megatron, a group's queries, key and value are adjacent.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
            # Otherwise the rest of the width would silently become further heads.
            what, todo = f"must divide hidden_size {model.hidden_size}", "change one of the two"
            raise RequestError(Problem("model.num_attention_heads", what, str(model.num_attention_heads), todo))
        self.head_size = model.head_size
        self.queries = model.num_attention_heads // model.query_groups  # of a group
        self.dropout, self.scale = model.attention_dropout, model.attention_multiplier
        self.tensor_parallel_rank: int | None = None
        inputs = model.attention_size + 2 * model.key_size
        self.query_key_value = nn.Linear(model.hidden_size, inputs, bias=model.has_qkv_bias)
        if model.qk_layernorm:
            kind = HeadLayerNorm if model.normalization == "LayerNorm" else HeadRMSNorm
            self.query_norm, self.key_norm = (kind(it, eps=model.norm_epsilon) for it in model.query_and_key_norms)
        self.has_norms, self.joins_heads = model.qk_layernorm, model.qk_layernorm_all_heads
        self.dense = nn.Linear(model.attention_size, model.hidden_size, bias=model.has_attention_bias)

    def forward(self, x: Tensor, rotation: Rotation | None) -> Tensor:
        batch, sequence, _ = x.shape
        # [batch, sequence, groups * (queries + 2) * head size] -> three of [batch, sequence, heads, head size]
        groups = self.query_key_value(x).view(batch, sequence, -1, self.queries + 2, self.head_size)
        query, key, value = (part.flatten(2, 3) for part in groups.split((self.queries, 1, 1), 3))
        if self.has_norms:
            query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        if dropout and self.tensor_parallel_rank is not None:
            mixed = self._attend_with_own_dropout(self.tensor_parallel_rank, query, key, value)
        else:
            mixed = self._attend(query, key, value, dropout)
        return self.dense(mixed.transpose(1, 2).reshape(batch, sequence, -1))

    def _normed(self, norm: nn.Module, heads: Tensor) -> Tensor:
        return norm(heads.flatten(2)).view_as(heads) if self.joins_heads else norm(heads)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=self.scale, enable_gqa=self.queries > 1
        )

    @torch.compiler.disable  # random states are no part of a graph
    def _attend_with_own_dropout(self, rank: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with tensor_parallel_random_numbers(rank, query.device):
            return self._attend(query, key, value, self.dropout)


def _gelu(model: Model) -> str:
    """Returns torch's name of GELU's approximation."""
    return "none" if model.gelu == "gelu" else "tanh"


class Expert(nn.Module):
    """One MLP of a mixture of experts, of width ``ffn``."""

    def __init__(self, model: Model, ffn: int) -> None:
        super().__init__()
        width, bias = model.hidden_size, model.add_bias_linear
        self.dense_h_to_4h = nn.Linear(width, ffn, bias=bias)
        self.gate = nn.Linear(width, ffn, bias=bias) if model.swiglu else None
        self.dense_4h_to_h = nn.Linear(ffn, width, bias=bias)
        self.gelu = _gelu(model)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.dense_h_to_4h(x)
        wide = F.gelu(wide, approximate=self.gelu) if self.gate is None else F.silu(self.gate(x)) * wide
        return self.dense_4h_to_h(wide)


class Layer(nn.Module):
    """One transformer layer: attention, and an MLP or a mixture of experts, each on a residual branch that begins or
    ends with a norm."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, ffn, bias = model.hidden_size, model.ffn_size, model.add_bias_linear
        self.input_norm = make_norm(model, width)
        self.attention = Attention(model)
        self.mlp_norm = make_norm(model, width)
        if model.num_moe_experts is None:
            self.dense_h_to_4h = nn.Linear(width, ffn, bias=bias)
            self.gate = nn.Linear(width, ffn, bias=bias) if model.swiglu else None
            self.dense_4h_to_h = nn.Linear(ffn, width, bias=bias)
        else:
            self.router = nn.Linear(width, model.num_moe_experts, bias=bias)
            numbers = map(str, range(model.num_moe_experts))
            self.experts = nn.ModuleDict({number: Expert(model, model.expert_size) for number in numbers})
            shared = model.moe_shared_expert_intermediate_size
            self.shared_expert = None if shared is None else Expert(model, shared)
            self.shared_expert_gate = nn.Linear(width, 1, bias=False) if model.moe_shared_expert_gate else None
        self.has_post_norm, self.branch_factor = model.use_post_norm, model.residual_multiplier
        self.active_experts = model.active_experts
        self.has_experts = model.num_moe_experts is not None
        self.softmax_first = model.moe_router_pre_softmax
        self.dropout = nn.Dropout(model.hidden_dropout)
        self.gelu = _gelu(model)

    def forward(self, x: Tensor, rotation: Rotation | None = None) -> Tensor:
        if self.has_post_norm:
            x = self._added(x, self.input_norm(self.attention(x, rotation)))
            return self._added(x, self.mlp_norm(self._mlp(x)))
        x = self._added(x, self.attention(self.input_norm(x), rotation))
        return self._added(x, self._mlp(self.mlp_norm(x)))

    def _added(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, self.dropout(branch), alpha=self.branch_factor)

    def _mlp(self, x: Tensor) -> Tensor:
        return self._mixture(x) if self.has_experts else self.dense_4h_to_h(self._wide(x))

    def _mixture(self, x: Tensor) -> Tensor:
        """Returns the sum of each token's selected experts, weighted by the softmax of their scores (or of all), and of
        the shared expert."""
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).float()
        scores, chosen = (scores.softmax(-1) if self.softmax_first else scores).topk(self.active_experts, dim=-1)
        shares = (scores if self.softmax_first else scores.softmax(-1)).to(x.dtype)
        mixed = torch.zeros_like(tokens) if self.shared_expert is None else self.shared_expert(tokens)
        if self.shared_expert_gate is not None:
            mixed = mixed * self.shared_expert_gate(tokens).sigmoid()
        numbers, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(numbers, torch.arange(len(self.experts), device=x.device), right=True)
        # The host waits for the device here, once per layer.
        for expert, own in zip(self.experts.values(), order.tensor_split(ends[:-1].tolist()), strict=True):
            places = own // self.active_experts
            mixed.index_add_(0, places, expert(tokens[places]) * shares.flatten()[own, None])
        return mixed.view_as(x)

    def _wide(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return F.gelu(self.dense_h_to_4h(x), approximate=self.gelu)
        return F.silu(self.gate(x)) * self.dense_h_to_4h(x)


class GPT(LayeredModel):
    """``model(tokens, labels)``, both int64 [batch, sequence], returns the mean cross-entropy in nats, an fp32 scalar.
    The output layer is the token embedding, unless the model unties them. As in Megatron, the softmax includes the
    padding rows of the vocabulary. ``keep`` makes the model a pipeline stage."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.is_first = self.is_last = True
        self.compiles_loss = False
        model = shape.model
        self.token_embedding = nn.Embedding(shape.padded_vocab_size, model.hidden_size)
        self.has_positions = model.position_embedding_type == "learned_absolute"
        if self.has_positions:
            self.position_embedding = nn.Embedding(model.positions, model.hidden_size)
        self.dropout = nn.Dropout(model.hidden_dropout)
        # Keyed by their numbers in the whole model, on every stage.
        self.layers = nn.ModuleDict({str(number): Layer(model) for number in range(model.num_layers)})
        self.final_norm = make_norm(model, model.hidden_size)
        self.is_tied = not model.untie_embeddings_and_output_weights
        if not self.is_tied:
            self.output_layer = nn.Linear(model.hidden_size, shape.padded_vocab_size, bias=False)
        self.initialize_modules()

    def keep(self, layers: range) -> None:
        """Keeps only these layers, as a pipeline stage. The first stage also keeps the embeddings, the last stage the
        norm and the output layer."""
        count = self.shape.model.num_layers
        self.is_first, self.is_last = layers.start == 0, layers.stop == count
        for number in set(range(count)) - set(layers):
            del self.layers[str(number)]
        if not self.is_first and self.has_positions:
            del self.position_embedding
        if not self.is_last:
            del self.final_norm
            if not self.is_tied:
                del self.output_layer
        if not (self.is_first or (self.is_last and self.is_tied)):
            del self.token_embedding

    def initialize(self, name: str, module: nn.Module) -> bool:
        """Draws weights from N(0, std), or N(0, std / sqrt(2 layers)) for projections into the residual stream (GPT-2).
        Sets biases to 0."""
        if not isinstance(module, nn.Linear | nn.Embedding):
            return False
        std = self.shape.model.init_method_std
        if name.endswith(("attention.dense", "dense_4h_to_h")):
            std /= math.sqrt(2.0 * self.shape.model.num_layers)
        nn.init.normal_(module.weight, mean=0.0, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        return True

    def compile_layers(self) -> None:
        """Compiles each layer, and the loss, when it first runs; all layers share the compiled code."""
        self.compiles_loss = True
        for layer in self.layers.values():
            layer.compile()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """``x`` is tokens, int64 [batch, sequence], or in a later stage activations [batch, sequence, hidden].

        Returns the loss; without labels the logits [batch, sequence, vocabulary], or this stage's activations.
        """
        model, length = self.shape.model, x.shape[1]
        if self.is_first:
            x = self.token_embedding(x)
            if model.embedding_multiplier != 1:
                x = x * model.embedding_multiplier
            if self.has_positions:
                x = x + self.position_embedding(torch.arange(length, device=x.device))
            x = self.dropout(x)
        by = None if self.has_positions else rotation(model, length, x.device)
        is_plain = model.unrotated_layers
        recompute = model.checkpoint_activations and self.training
        for number, layer in self.layers.items():
            given = (x, None if is_plain[int(number)] else by)
            x = checkpoint(layer, *given, use_reentrant=False) if recompute else layer(*given)
        if not self.is_last:
            return x
        logits = self.output(self.final_norm(x))
        return logits if labels is None else cross_entropy(logits, labels, compiled=self.compiles_loss)

    def output(self, x: Tensor) -> Tensor:
        """Returns the logits [batch, sequence, vocabulary]."""
        if (divisor := self.shape.model.logits_scaling) != 1:
            x = x / divisor
        weight = (self.token_embedding if self.is_tied else self.output_layer).weight
        if isinstance(weight, DTensor):
            x = DTensor.from_local(x, weight.device_mesh, [Replicate()], run_check=False)
        return F.linear(x, weight)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Returns the optimizer's groups: as in Megatron, matrices and embeddings decay, biases and norms do not."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ds_shape if DeepSpeed has partitioned the weight
        (decayed if len(shape) > 1 else plain).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
