"""What a launch says at the end of a run that was preempted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.ops.conftest import Lab
from tests.unit.ops.test_sync_command import CONFIG
from tridock.command import Command
from tridock.ops.runs.registry import Run
from tridock.ops.runs.triage import PreemptedError, check_exit


@pytest.mark.parametrize(
    ("train", "saved_in"), [({}, "runs/t-1/checkpoints"), ({"checkpoint_folder": "data/kept"}, "data/kept")]
)
def test_a_preempted_run_continues_where_it_has_saved(
    lab: Lab, train: dict[str, Any], saved_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lab.project / "runs" / "t-1"
    folder.mkdir(parents=True)
    (folder / "experiment.yaml").write_text(json.dumps({**CONFIG, "train": {"train_iters": 2, **train}}))

    def inside(_node: str, *argv: str) -> Command:
        return Command.of(*(word.replace("/workspace", str(lab.project)) for word in argv))

    monkeypatch.setattr(lab.session, "inside", inside)
    with pytest.raises(PreemptedError) as caught:
        check_exit(lab.session, Run("t-1", "node-1"), 85)
    assert str(caught.value) == (
        f"t-1: the run was preempted and has saved a checkpoint; continue with --set train.load={saved_in}"
    )
