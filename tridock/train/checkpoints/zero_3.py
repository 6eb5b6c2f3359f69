"""The weights of a checkpoint of DeepSpeed's ZeRO 3."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from tridock.contracts.checkpoints import ZERO_RANK
from tridock.errors import Problem, RequestError
from tridock.train.checkpoints.pickles import megatron_classes, safe_torch_load
from tridock.train.checkpoints.zero_reshard import gather_slice

FIRST: Final = "mp_rank_00"


class Zero3:
    """Reads whole weights from the ranks' partitions, which are consecutive in flat fp32 vectors.

    ``model_rank`` names the tensor parallel rank that has the weights: ``mp_rank_00``. Files are memory-mapped.
    """

    def __init__(self, folder: Path, model_rank: str = FIRST) -> None:
        files = sorted(folder.glob(f"*_{model_rank}_optim_states.pt"), key=_rank)
        models = sorted(folder.glob(f"*_{model_rank}_model_states.pt"), key=_rank)
        if not files or not models:
            todo = "name a run that has saved"
            raise RequestError(Problem(str(folder), "holds no checkpoint of a known format", "", todo))
        self._flats = [_load(file)["optimizer_state_dict"]["fp32_flat_groups"] for file in files]
        self._places: dict[str, tuple[int, torch.Size]] = {}
        offset = 0
        for group in _load(models[0])["param_shapes"]:
            for name, shape in group.items():
                self._places[name] = (offset, shape)
                offset += -(-shape.numel() // len(files))

    @property
    def names(self) -> Iterable[str]:
        return self._places

    def read(self, name: str) -> Tensor:
        """Returns a whole weight, fp32."""
        start, shape = self._places[name]
        share = -(-shape.numel() // len(self._flats))
        parts = [gather_slice(flat, start, share) for flat in self._flats]
        return torch.cat(parts)[: shape.numel()].view(shape)


def _load(file: Path) -> dict[str, Any]:
    with safe_torch_load(megatron_classes()):
        state: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return state


def _rank(file: Path) -> int:
    found = ZERO_RANK.search(file.name)
    return int(found[1]) if found else 0
