"""Several runs (``several.py``), each of which keeps the tokens of its step: ``batch-<replica>.pt`` in its folder.

Ranks with an output layer keep its logits too: ``logits-<replica>-<rank>.pt`` has the first column, the labels and the
logits of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.distributed import several
from tridock.train.models import cross_entropy
from tridock.train.trainer import Trainer

found: list[tuple[int, Tensor, Tensor]] = []


class Recording(Trainer):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        step = self.strategy.step

        def recorded(batches: Sequence[Tensor], lr: float) -> Any:
            torch.save(torch.cat(list(batches)), self.run_folder / f"batch-{self.parts.replica}.pt")
            found.clear()
            loss = step(batches, lr)
            if found:
                torch.save(found, self.run_folder / f"logits-{self.parts.replica}-{self.ranks.rank}.pt")
            return loss

        self.strategy.step = recorded


forward = cross_entropy._TokenLosses.forward


def kept(ctx: Any, logits: Tensor, labels: Tensor, group: Any, first: int, compiled: bool) -> Tensor:
    """Both engines compute the loss of the whole vocabulary, or of a rank's columns of it, with this function."""
    found.append((first, labels.clone(), logits.detach().clone()))  # the backward pass overwrites them
    return forward(ctx, logits, labels, group, first, compiled)


if __name__ == "__main__":
    cross_entropy._TokenLosses.forward = staticmethod(kept)  # type: ignore[method-assign,assignment]
    several.Trainer = Recording  # type: ignore[attr-defined,misc]
    several.main()
