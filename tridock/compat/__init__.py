"""Runs code for CUDA, apex and older releases of torch on the twin and on today's torch.

Only what is missing is replaced, and every replacement is reported.
"""

import importlib.util
import math
import sys
from types import ModuleType

import numpy as np

from tridock.compat import apex, cuda


def install(device_type: str, local_world_size: int) -> list[str]:
    """Replaces what this machine lacks; returns a line for each replacement.

    Call it after torch and DeepSpeed are imported, so that they do not take a replacement for the real thing.
    """
    replaced = _restore_old_names()
    if device_type != "cuda":
        replaced += cuda.map_to_cpu(local_world_size)
    replaced += apex.stand_in(device_type)
    return replaced


def _restore_old_names() -> list[str]:
    restored = []
    if importlib.util.find_spec("torch._six") is None and "torch._six" not in sys.modules:
        six = ModuleType("torch._six", "Stand-in: what old code imports from it.")
        six.inf = math.inf  # type: ignore[attr-defined]
        six.string_classes = (str, bytes)  # type: ignore[attr-defined]
        sys.modules["torch._six"] = six
        restored.append("torch._six: gone since torch 2.0")
    if not hasattr(np, "float"):
        # Only Megatron's table of element sizes uses it, beside np.double: the C language's float of 4 bytes.
        np.float = np.float32  # type: ignore[attr-defined]
        restored.append("numpy.float: gone since numpy 1.24; 4 bytes, as Megatron's table of sizes has it")
    return restored
