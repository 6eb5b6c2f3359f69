"""FLOPs of a GPT's matrix products, and those that activation recomputation adds.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1:
an iteration of B samples takes 96 B s l h^2 (1 + s / 6h + V / 16 l h) FLOPs with full recomputation. Model FLOPs leave
recomputation out: 72 B s l h^2 (1 + s / 6h + V / 12 l h) remain, a forward pass and a backward pass of twice its size.
Model FLOPs utilization (MFU) is model FLOPs per second over the peak FLOP/s of the devices.
"""

from tridock.experiment import resnet
from tridock.experiment.model import Model
from tridock.experiment.weights import layer_matrices


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
