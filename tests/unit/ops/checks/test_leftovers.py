"""Processes of runs: what a run that is over left behind, ``--fix`` ends; a run that continues is left alone."""

import pytest

from tridock.contracts.run_state import RunState
from tridock.ops.checks.devices import leftover_findings

RUN = "gpt-20260101-000000-ab12"


@pytest.mark.parametrize("state", ["done", "failed", "stopped", "preempted", "lost"])
def test_processes_of_a_run_that_is_over_are_a_leftover_on_each_node(state: str) -> None:
    found = list(leftover_findings("--hosts lab", {RUN: ["node1", "node2"]}, {RUN: RunState(state)}))

    assert [(it.severity, it.problem.where, it.problem.what, it.remedy) for it in found] == [
        ("warn", node, f"has processes of a run that is {state}", ("stop", RUN)) for node in ("node1", "node2")
    ]


@pytest.mark.parametrize("states", [{RUN: RunState.RUNNING}, {RUN: RunState.READY}, {}])
def test_a_run_that_continues_or_that_no_node_knows_is_never_ended(states: dict[str, RunState]) -> None:
    (found,) = leftover_findings("--hosts lab", {RUN: ["node1", "node2"]}, states)

    assert (found.problem.where, found.problem.what, found.remedy) == ("node1, node2", "a run continues there", ())


def test_a_marker_that_is_no_run_id_is_never_ended() -> None:
    (found,) = leftover_findings("--hosts lab", {"; rm -rf": ["node1"]}, {"; rm -rf": RunState.DONE})

    assert found.remedy == ()
