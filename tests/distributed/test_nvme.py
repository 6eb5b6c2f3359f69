"""States on NVMe: the losses of a run without, before and after it is resumed, and its checkpoints elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.nvme import LEAST
from tests.distributed.ranks import Started, losses, make_run

pytestmark = pytest.mark.distributed

SAVED = 4
COMMON = {
    "parallel.strategy": "zero",
    "parallel.zero_stage": 3,
    "precision": "bf16",
    "train.save": True,
    "train.save_interval": SAVED,
}
PARTS = {
    "optimizer": {"offload_optimizer": {}},
    "param": {"offload_param": {"max_in_cpu": 0}},
    "both": {"offload_optimizer": {}, "offload_param": {"max_in_cpu": 0}},
}
RESUMED = ("param-param", "both-both", "both-none", "none-both")


def options(nvme: Path, parts: str) -> dict[str, Any]:
    """Adam updates a thousand elements or a tensor at a time; norms and biases are too small for NVMe."""
    zero: dict[str, Any] = {"sub_group_size": 1000, "stage3_param_persistence_threshold": 0}
    for name, given in PARTS.get(parts, {}).items():
        zero[name] = {"device": "nvme", "nvme_path": str(nvme), **given}
    if parts == "host":
        zero |= {"offload_optimizer": {"device": "cpu"}}
    return {"deepspeed": {"zero_optimization": zero, "aio": {"block_size": LEAST}}}


@pytest.fixture(scope="module")
def runs(workspace: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on two ranks by what is on NVMe; those that resume another one; the last one on one rank."""
    nvme, made = tmp_path_factory.mktemp("nvme"), {}

    def add(name: str, parts: str, source: str | None = None, world_size: int = 2) -> None:
        load = {} if source is None else {"train.load": f"runs/nvme-{source}/checkpoints/iter_{SAVED:07}"}
        made[name] = make_run(workspace, f"nvme-{name}", world_size, **COMMON, **options(nvme, parts), **load)

    for parts in ("none", "host", *PARTS):
        add(parts, parts)
    for source, parts in (name.split("-") for name in RESUMED):
        add(f"{source}-{parts}", parts, source)
    train(list(made.values()), 2)
    for parts in ("none", "both"):
        add(f"alone-{parts}", parts, "both", 1)
    train([made[f"alone-{parts}"] for parts in ("none", "both")], 1)
    return made


def train(folders: list[Path], world_size: int) -> None:
    argv = ["-m", "tests.distributed.nvme", *map(str, folders)]
    with Started(argv, folders[0], world_size, {}, "deepspeed") as started:
        finished = started.wait()
    assert finished.codes == [0] * world_size, "\n".join(finished.err)


def later(folder: Path) -> dict[tuple[int, str], float]:
    return {place: loss for place, loss in losses(folder).items() if place[0] > SAVED}


@pytest.mark.parametrize(("parts", "same"), [("optimizer", "host"), ("param", "none"), ("both", "host")])
def test_losses_do_not_depend_on_nvme(runs: dict[str, Path], parts: str, same: str) -> None:
    """To the last bit; Adam's norms on the host are sums in another order than on the device."""
    assert losses(runs[parts]) == losses(runs[same])


@pytest.mark.parametrize("resumed", RESUMED)
def test_a_resumed_run_continues_with_the_same_losses(runs: dict[str, Path], resumed: str) -> None:
    """Also without NVMe from a checkpoint with it, and the other way round."""
    source, _, parts = resumed.partition("-")
    assert len(later(runs[resumed])) > 4
    tolerance = 0 if source == parts else 1e-3
    assert later(runs[resumed]) == pytest.approx(later(runs[source]), abs=tolerance, rel=0)


def test_a_run_continues_on_another_number_of_ranks(runs: dict[str, Path]) -> None:
    assert losses(runs["alone-both"]) == pytest.approx(losses(runs["alone-none"]), abs=1e-3, rel=0)
    assert losses(runs["alone-both"]) == pytest.approx(later(runs["both"]), abs=2e-2, rel=0)
