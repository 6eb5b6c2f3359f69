"""Model FLOPs of a GPT: what its matrix products need, whatever the hardware really does.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), section 5.1:
an iteration of B samples takes 96 B s l h^2 (1 + s / 6h + V / 16 l h) with recomputed activations. Without the
recomputation, which is not the model's need, a forward and a backward pass of twice its size remain:
72 B s l h^2 (1 + s / 6h + V / 12 l h). Model FLOPs utilization (MFU) is that over what the devices could do at best.
"""

from __future__ import annotations

from typing import Final

from tridock.experiment.schema import Model

PEAK_TFLOPS: Final = {
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100": 989.4,
    "A100": 312.0,
    "V100": 125.0,
}
"""Dense 16-bit TFLOP/s of a device by a part of its name, the more special first; from NVIDIA's data sheets."""


def model_flops_per_token(model: Model, vocab_size: int) -> float:
    """FLOPs of one training token, forward and backward, with attention counted whole as in the paper.

    ``vocab_size`` is the number of rows of the output layer, the padding included.
    """
    layers, hidden, sequence = model.num_layers, model.hidden_size, model.seq_length
    return 72.0 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab_size / (12 * layers * hidden))


def peak_tflops(device: str) -> float | None:
    """What a device of this name does at best in 16 bits; None for one that is not listed."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device), None)
