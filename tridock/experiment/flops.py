"""FLOPs of a GPT: what its matrix products need, and what recomputation adds.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1:
an iteration of B samples takes 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recomputed activations. Without the
recomputation, which is not the model's need, a forward and a backward pass of twice its size remain:
72 B s l h^2 (1 + s / 6h + V / 12 l h). Model FLOPs utilization (MFU) is that over what the devices could do at best.
"""

from tridock.experiment import resnet
from tridock.experiment.model import Model
from tridock.experiment.weights import layer_matrices


def layer_flops_per_token(model: Model) -> float:
    """One layer's forward pass: two FLOPs a weight of its matrices, and the attention's two products.

    Of GPT-2's shape 24 h^2 and 4 s h.
    """
    return 2.0 * layer_matrices(model) + attention_flops_per_token(model)


def attention_flops_per_token(model: Model) -> float:
    """The forward pass of one layer's scores and weighted values, as if each token attended to all."""
    return 4.0 * model.seq_length * model.attention_size


def head_flops_per_token(model: Model, vocab_size: int) -> float:
    """The forward pass of the output layer, of ``vocab_size`` rows (the padding included)."""
    return 2.0 * model.hidden_size * vocab_size


def model_flops_per_token(model: Model, vocab_size: int) -> float:
    """FLOPs of one training token, forward and backward, with attention counted whole as in the paper.

    ``vocab_size`` is the number of rows of the output layer, the padding included. Of a model of images: of an image.
    """
    if model.is_vision:
        return 3.0 * resnet.forward_flops(model)
    return 3.0 * (model.num_layers * layer_flops_per_token(model) + head_flops_per_token(model, vocab_size))


def causal_flops_per_token(model: Model, vocab_size: int) -> float:
    """The same with attention counted as it is needed: a token attends to half of the others, on average."""
    if model.is_vision:
        return model_flops_per_token(model, vocab_size)
    return model_flops_per_token(model, vocab_size) - 1.5 * model.num_layers * attention_flops_per_token(model)


def recomputed_flops_per_token(model: Model, full_layers: int, selective: bool) -> float:
    """What the backward pass computes again: ``full_layers`` whole layers, or every layer's attention."""
    if selective:
        return model.num_layers * attention_flops_per_token(model)
    return full_layers * layer_flops_per_token(model)
