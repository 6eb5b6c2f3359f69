"""What the plan says of an experiment is what engine ``torch`` does with it, whatever shares the model out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from tests.cases import thinned
from tests.distributed import legality
from tests.distributed.legality import Case, agree, chosen, reasons_in

pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("third", thinned([0, 1, 2], [0]))
def test_sizes_formats_and_stages(third: int) -> None:
    """Each third has every pair of values; all of them together every combination."""
    chance = random.Random(1 + third)
    cases = []
    for places in product(range(5), range(3), range(3), range(3)):
        if sum(places) % 3 != third:
            continue
        stage, precision = (None, 0, 1, 2, 3)[places[0]], ("fp32", "bf16", "fp16")[places[1]]
        replicas, steps = places[2] + 1, places[3] + 1
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
    assert sum(not found.reasons() for found in cases) > 12
    agree(cases, "pretended")


def shared(chance: random.Random) -> Iterator[Case]:
    """Layouts of up to four ranks, most of them of sizes that go together."""
    schedules = ("1f1b", "1f1b", "gpipe", "interleaved", "interleaved")
    while True:
        tensor, stages, replicas = chance.choice((1, 1, 2, 3)), chance.choice((1, 2, 2, 3, 4)), chance.choice((1, 1, 2))
        world = tensor * stages * replicas + chance.choice((0, 0, 0, 0, 1))
        strategy = chance.choice(("ddp", "fsdp", "fsdp"))
        if world > 4 or (strategy != "fsdp" and tensor * stages == 1):
            continue
        schedule = chance.choice(schedules) if stages > 1 else "1f1b"
        virtual = chance.choice((2, 2, 3)) if schedule == "interleaved" else 1
        model = {
            "num_layers": chance.choice((1, 2, 3, 4, 4, 6)),
            "num_attention_heads": chance.choice((2, 3, 4, 6)),
            "make_vocab_size_divisible_by": chance.choice((4, 5, 6, 7, 12)),
            "checkpoint_activations": chance.choice((False, False, True)),
        }
        parallel = {
            "strategy": strategy,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
            "virtual_pipeline_model_parallel_size": virtual,
            "pipeline_schedule": schedule,
            "data_parallel_shard_size": chance.choice((None, None, 1, 2, 3)) if strategy == "fsdp" else None,
        }
        batch = legality.batch(chance, replicas, chance.choice((1, 2, 3, 4, 5, 6)))
        precision = chance.choice(("fp32", "fp32", "bf16"))
        yield legality.case("torch", world, model, parallel, batch=batch, precision=precision)


@pytest.mark.parametrize("accepted", thinned([8, 30], [8]))
def test_what_torch_shares_out(accepted: int) -> None:
    """What the plan alone refuses, since the engine would do otherwise than asked, is not among them."""
    chance = random.Random(5)
    found = shared(chance)
    cases = chosen((next(found) for _ in range(6000)), accepted=accepted, refused=3)
    assert sum(not it.reasons() for it in cases) == accepted
    assert len(reasons_in(cases)) == 8
    agree(cases, "small_worlds")
