"""Numbers of a GPT's weights, tensor by tensor, which of them tensor parallel ranks split, and their FLOPs.

GPT-2's layer has 12 matrices of hidden x hidden (query, key, value, output, and eight in the MLP) and 13 vectors of
that width: biases of attention's input (3) and output (1), of the MLP's input (4) and output (1), and two norms with
two vectors each (4).

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1:
an iteration of B samples takes 96 B s l h^2 (1 + s / 6h + V / 16 l h) FLOPs with full recomputation. Model FLOPs leave
recomputation out: 72 B s l h^2 (1 + s / 6h + V / 12 l h) remain, a forward pass and a backward pass of twice its size.
Model FLOPs utilization (MFU) is model FLOPs per second over the peak FLOP/s of the devices.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tridock.experiment import resnet
from tridock.experiment.model import Model


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a layer."""

    elements: int
    is_split: bool
    """Whether tensor parallel ranks split it."""
    is_matrix: bool

    def share(self, tensor_parallel_size: int) -> int:
        """Returns the number of elements on one tensor parallel rank."""
        return self.elements // tensor_parallel_size if self.is_split else self.elements


@lru_cache(maxsize=64)
def layer_weights(model: Model) -> tuple[Weight, ...]:
    """Returns the tensors of one layer, without a mixture's experts. Cached: a search asks for few models often."""
    return tuple(_layer_weights(model))


def _layer_weights(model: Model) -> Iterator[Weight]:
    width, attention = model.hidden_size, model.attention_size
    inputs = attention + 2 * model.key_size
    yield Weight(width * inputs, True, True)
    yield Weight(attention * width, True, True)
    if model.has_qkv_bias:
        yield Weight(inputs, True, False)
    if model.has_attention_bias:
        yield Weight(width, False, False)
    if model.num_moe_experts:
        yield Weight(width * model.num_moe_experts, False, True)  # the router
        if model.add_bias_linear:
            yield Weight(model.num_moe_experts, False, False)
        if shared := model.moe_shared_expert_intermediate_size:
            yield from (Weight(width * shared, True, True) for _ in range(3 if model.swiglu else 2))
            if model.moe_shared_expert_gate:
                yield Weight(width, False, True)
    else:
        yield from mlp_weights(model)
    of_heads = ((size, model.qk_layernorm_all_heads) for size in model.query_and_key_norms)
    for size, is_split in ((width, False), (width, False), *of_heads):
        yield from (Weight(size, is_split, False) for _ in range(norm_vectors(model)))


def mlp_weights(model: Model) -> Iterator[Weight]:
    """Yields the tensors of one expert, or of a layer's only MLP."""
    width, ffn = model.hidden_size, model.expert_size
    for _ in range(3 if model.swiglu else 2):
        yield Weight(width * ffn, True, True)
    if model.add_bias_linear:
        for _ in range(2 if model.swiglu else 1):
            yield Weight(ffn, True, False)
        yield Weight(width, False, False)


def layer_elements(model: Model, experts: int) -> int:
    """Returns the weights of a layer; in a mixture of experts it has ``experts`` of them."""
    own = sum(weight.elements for weight in layer_weights(model))
    return own + (experts * sum(weight.elements for weight in mlp_weights(model)) if model.num_moe_experts else 0)


def norm_vectors(model: Model) -> int:
    """Returns the number of vectors in a norm: the weight, and for LayerNorm the bias."""
    return 2 if model.normalization == "LayerNorm" else 1


def layer_matrices(model: Model) -> int:
    """Returns the number of matrix weights in a layer that process each token."""
    experts = mlp_weights(model) if model.num_moe_experts else ()
    own = sum(weight.elements for weight in layer_weights(model) if weight.is_matrix)
    return own + model.active_experts * sum(weight.elements for weight in experts if weight.is_matrix)


def position_rows(model: Model) -> int:
    """Returns the rows of the position embedding table; 0 without one."""
    return model.positions if model.position_embedding_type == "learned_absolute" else 0


def model_parameters(model: Model, rows: int, *, active: bool = False) -> int:
    """Returns the parameters of the whole GPT: layers, embedding tables (``rows`` tokens) and the last norm.

    ``active`` counts only the experts that process each token.
    """
    if model.is_vision:
        return resnet.parameters(model)
    tables = rows * (2 if model.untie_embeddings_and_output_weights else 1) + position_rows(model)
    layers = model.num_layers * layer_elements(model, model.active_experts if active else model.experts)
    return layers + (tables + norm_vectors(model)) * model.hidden_size


def layer_flops_per_token(model: Model) -> float:
    """Returns the FLOPs of one layer's forward pass: 2 per matrix weight, and attention's two matrix products.

    For GPT-2's layer these are 24 h^2 and 4 s h.
    """
    return 2.0 * layer_matrices(model) + attention_flops_per_token(model)


def attention_flops_per_token(model: Model) -> float:
    """Returns the forward FLOPs of one layer's scores and weighted values, with every token attending to all."""
    return 4.0 * model.seq_length * model.attention_size


def head_flops_per_token(model: Model, vocab_size: int) -> float:
    """Returns the forward FLOPs of the output layer; ``vocab_size`` is its number of rows, padding included."""
    return 2.0 * model.hidden_size * vocab_size


def model_flops_per_token(model: Model, vocab_size: int) -> float:
    """Returns the forward and backward FLOPs per token (per image for an image model).

    Attention counts in full, as in the paper, although a causal mask skips half. ``vocab_size`` is the number of rows
    of the output layer, padding included.
    """
    if model.is_vision:
        return 3.0 * resnet.forward_flops(model)
    return 3.0 * (model.num_layers * layer_flops_per_token(model) + head_flops_per_token(model, vocab_size))


def causal_flops_per_token(model: Model, vocab_size: int) -> float:
    """Returns :func:`model_flops_per_token` with causal attention: a token attends to half of the others on average."""
    if model.is_vision:
        return model_flops_per_token(model, vocab_size)
    return model_flops_per_token(model, vocab_size) - 1.5 * model.num_layers * attention_flops_per_token(model)


def recomputed_flops_per_token(model: Model, full_layers: int, selective: bool) -> float:
    """Returns the FLOPs per token that recomputation adds to the backward pass.

    They are the forward FLOPs of ``full_layers`` layers, or, if ``selective``, of every layer's attention.
    """
    if selective:
        return model.num_layers * attention_flops_per_token(model)
    return full_layers * layer_flops_per_token(model)
