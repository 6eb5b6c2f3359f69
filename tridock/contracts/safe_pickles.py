"""Names of the classes in other programs' files of torch.save that are loaded. A pickle with another one is refused,
because it can run any code: a node says so before the ranks start, without importing a class."""

import re
from collections.abc import Collection, Iterable
from typing import Final

FOREIGN: Final = "holds an object that is not loaded, because a pickle can run any code"
DEEPSPEED_TODO: Final = "convert the checkpoint where you trust it (zero_to_fp32.py), or copy it again"
MEGATRON_TODO: Final = (
    "save it again without the object where you trust the file (torch.load, torch.save), or copy it again"
)

DEEPSPEED_CLASSES: Final = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
        *("builtins.getattr", "__builtin__.getattr"),  # of members of enums; pickle protocol 2 has Python 2's name
    }
)
LOSS_SCALERS: Final = tuple(
    f"{place}fp16.loss_scaler.{name}" for place in ("megatron.", "") for name in ("LossScaler", "DynamicLossScaler")
)
"""Of Megatron-LM v1.1.5's own fp16 optimizer."""
ENUMS: Final = (
    "megatron.model.enums.ModelType",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
)
"""Of arguments of later versions of Megatron-LM."""
ARRAYS: Final = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
"""NumPy has moved it between versions."""
MEGATRON_CLASSES: Final = frozenset(
    {*DEEPSPEED_CLASSES, *LOSS_SCALERS, *ENUMS, *ARRAYS, "argparse.Namespace", "numpy.ndarray", "numpy.dtype"}
)

_PLAIN: Final = re.compile(
    r"_codecs\.encode|collections\.(OrderedDict|Counter)|(builtins|__builtin__)\.(bytearray|complex|set)"
    r"|torch\.((_utils|_tensor|storage|serialization|cuda|sparse|cuda\.sparse|nn\.parameter|distributed\..+)\.)?\w+"
)
"""What torch's ``weights_only`` loads, and other names of the same modules of torch, on which its version decides."""


def foreign_class(named: Iterable[str], known: Collection[str]) -> str | None:
    """Returns the first class that is neither plain nor ``known``."""
    return next((name for name in named if name not in known and not _PLAIN.fullmatch(name)), None)
