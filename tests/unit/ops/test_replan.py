"""A run without nodes that it had, from its folder: how it continues, with which files; or why it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import SMALL, with_fields
from tridock.cli import main
from tridock.contracts.supervision import Supervision
from tridock.errors import RequestError
from tridock.launchers.run import make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.runs.prepare import prepared_from
from tridock.ops.runs.replan import Replanned, replan
from tridock.plan import assess

RUN_ID = "small-20260102-030405-abcd"
SPARES = {"node-4": [0], "node-5": [0, 1, 2, 3]}
THREE = {"node-1": [0, 1], "node-2": [0, 1], "node-3": [0, 1]}
PIPELINE = {"parallel.pipeline_model_parallel_size": 2}
V115 = {
    "engine": "megatron-deepspeed",
    "data.vocab_file": "v",
    "data.merge_file": "m",
    "precision": "fp16",
    "parallel.strategy": "zero",
    "parallel.zero_stage": 1,
}
ZERO = {"parallel.strategy": "zero", "parallel.zero_stage": 2}


def a_run(workspace: Path, slots: dict[str, list[int]] = THREE, **fields: Any) -> Path:
    experiment = with_fields(SMALL, fields)
    run = replace(
        prepared_from(assess(experiment, slots, "e.yaml"), slots, RUN_ID),
        master_addr="192.0.2.1",
        master_port=29500,
        manifest={"image": "sha256:1"},
        workspace=str(workspace),
        spares=SPARES,
        addresses={"node-3": "192.0.2.3"},
    )
    bundle = make_bundle(run, Ssh())
    folder = workspace / "runs" / RUN_ID
    folder.mkdir(parents=True)
    for name, content in bundle.files.items():
        (folder / name).write_bytes(content)
    return folder


def ranks_of(found: Replanned) -> dict[str, tuple[int, ...]]:
    return dict(Supervision.from_json(found.bundle.files["supervision.json"].decode()).ranks)


def refused(folder: Path, *given: Any, **named: Any) -> str:
    with pytest.raises(RequestError) as caught:
        replan(folder, *given, **named)
    return str(caught.value)


def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path) -> None:
    """node-4 has too few slots; node-5 gives two of its four. Every rank stays what it was."""
    folder = a_run(tmp_path)
    found = replan(folder, ["node-2"], ["node-4", "node-5"])
    assert found.summary == "node-5 takes the place of node-2"
    assert ranks_of(found) == {"node-1": (0, 1), "node-5": (2, 3), "node-3": (4, 5)}
    supervision = Supervision.from_json(found.bundle.files["supervision.json"].decode())
    assert supervision.spares == {"node-4": (0,)}
    assert (supervision.master_addr, supervision.master_port) == ("192.0.2.1", 29500)
    for name in ("launch.sh", "launch-resume.sh", "deepspeed_env"):
        assert found.bundle.files[name] == (folder / name).read_bytes()
    assert found.bundle.files["hostfile"] == b"node-1 slots=2\nnode-5 slots=2\nnode-3 slots=2\n"


def test_another_node_leads_it_where_the_head_is_lost(tmp_path: Path) -> None:
    """Rank 0 and the rendezvous move there; a spare takes the place of the head as a node among others."""
    found = replan(a_run(tmp_path), ["node-1"], ["node-5"], head="node-3")
    assert found.summary == "node-3 leads it in the place of node-1; node-5 takes the place of node-1"
    assert ranks_of(found) == {"node-3": (0, 1), "node-5": (2, 3), "node-2": (4, 5)}
    supervision = Supervision.from_json(found.bundle.files["supervision.json"].decode())
    assert (supervision.head, supervision.remote) == ("node-3", ("node-5", "node-2"))
    assert (supervision.master_addr, supervision.addresses) == ("192.0.2.3", {"node-3": "192.0.2.3"})
    assert b"--master_addr 192.0.2.3 " in found.bundle.files["launch.sh"].replace(b" \\\n  ", b" ")


def test_a_head_that_has_only_lost_its_supervision_stays_a_node(tmp_path: Path) -> None:
    found = replan(a_run(tmp_path), [], head="node-2")
    assert found.summary == "node-2 leads it in the place of node-1"
    assert ranks_of(found) == {"node-2": (0, 1), "node-1": (2, 3), "node-3": (4, 5)}


def test_without_a_spare_replicas_do_with_fewer(tmp_path: Path) -> None:
    folder = a_run(tmp_path, **ZERO)
    found = replan(folder, ["node-2"], ["node-4"], from_scratch=True)
    assert found.summary == (
        "without node-2 it continues as TP1 PP1 DP4 (it was TP1 PP1 DP6) on node-1, node-3; "
        "global batch 24 as before, in 3 micro-batches a replica"
    )
    assert ranks_of(found) == {"node-1": (0, 1), "node-3": (2, 3)}
    assert json.loads(found.bundle.files["ds_config.json"])["gradient_accumulation_steps"] == 3
    assert b"TRIDOCK_WORLD_SIZE=4\n" in found.bundle.files["deepspeed_env"]


def test_one_lost_node_is_replaced_and_the_other_done_without(tmp_path: Path) -> None:
    found = replan(a_run(tmp_path), ["node-2", "node-3"], ["node-5"])
    assert found.summary == (
        "node-5 takes the place of node-2; without node-3 it continues as TP1 PP1 DP4 (it was TP1 PP1 DP6) on node-1, "
        "node-5; global batch 24 as before, in 3 micro-batches a replica"
    )


def test_slots_that_no_replica_fills_are_left(tmp_path: Path) -> None:
    slots = {"node-1": [4, 5], "node-2": [4, 5, 6], "node-3": [0, 1, 2]}
    fields = {"engine": "megatron-core", **PIPELINE}
    found = replan(a_run(tmp_path, slots, **fields), ["node-3"])
    assert ranks_of(found) == {"node-1": (0, 1), "node-2": (2, 3)}
    assert b"--include node-1:4,5@node-2:4,5" in found.bundle.files["launch.sh"].replace(b" \\\n  ", b" ")


def test_megatron_core_continues_in_another_layout(tmp_path: Path) -> None:
    fields = {"engine": "megatron-core", **PIPELINE, "parallel.tensor_model_parallel_size": 2}
    folder = a_run(tmp_path, {"node-1": [0, 1], "node-2": [0, 1]}, **fields)
    found = replan(folder, ["node-2"])
    assert found.summary == (
        "without node-2 it continues as TP1 PP1 DP2 (it was TP2 PP2 DP1) on node-1; global batch 24 as before, in 6 "
        "micro-batches a replica"
    )
    assert b"pipeline_model_parallel_size: 1\n" in found.bundle.files["experiment.yaml"]


def test_megatron_v115_says_what_would_run(tmp_path: Path) -> None:
    folder = a_run(tmp_path, **V115, **PIPELINE)
    assert refused(folder, ["node-2"]) == (
        f"{RUN_ID}: Megatron v1.1.5 loads its checkpoint on TP1 PP2 DP3 and no other layout; got 4 slots on node-1, "
        "node-3; bring node-2 back; from its beginning it would run as TP1 PP2 DP2 on node-1, node-3"
    )
    assert replan(folder, ["node-2"], ["node-5"]).summary == "node-5 takes the place of node-2"
    assert "TP1 PP2 DP2" in replan(folder, ["node-2"], from_scratch=True).summary


def test_a_run_that_has_nothing_left_to_run_as(tmp_path: Path) -> None:
    folder = a_run(tmp_path, {"node-1": [0], "node-2": [0, 1, 2]}, **V115, **PIPELINE)
    assert refused(folder, ["node-2"], from_scratch=True) == (
        f"{RUN_ID}: has no layout with a global batch of 24 on the remaining nodes; got 1 slot on node-1; bring "
        f"node-2 back, and continue with tridock resume"
    )


def test_too_few_nodes(tmp_path: Path) -> None:
    folder = a_run(tmp_path, **{"restart.min_nodes": 3})
    assert refused(folder, ["node-2"]) == (
        f"{RUN_ID}: may not continue with fewer than 3 nodes; got node-1, node-3; "
        "lower restart.min_nodes, or add spares"
    )
    assert replan(folder, ["node-2"], ["node-5"]).summary == "node-5 takes the place of node-2"


def test_names_that_are_wrong(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    assert refused(folder, ["node-9", "node-1"], ["node-2"]).splitlines() == [
        "--without: is not a node of the run; got 'node-9'; use one of node-1, node-2, node-3",
        "--spare: is not a spare of the run; got 'node-2'; its spares are node-4, node-5",
        "--without: is the run's head, without which it cannot continue; got node-1; "
        "continue it on the other nodes with tridock resume --exclude node-1",
    ]


def test_no_run(tmp_path: Path) -> None:
    assert refused(tmp_path, ["a"]) == (
        f"{tmp_path}: has no experiment.yaml; got No such file or directory; "
        "give the folder of a run that tridock launch started"
    )


def test_a_damaged_file_of_a_run_is_named(tmp_path: Path) -> None:
    folder = a_run(tmp_path)
    todo = "take it from another node of the run"
    (folder / "plan.json").write_text('{"ranks": [3]}')
    assert refused(folder, ["node-2"]) == f"{folder}/plan.json: is damaged; {todo}"
    (folder / "manifest.json").write_bytes(b"{\xff")
    assert refused(folder, ["node-2"]) == f"{folder}/manifest.json: is damaged; {todo}"
    text = (folder / "supervision.json").read_text()
    (folder / "supervision.json").write_text(text.replace('"launcher": "', '"launcher": "x'))
    assert f"{folder}/supervision.json: is damaged; got no launcher is named 'x" in refused(folder, ["node-2"])
    (folder / "supervision.json").write_text("[" * 100_000)
    assert refused(folder, ["node-2"]).startswith(f"{folder}/supervision.json: is damaged; got ")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path)
    argv = ["replan", str(folder), "--without", "node-2", "--spare", "node-5"]
    assert main(argv) == 0
    assert capsys.readouterr().out == "node-5 takes the place of node-2\n"
    assert main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["nodes"]) == (1, ["node-1", "node-5", "node-3"])
    assert (found["layout"], found["world_size"]) == ("TP1 PP1 DP6", 6)
    assert found["files"]["hostfile"] == "node-1 slots=2\nnode-5 slots=2\nnode-3 slots=2\n"
    assert main(["replan", str(folder), "--without", "node-1"]) == 2


def test_the_planner_needs_no_torch(tmp_path: Path) -> None:
    """The supervisor waits for it."""
    script = "import sys; from tridock.cli import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    argv = [sys.executable, "-c", script, "replan", str(a_run(tmp_path)), "--without", "node-2"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
