"""torch's AdamW under megatron-core's distributed optimizer, which loads as apex's and transformer-engine's want it.

Theirs count steps once for all; torch's has a count beside each parameter, from its first step on.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


def before_load(optimizer: Any) -> None:
    """Makes the states that the first step would make, and keeps their count out of what is loaded beside it."""
    if not isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer.optimizer, torch.optim.AdamW):
        return
    states = optimizer.optimizer.state
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            if not states[parameter]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                states[parameter] = {"step": torch.tensor(0.0), **moments}
    set_states = optimizer._set_main_param_and_optimizer_states
    get_states = optimizer._get_main_param_and_optimizer_states
    optimizer._set_main_param_and_optimizer_states = lambda parameter, loaded: set_states(
        parameter, {**get_states(parameter), **loaded}
    )


def after_load(optimizer: Any) -> None:
    """Gives each parameter a count of its own: loaded as one tensor, it would go up once a parameter."""
    for state in optimizer.optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()
