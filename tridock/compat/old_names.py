"""Names that torch and numpy have dropped."""

from __future__ import annotations

import importlib.util
import math
import sys
from types import ModuleType

import numpy as np


def restore() -> list[str]:
    """Brings back what is gone, and nothing else."""
    restored = []
    if importlib.util.find_spec("torch._six") is None and "torch._six" not in sys.modules:
        six = ModuleType("torch._six", "Stand-in: what old code imports from it.")
        six.inf = math.inf  # type: ignore[attr-defined]
        six.string_classes = (str, bytes)  # type: ignore[attr-defined]
        sys.modules["torch._six"] = six
        restored.append("torch._six: gone since torch 2.0")
    if not hasattr(np, "float"):
        # Its one user is the table of element sizes of Megatron's indexed data sets, where it has 4 bytes and stands
        # beside np.double: the C language's float, not Python's.
        np.float = np.float32  # type: ignore[attr-defined]
        restored.append("numpy.float: gone since numpy 1.24; 4 bytes, as Megatron's table of sizes has it")
    return restored
