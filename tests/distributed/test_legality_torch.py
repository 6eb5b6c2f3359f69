"""What the plan says of an experiment is what engine ``torch`` does with it, under DDP and under DeepSpeed's ZeRO."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.distributed import legality
from tests.distributed.legality import agree, reasons_in

pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


def test_sizes_formats_and_stages() -> None:
    chance = random.Random(1)
    cases = []
    for stage, precision, replicas, steps in product(
        (None, 0, 1, 2, 3), ("fp32", "bf16", "fp16"), (1, 2, 3), (1, 2, 3)
    ):
        model = {"num_layers": chance.choice((1, 2)), "num_attention_heads": chance.choice((1, 2, 3, 5))}
        model |= {"max_position_embeddings": chance.choice((None, None, 7, 8, 9))}
        parallel = {"strategy": "ddp"} if stage is None else {"strategy": "zero", "zero_stage": stage}
        # DDP and stage 3 look at what the other ranks answer: several of these are tested with real ranks elsewhere.
        alone = stage in (None, 3)
        sizes = legality.batch(chance, 1 if alone else replicas, steps)
        cases.append(
            legality.case("torch", 1 if alone else replicas, model, parallel, precision=precision, batch=sizes)
        )
    assert len(reasons_in(cases)) == 3
    assert sum(not found.reasons() for found in cases) > 40
    agree(cases, "tests.distributed.pretended")
