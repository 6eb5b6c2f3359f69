"""What a rank keeps from step to step: weights, gradients, optimizer states, by engine, strategy and precision.

Bytes a weight, in the short formats (fp16, bf16):

=====================================  =======  =========  =====================  ============================
engine                                 weights  gradients  optimizer              shared out over replicas
=====================================  =======  =========  =====================  ============================
megatron-core                          2        4          4 + 8 (master, Adam)   optimizer, if distributed
torch, DDP                             4        4          8                      nothing
=====================================  =======  =========  =====================  ============================
"""

from __future__ import annotations

from tridock.experiment import Experiment
from tridock.plan.activations import Device
from tridock.plan.parameters import Parameters
from tridock.plan.term import Term
from tridock.plan.traffic import FORMAT_BYTES


def state_terms(experiment: Experiment, weights: Parameters, replicas: int) -> list[Term]:
    """Weights, gradients, optimizer."""
    return [
        Term("weights", 4 * weights.total, ""),
        Term("gradients", 4 * weights.total, ""),
        Term("optimizer", 12 * weights.total, ""),
    ]


def optimizer_workspace(experiment: Experiment, weights: Parameters, replicas: int, device: Device) -> Term:
    """What the optimizer needs while it steps."""
    return Term("optimizer's workspace", 4 * weights.total if device == "cuda" else 0, "")
