"""The files in which a rank's DeepSpeed keeps states on NVMe (ZeRO-Infinity)."""

import atexit
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from torch import nn

from tridock.errors import Problem, RequestError
from tridock.train.rank.process_group import Ranks

DEEPSPEED: Final = "0.19.8"
"""Its checkpoints of such states do not resume; ours read and write what lies behind them (``zero_on_nvme``)."""


def config_of_rank(config: Mapping[str, Any], model: nn.Module, run: str, ranks: Ranks) -> dict[str, Any]:
    """Returns the run's DeepSpeed configuration with a folder of this rank's own, which exists until it exits.

    Without a ``buffer_size``, a buffer has room for the rank's part of any of the model's weights.
    """
    import deepspeed

    if deepspeed.__version__ != DEEPSPEED:
        what = f"device nvme works with DeepSpeed {DEEPSPEED}"
        todo = "use an image with it, or set device to cpu"
        raise RequestError(Problem("deepspeed.zero_optimization", what, deepspeed.__version__, todo))
    zero = dict(config["zero_optimization"])
    largest = max(-(-parameter.numel() // ranks.world_size) for parameter in model.parameters())
    for name, default in (("offload_optimizer", {}), ("offload_param", {"buffer_size": largest})):
        options = zero.get(name, {})
        if options.get("device") == "nvme":
            folder = Path(options["nvme_path"], run, f"rank-{ranks.rank}")
            # Of the run before it was restarted. The run's folder stays: another rank may be making its own in it.
            shutil.rmtree(folder, ignore_errors=True)
            atexit.register(_remove, folder)
            zero[name] = {**default, **options, "nvme_path": str(folder)}
    return {**config, "zero_optimization": zero}


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another rank's is there
        folder.parent.rmdir()
