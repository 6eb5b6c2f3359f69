"""When the engine and the bare loop change places."""

from __future__ import annotations

from tridock.train.bench.baseline_loop import Turns


def test_the_first_turn_is_the_warm_up() -> None:
    turns = Turns.parse("3,2")
    assert turns == Turns(warmup=3, steps=2)
    assert [iteration for iteration in range(1, 11) if turns.ends(iteration)] == [3, 5, 7, 9]
