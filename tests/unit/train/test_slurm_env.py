"""A rank's place, where Slurm alone has started it."""

import pytest

from tridock.train.rank.run import slurm_rank_env

STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NTASKS": "5", "TRIDOCK_WORLD_SIZE": "5"}


@pytest.mark.parametrize(
    ("nodes", "local"), [("2(x2),1", "2"), ("2,3", "3"), ("4(x1),1(x3)", "1"), ("5", "1"), ("", "1")]
)
def test_the_place_of_a_task(nodes: str, local: str) -> None:
    expected = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": local}
    assert slurm_rank_env({**STEP, "SLURM_STEP_TASKS_PER_NODE": nodes}) == expected


@pytest.mark.parametrize(
    "changes", [{"RANK": "0"}, {"SLURM_NTASKS": "2"}, {"TRIDOCK_WORLD_SIZE": "1"}], ids=["torchrun", "node", "alone"]
)
def test_a_launchers_word_counts(changes: dict[str, str]) -> None:
    assert slurm_rank_env({**STEP, **changes}) == {}


def test_without_slurm_there_is_nothing() -> None:
    assert slurm_rank_env({"TRIDOCK_WORLD_SIZE": "2"}) == {}
