"""Several runs (``several.py``) of a mixture of experts, which keep how near a token was to another expert:
``margins.json`` in a run's folder has each step's smallest difference between the scores of the last expert that a
token got and of the next one, on rank 0."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from tests.distributed import several
from tridock.train.trainer import Trainer

found: list[float] = []
routing = TopKRouter.routing


def kept(router: Any, logits: Tensor, *given: Any, **named: Any) -> Any:
    scores = logits.detach().float()
    scores = scores.softmax(-1) if router.config.moe_router_pre_softmax else scores
    best = scores.topk(router.topk + 1, dim=-1).values
    found.append(float((best[..., -2] - best[..., -1]).min()))
    return routing(router, logits, *given, **named)


class Measuring(Trainer):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        step, margins = self.strategy.step, []

        def measured(batches: Sequence[Tensor], lr: float) -> Any:
            found.clear()
            loss = step(batches, lr)
            margins.append(min(found))
            if self.ranks.rank == 0:
                (self.run_folder / "margins.json").write_text(json.dumps(margins))
            return loss

        self.strategy.step = measured


if __name__ == "__main__":
    TopKRouter.routing = kept
    several.Trainer = Measuring  # type: ignore[attr-defined,misc]
    several.main()
