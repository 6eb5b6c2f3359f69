"""What the plan says of an experiment is what Megatron-LM v1.1.5 on DeepSpeed does with it, in hundreds of layouts.

Each is trained one iteration on a rank of each stage of a pretended world (``pretended_v115.py``).
"""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import legality
from tests.distributed.legality import Case, agree, chosen, reasons_in
from tests.megatron_source import patched_source

torch: Any = pytest.importorskip("torch")
pytest.importorskip("deepspeed", exc_type=ImportError)

pytestmark = pytest.mark.distributed

PROGRAM = "pretended_v115"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(patched_source(tmp_path_factory.mktemp("megatron") / "source"))


def case(world_size: int, model: dict[str, Any], parallel: dict[str, Any], **others: Any) -> Case:
    return legality.case("megatron-deepspeed", world_size, model, parallel, **others)


def sizes() -> Iterator[Case]:
    """Every combination of small sizes, in a world of one or two replicas, or one rank more than fits."""
    chance = random.Random(1)
    for layers, heads, tensor, stages, (strategy, zero), steps in product(
        (1, 2, 3, 4, 6),
        (2, 3, 4, 5),
        (1, 2, 3, 4),
        (1, 2, 3, 4),
        [("ddp", 0), ("zero", 0), ("zero", 1), ("zero", 2)],
        (1, 2),
    ):
        replicas, over = chance.choice((1, 2)), chance.choice((0, 0, 0, 1))
        model = {"num_layers": layers, "num_attention_heads": heads, "seq_length": chance.choice((7, 8))}
        model["max_position_embeddings"] = chance.choice((None, None, 7))
        parallel = {
            "strategy": strategy,
            "zero_stage": zero,
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": stages,
        }
        # Megatron's own optimizer takes fp16 on GPUs only.
        precision = "fp32" if strategy == "ddp" else chance.choice(("fp32", "fp16"))
        batch = legality.batch(chance, replicas, steps)
        yield case(tensor * stages * replicas + over, model, parallel, batch=batch, precision=precision)


def test_sizes(source: str) -> None:
    cases = chosen(sizes(), accepted=100, refused=15)
    assert len(reasons_in(cases)) == 10
    agree(cases, PROGRAM, source)


def test_stored_activations(source: str) -> None:
    """Without ``checkpoint_in_cpu``: on a CPU what is stored is what is trained on."""
    cases = []
    for number, stages, tensor, partition, contiguous in product(
        (1, 2, 3, 5), (1, 2), (1, 2), (False, True), (False, True)
    ):
        model = {
            "num_layers": 4,
            "checkpoint_activations": True,
            "checkpoint_num_layers": number,
            "partition_activations": partition,
            "contiguous_checkpointing": contiguous,
        }
        parallel = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": stages}
        cases.append(case(tensor * stages, model, parallel))
    agree(cases, PROGRAM, source)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_stages_with_tensor_parallel_ranks(source: str, zero: int) -> None:
    layouts = product((1, 2), (1, 2, 4), ("fp32", "fp16"))
    cases = [
        case(data * tensor, {}, {"zero_stage": zero, "tensor_model_parallel_size": tensor}, precision=precision)
        for data, tensor, precision in layouts
    ]
    assert not reasons_in(cases)
    agree(cases, PROGRAM, source)


def test_a_warm_up_ends_at_the_whole_rate(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", SimpleNamespace(print_rank_0=lambda _: None))
    schedule: Any = runpy.run_path(f"{source}/megatron/learning_rates.py")["AnnealingLR"]
    iterations = [({"lr_warmup_iters": warmup}, warmup, range(1, 9)) for warmup in range(9)]
    fractions = [({"lr_warmup_fraction": share}, share, (5, 10, 31)) for share in (0.0, 0.1, 0.25, 0.5, 0.55, 0.9)]
    for (field, given, decays), style in product([*iterations, *fractions], ("cosine", "linear", "constant")):
        for decay in decays:
            settings = {**field, "lr_decay_iters": decay, "lr": 1.0, "lr_decay_style": style}
            warmup = given if "lr_warmup_iters" in field else given * decay
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
            rates = schedule(optimizer, 1.0, warmup, decay, style, 0)
            rates.step(int(warmup))
            reached = rates.get_lr() == pytest.approx(int(warmup) / warmup if warmup else 1.0)
            assert reached == (not case(1, {}, {}, optimizer=settings).reasons()), settings
