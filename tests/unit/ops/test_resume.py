"""How a run continues: what is refused, and what is said of the learning rate and the changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import with_fields
from tests.unit.ops.test_replan import V115
from tridock.cli import main
from tridock.cli.resume import _or_without
from tridock.cluster.settings import load_cluster
from tridock.contracts.events import Event, append_event
from tridock.errors import ClusterError, Problem, TridockError
from tridock.experiment import dump_experiment, load_experiment
from tridock.experiment.command import CommandExperiment
from tridock.launchers.run import make_bundle
from tridock.launchers.ssh import Ssh
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.prepared import prepare_command
from tridock.ops.runs.resume import continuation, nodes_of_program, on_slots
from tridock.plan import assess

BASE: dict[str, Any] = {
    "name": "t",
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
    "parallel": {"strategy": "ddp"},
    "batch": {"micro_batch_size": 2, "global_batch_size": 4},
    "data": {"data_path": "data/t_document"},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-5, "lr_warmup_iters": 2},
    "train": {"train_iters": 100},
}


def a_run(folder: Path, saved: Sequence[int], **fields: Any) -> Path:
    run = folder / "runs" / "t-1"
    run.mkdir(parents=True)
    (run / "experiment.yaml").write_text(dump_experiment(with_fields(BASE, fields)))
    for iteration in saved:
        append_event(run, Event.CHECKPOINT_SAVED, iteration=iteration, folder="x")
    return run


def refused(run: Path, *changes: str) -> str:
    with pytest.raises(TridockError) as caught:
        continuation(run, changes, lambda *_: None)
    return str(caught.value)


def test_a_run_that_was_stopped_goes_on_as_it_was(tmp_path: Path) -> None:
    found = continuation(a_run(tmp_path, [20, 40]), [], lambda *_: None)
    assert found.config == tmp_path / "runs/t-1/experiment.yaml"
    assert found.overrides == ("train.load=runs/t-1/checkpoints",)
    assert found.notes == (
        "continues after iteration 40 of 100 at the latest, with learning rate 0.000661",
        "the data continues after the samples that the checkpoint has seen; metrics.jsonl begins there",
    )


def test_changes_are_named_and_folders_kept(tmp_path: Path) -> None:
    run = a_run(tmp_path, [20], **{"train.checkpoint_folder": "big/ck"})
    found = continuation(run, ["batch.global_batch_size=8", "optimizer.lr=0.002"], lambda *_: None)
    chosen = "train.override_checkpoint=[batch.global_batch_size, optimizer.lr]"
    assert found.overrides[:2] == (chosen, "train.load=big/ck")
    assert load_experiment(found.config, found.overrides).train.override_checkpoint == (
        "batch.global_batch_size", "optimizer.lr",
    )  # fmt: skip
    assert found.notes[:2] == ("batch.global_batch_size: 8 (it was 4)", "optimizer.lr: 0.002 (it was 0.001)")
    section = continuation(run, ["optimizer={lr: 0.002}", "train.log_interval=1"], lambda *_: None)
    assert section.overrides[0] == "train.override_checkpoint=[optimizer.lr, optimizer.lr_warmup_iters]"


def test_an_earlier_choice_is_not_one_for_later_changes(tmp_path: Path) -> None:
    run = a_run(tmp_path, [20], **{"train.override_checkpoint": ["train.seed"]})
    assert continuation(run, [], lambda *_: None).overrides[0] == "train.override_checkpoint=[]"


def test_a_finished_run_needs_more_iterations_and_a_choice_of_the_schedule(tmp_path: Path) -> None:
    run = a_run(tmp_path, [100])
    assert refused(run) == (
        "train.train_iters: t-1 has come to its end; got 100 iterations; give more: --set train.train_iters=200"
    )
    choice = (
        "optimizer.lr_decay_iters: the learning rate would end at 200; got 100 before; "
        "choose: --set optimizer.lr_decay_iters=100 keeps it, =200 stretches it"
    )
    assert refused(run, "train.train_iters=200") == choice
    assert refused(run, "train.train_iters=200", "optimizer.weight_decay=0.1") == choice
    for end, rate in ((100, "1e-05"), (200, "0.000505")):
        changes = ["train.train_iters=200", f"optimizer.lr_decay_iters={end}"]
        notes = continuation(run, changes, lambda *_: None).notes
        assert notes[-2] == f"continues after iteration 100 of 200 at the latest, with learning rate {rate}"
    constant = a_run(tmp_path / "constant", [100], **{"optimizer.lr_decay_style": "constant"})
    assert continuation(constant, ["train.train_iters=200"], lambda *_: None).notes


def test_a_run_whose_events_are_gone_with_its_head(tmp_path: Path) -> None:
    run = a_run(tmp_path, [])
    assert refused(run, "train.train_iters=200").startswith("optimizer.lr_decay_iters: ")
    append_event(run, Event.CHECKPOINT_SAVED, iteration="7")  # of a host that writes something else
    found = continuation(run, [], lambda *_: None)
    assert found.notes == ("continues from what is in runs/t-1/checkpoints",)
    # The nodes that are left have its checkpoints.
    found = continuation(run, [], lambda *_: None, newest={"runs/t-1/checkpoints": 40}.get)
    assert found.notes[0] == "continues after iteration 40 of 100 at the latest, with learning rate 0.000661"
    with pytest.raises(TridockError, match="has come to its end; got 100 iterations"):
        continuation(run, [], lambda *_: None, newest=lambda _: 100)


def test_what_cannot_be_continued(tmp_path: Path) -> None:
    run = a_run(tmp_path, [], **{"train.save": False})
    assert refused(run).startswith(f"{run}: has saved no checkpoint; got train.save: false; ")
    moved = tmp_path / "elsewhere"
    a_run(tmp_path / "m", [3]).rename(moved)
    assert refused(moved).startswith(f"{moved}: is not in a folder runs/; ")
    assert refused(tmp_path / "none").startswith(f"{tmp_path}/none: ")
    (run / "experiment.yaml").write_text("name: t\nengine: command\ncommand: [python, t.py]\n")
    assert refused(run) == (
        f"{run}: is a run of your own program on a cluster; give --hosts: it continues there, in its folder"
    )


CORE = {"engine": "megatron-core", "model.num_layers": 4, "parallel": {"pipeline_model_parallel_size": 2}}
NEEDS = ": the layout that it had needs other slots"


@pytest.mark.parametrize(
    ("fields", "slots", "changes", "note"),
    [
        (CORE, "a slots=1", [], f"TP1 PP1 DP1 on 1 of 1 slot (a){NEEDS}"),
        (CORE, "a slots=1\nb slots=1\nc slots=1", [], f"TP1 PP2 DP1 on 2 of 3 slots (a, b){NEEDS}"),
        (CORE, "a slots=2", [], ""),
        (CORE, "a slots=1", ["parallel.pipeline_model_parallel_size=2"], ""),
        (CORE, "a slots=1", ["parallel={tensor_model_parallel_size: 2}"], ""),
        ({"batch.global_batch_size": 8}, "a slots=3", [], f"TP1 PP1 DP2 on 2 of 3 slots (a){NEEDS}"),
        ({"batch.global_batch_size": 8}, "a slots=3", ["batch.global_batch_size=6"], ""),
        # What is wrong is the change.
        (CORE, "a slots=2", ["batch.global_batch_size=3"], ""),
        (CORE, "a slots=1", ["batch.global_batch_size=3"], ""),
    ],
)  # fmt: skip
def test_on_slots_that_its_layout_does_not_allow_it_has_another(
    tmp_path: Path, fields: dict[str, Any], slots: str, changes: list[str], note: str
) -> None:
    run = a_run(tmp_path, [20], **fields)
    (tmp_path / "lab").write_text(f"{slots}\n")
    cluster = load_cluster(tmp_path / "lab")
    found = continuation(run, changes, lambda *_: None)
    taken, continued = on_slots(cluster, found, changes)
    if not note:
        assert (taken, continued) == (cluster, found)
        return
    assert continued.notes == (note, *found.notes)
    plan = assess(load_experiment(continued.config, continued.overrides), taken.slots, "t").checked()
    assert str(plan.layout) in note
    assert plan.world_size == int(note.split()[4])
    assert list(taken.slots) == note.partition("(")[2].partition(")")[0].split(", ")


def test_megatron_v115_resumes_on_no_other_layout(tmp_path: Path) -> None:
    run = a_run(tmp_path, [20], **V115, **{"parallel.pipeline_model_parallel_size": 2})
    (tmp_path / "lab").write_text("a slots=1\n")
    cluster, found = load_cluster(tmp_path / "lab"), continuation(run, [], lambda *_: None)
    assert on_slots(cluster, found, []) == (cluster, found)


def test_a_program_continues_on_the_nodes_that_have_its_files(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("node-1 slots=1\nnode-2 slots=1\nnode-3 slots=1\n")
    (tmp_path / "code").mkdir()
    experiment = CommandExperiment(name="t", engine="command", command=("torchrun", "t.py"), code="code")
    prepared = prepare_command(experiment, tmp_path, {"node-1": [0], "node-2": [0]}, Ssh(), "t-20260102-030405-0001")
    bundle = make_bundle(prepared, Ssh())
    run = tmp_path / "runs" / bundle.run_id
    run.mkdir(parents=True)
    hosts = Hosts(load_cluster(tmp_path / "lab"))
    with pytest.raises(TridockError, match=f"{run}/supervision.json: is missing or damaged; "):
        nodes_of_program(hosts, run)
    (run / "supervision.json").write_bytes(bundle.files["supervision.json"])
    assert nodes_of_program(Hosts(load_cluster(tmp_path / "lab").first(2, None)), run).head == "node-1"
    with pytest.raises(TridockError) as caught:
        nodes_of_program(hosts, run)
    assert str(caught.value) == (
        f"{run.name}: continues on the nodes that have its files, node-1, node-2; got node-1, node-2, node-3; choose "
        f"these with --hosts, --include and --nodes; or begin anew: tridock run --config {run}/experiment.yaml "
        f"--workdir {run}/code"
    )


def test_what_a_host_may_have_written_is_confirmed(tmp_path: Path) -> None:
    run, asked = a_run(tmp_path, [3], env={"NCCL_DEBUG": "INFO"}), []
    continuation(run, [], lambda _, effects: asked.extend(effects))
    assert asked == ["set env.NCCL_DEBUG: INFO"]
    hostile = a_run(tmp_path / "h", [3], env={"LD_PRELOAD": "x.so"})
    assert "would change which code runs" in refused(hostile)


def test_options_of_the_other_way_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path, [3])
    assert main(["resume", str(run), "--queue", "--no-check", "--dry-run"]) == 2
    assert capsys.readouterr().err == (
        f"{run}: continues here, without a cluster; got --queue, --no-check, --dry-run; give --hosts\n"
    )
    (tmp_path / "lab").write_text("node-1 slots=1\n")
    assert main(["resume", "--hosts", str(tmp_path / "lab"), "--nproc", "0"]) == 2
    assert capsys.readouterr().err == "--nproc: is for this machine; got 0; give --nodes or --slots\n"


@pytest.mark.parametrize(
    ("lost", "hint"), [("a", "; or continue an engine's run without it: --exclude a"), ("a b", ""), ("", "")]
)
def test_a_host_that_does_not_answer_may_be_left_out(tmp_path: Path, lost: str, hint: str) -> None:
    (tmp_path / "pair").write_text("a slots=1\nb slots=1\n")
    problems = [
        Problem(node, f"does not answer ssh at {node} port 22", "No route to host", "see") for node in lost.split()
    ]
    problems += [Problem("b", "its node is not running", "", "see")] if len(problems) < 2 else []
    with (
        pytest.raises(ClusterError) as caught,
        _or_without(Hosts(load_cluster(tmp_path / "pair", project_folder=tmp_path))),
    ):
        raise ClusterError(problems)
    first = f"a: does not answer ssh at a port 22; got No route to host; see{hint}"
    assert str(caught.value).splitlines()[0] == (first if lost else "b: its node is not running; see")
