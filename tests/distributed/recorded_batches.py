"""Several runs (``several.py``), each of which keeps the tokens of its step: ``batch-<replica>.pt`` in its folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.distributed import several
from tridock.train.trainer import Trainer


class Recording(Trainer):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        step = self.strategy.step

        def recorded(batches: Sequence[Tensor], lr: float) -> Any:
            torch.save(torch.cat(list(batches)), self.run_folder / f"batch-{self.parts.replica}.pt")
            return step(batches, lr)

        self.strategy.step = recorded


if __name__ == "__main__":
    several.Trainer = Recording  # type: ignore[attr-defined,misc]
    several.main()
