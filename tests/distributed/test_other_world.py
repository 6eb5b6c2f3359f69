"""A run continues with another number of ranks than it began with: the same global batch, the same mathematics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cases import thinned
from tests.distributed.ranks import asked_for, losses, make_data, make_run, run, run_several
from tridock.train.checkpoints.zero_reshard import gather_slice, parameter_partitions

pytestmark = pytest.mark.distributed

LENGTH = {
    "train.train_iters": 12,
    "train.save": True,
    "train.save_interval": 6,
    "train.eval_interval": 6,
    "batch.global_batch_size": 12,
    # Of widths that no number of ranks divides: every piece is padded.
    "model.hidden_size": 34,
    "model.num_layers": 1,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    **{f"zero{n}": {"parallel.strategy": "zero", "parallel.zero_stage": n} for n in range(4)},
    "zero1-bf16": {"parallel.strategy": "zero", "parallel.zero_stage": 1, "precision": "bf16"},
    "zero3-bf16": {"parallel.strategy": "zero", "parallel.zero_stage": 3, "precision": "bf16"},
}
WORLDS = (1, 2, 3)
SOME = ("ddp", "zero1", "zero3-bf16")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Path]]:
    """Runs by the number of ranks that continued at iteration 6; the first run starts and finishes with 2."""
    workspace = tmp_path_factory.mktemp("workspace")
    make_data(workspace)
    strategies = asked_for(request, STRATEGIES, SOME)
    calm = {name: make_run(workspace, f"calm-{name}", 2, **LENGTH, **fields) for name, fields in strategies.items()}
    run_several(list(calm.values()), 2)
    found = {0: calm}
    for world_size in WORLDS:
        found[world_size] = {}
        for name in strategies:
            load = {"train.load": f"runs/{calm[name].name}/checkpoints/iter_0000006"}
            fields = {**LENGTH, **STRATEGIES[name], **load}
            found[world_size][name] = make_run(workspace, f"on-{world_size}-{name}", world_size, **fields)
        run_several(list(found[world_size].values()), world_size)
    return found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("strategy", thinned(STRATEGIES, SOME))
def test_losses_continue(runs: dict[int, dict[str, Path]], strategy: str, world_size: int) -> None:
    calm = {place: loss for place, loss in losses(runs[0][strategy]).items() if place[0] > 6}
    continued = losses(runs[world_size][strategy])
    continued = {place: loss for place, loss in continued.items() if place[0] > 6}
    assert len(calm) > 6
    if world_size == 2:
        assert continued == calm
    else:
        assert continued == pytest.approx(calm, rel=1e-5 if "bf16" not in strategy else 3e-2)


def test_a_missing_part_of_another_rank_is_named(runs: dict[int, dict[str, Path]]) -> None:
    workspace = runs[0]["zero1"].parent.parent
    shorter = {"train.train_iters": 6, "optimizer.lr_decay_iters": LENGTH["train.train_iters"]}
    written = make_run(workspace, "torn", 2, **{**LENGTH, **STRATEGIES["zero1"], **shorter})
    assert run(written, 2).codes == [0, 0]
    torn = next(written.glob("checkpoints/iter_*/zero_pp_rank_1_*optim_states.pt"))
    torn.unlink()
    alone = {**LENGTH, **STRATEGIES["zero1"], "train.load": "runs/torn/checkpoints"}
    done = run(make_run(workspace, "alone", 1, **alone), 1)
    assert done.codes == [2]
    assert f"{torn}: is missing" in done.out[0] + done.err[0]


def test_a_slice_across_partitions() -> None:
    """Against the whole vector, for every way to cut it."""
    for size in range(1, 14):
        whole = torch.arange(1, size + 1)
        for before in range(1, 5):
            cut = -(-size // before)
            padded = torch.cat([whole, torch.zeros(cut * before - size, dtype=whole.dtype)])
            for now in range(1, 5):
                own = -(-size // now)
                for rank in range(now):
                    expected = torch.cat([whole, torch.zeros(own * now, dtype=whole.dtype)])[rank * own :][:own]
                    assert torch.equal(gather_slice(padded.split(cut), rank * own, own), expected)


def test_parameter_partitions() -> None:
    sizes = (5, 1, 8, 3)
    whole = [torch.arange(1, size + 1) * 10**place for place, size in enumerate(sizes)]

    def partitions(rank: int, ranks: int) -> list[torch.Tensor]:
        return [gather_slice([one], rank * -(-one.numel() // ranks), -(-one.numel() // ranks)) for one in whole]

    for before in range(1, 5):
        flats = [[torch.cat(partitions(rank, before))] for rank in range(before)]
        for ranks in range(1, 5):
            for rank in range(ranks):
                found = parameter_partitions(flats, sizes, rank, ranks)
                assert all(map(torch.equal, found, partitions(rank, ranks)))
