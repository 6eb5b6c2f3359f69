"""Two Docker hosts over ssh with disks of their own: runs save, go on in another layout, lose a host, come home."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

import pytest

from tests.integration.rack import CLUSTER, PROGRAMS, USER, Rack, Up, write_data
from tests.integration.rack_runs import RUNS, metrics, run_id_of, state_of, tiny
from tests.integration.support import execute, succeed, wait_until
from tests.patience import WORK_S


def test_the_readmes_launch_saves_goes_on_in_another_layout_and_is_exported(rack_up: Up) -> None:
    rack = rack_up.rack
    fields = ("train_iters=4", "eval_interval=0", "checkpoint_copies=1")
    short = [*(f"--set=train.{it}" for it in fields), "--set=optimizer.lr_warmup_iters=1"]
    done = rack.fab("launch", *short, "--run-id-file", "default")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no --config: configs/demo-3d.yaml with TP1 PP2 DP1" in done.stdout
    run_id = run_id_of(rack.project / "default")
    folder = f"{RUNS}/{run_id}/checkpoints"
    for host in rack:
        assert host.sh(f"cat {folder}/latest_checkpointed_iteration.txt") == "4"
        assert "elsewhere" in json.loads(host.sh(f"cat {folder}/iter_0000004/files.json"))
    # A part is no checkpoint to export; together they are.
    tridock, hosts = str(PROGRAMS / "tridock"), ("--hosts", f"hostfiles/{CLUSTER}")

    def use(*argv: str) -> subprocess.CompletedProcess[str]:
        return execute(tridock, *argv, cwd=rack.project, env=rack.environment())

    done = use("export", f"runs/{run_id}", "--output", "from-local-disks")
    assert (done.returncode, done.stderr) == (
        2,
        f"runs/{run_id}: is not here; give runs/<run-id>, or for a run of a cluster: --hosts HOSTFILE {run_id}\n",
    )
    done = use("export", *hosts, run_id, "--output", "from-local-disks")
    assert done.returncode == 0, done.stderr
    assert f"{run_id}: fetch the checkpoint of iteration 4, " in done.stderr
    here = rack.project / f"runs/{run_id}/checkpoints"
    assert [path.name for path in here.iterdir()] == ["iter_0000004"]
    done = use("generate", *hosts, run_id, "--prompt", "def ", "--max-new-tokens", "5")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("def ")
    assert "; 0 kB are not here yet" in done.stderr
    assert (rack.project / "from-local-disks/model.safetensors").stat().st_size > 1_000_000
    # Those weights go to the hosts, and the data, which are there and not here, stay.
    weights = ("--set=train.load=hf:from-local-disks", *short)
    done = rack.fab("data", *weights)
    assert done.returncode == 0, done.stdout + done.stderr
    size = (rack.project / "from-local-disks/model.safetensors").stat().st_size
    for host in rack:
        assert int(host.sh(f"stat -c %s {RUNS}/../from-local-disks/model.safetensors")) == size
    done = rack.fab("launch", *weights, "--run-id-file", "loaded")
    assert done.returncode == 0, done.stdout + done.stderr
    first, again = (metrics(rack, it)[0]["loss"] for it in (run_id, run_id_of(rack.project / "loaded")))
    assert float(str(again)) < float(str(first))
    done = rack.fab("data", "--set=train.load=hf:nowhere")
    assert done.returncode == 2
    assert "train.load: is neither here nor on host-a, host-b; got nowhere" in done.stderr
    # A host alone gets the other one's stage before its rank starts.
    options = ["--set=train.train_iters=6", "--set=optimizer.lr_decay_iters=4"]
    done = rack.fab("resume", "--include", "host-b", "--run", run_id, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of other nodes are needed" not in done.stdout
    assert re.search(f"^runs/{run_id}/checkpoints: iteration 4: \\d+ files, .* of other nodes than", done.stderr, re.M)
    print(f"on one host: {done.stderr}")
    # In another layout each host lacks the other's stage, and gets it from there.
    layout = ("--set=parallel.pipeline_model_parallel_size=1", "--set=parallel.tensor_model_parallel_size=2")
    done = rack.fab("resume", "--run", run_id, *options, *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after iteration 4 of 6 at the latest" in done.stdout
    (needed,) = (line for line in done.stdout.splitlines() if "of other nodes are needed" in line)
    print(f"another layout: {needed}; of {rack['host-a'].sh(f'du -sb {folder}/iter_0000004').split()[0]} bytes there")
    for host in rack:
        assert "elsewhere" not in json.loads(host.sh(f"cat {folder}/iter_0000004/files.json"))
    # Its parts, which are all there is, go from both.
    listed = use("runs", *hosts, "--sizes", "--json")
    (size,) = (run["disk_bytes"] for run in json.loads(listed.stdout)["runs"] if run["run_id"] == run_id)
    assert size >= sum(1024 * int(host.sh(f"du -sk {RUNS}/{run_id}").split()[0]) for host in rack) * 0.9
    done = use("runs", *hosts, "rm", run_id, "--yes")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "removed 1 run"), done.stderr
    for host in rack:
        assert run_id not in host.sh(f"ls {RUNS}").split()


@pytest.mark.full  # the first test exports one that has ended
def test_an_active_run_is_exported_from_its_newest_whole_checkpoint(rack_up: Up) -> None:
    rack = rack_up.rack
    fields = {"parallel": "{strategy: fsdp}", "train__train_iters": 100_000, "train__save_interval": 50}
    done = rack.fab("launch", *tiny(**fields), "--detach", "--run-id-file", "active")
    assert done.returncode == 0, done.stderr
    run_id = run_id_of(rack.project / "active")
    saved = f"cat {RUNS}/{run_id}/checkpoints/iter_0000050/files.json"
    wait_until(lambda: all(host.execute(saved).returncode == 0 for host in rack), "it has saved")
    try:
        argv = (str(PROGRAMS / "tridock"), "export", "--hosts", f"hostfiles/{CLUSTER}", run_id, "-o", "from-active")
        done = execute(*argv, cwd=rack.project, env=rack.environment())
        assert done.returncode == 0, done.stderr
        assert state_of(rack, run_id) == "running"
    finally:
        assert rack.fab("stop", "--run", run_id).returncode == 0
    assert (rack.project / "from-active/model.safetensors").exists()
    assert len([*(rack.project / f"runs/{run_id}/checkpoints").iterdir()]) == 1


@pytest.mark.full  # the first test: what a host alone lacks
def test_a_run_goes_on_where_none_of_its_files_are(rack_up: Up) -> None:
    rack = rack_up.rack
    fields = {"parallel": "{strategy: fsdp}", "train__train_iters": 4}
    done = rack.fab("launch", *tiny(**fields), "--include", "host-a", "--run-id-file", "first")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(rack.project / "first")
    more = ("--set=train.train_iters=6", "--set=optimizer.lr_decay_iters=4")
    done = rack.fab("resume", "--include", "host-b", "--run", run_id, *more, "--run-id-file", "second")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = f"{RUNS}/{run_id_of(rack.project / 'second')}"
    lines = rack["host-b"].sh(f"cat {folder}/metrics.jsonl").splitlines()
    assert [it["iteration"] for it in map(json.loads, lines) if "split" not in it][-1] == 6
    assert "checkpoint_loaded" in rack["host-b"].sh(f"cat {folder}/events.jsonl")


@pytest.mark.full  # tests/distributed/test_local_disks.py: the copies; tests/unit/ops/test_resume.py: without events
def test_the_readmes_launch_continues_without_its_head_from_the_copies(rack_up: Up) -> None:
    """Its two pipeline stages become one."""
    rack = rack_up.rack
    done = rack.fab("launch", "--set=train.train_iters=20", "--run-id-file", "headless")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(rack.project / "headless")
    resume = ("resume", "--run", run_id, "--set=train.train_iters=25", "--set=optimizer.lr_decay_iters=20")
    succeed("docker", "pause", rack["host-a"].container)
    try:
        lost = rack.fab(*resume)
        assert lost.returncode == 3, lost.stderr
        assert lost.stderr.startswith("host-a: does not answer ssh at ")
        assert "; or continue an engine's run without it: --exclude host-a\n" in lost.stderr
        done = rack.fab(*resume, "--exclude", "host-a")
    finally:
        succeed("docker", "unpause", rack["host-a"].container)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  TP1 PP1 DP1 on 1 of 1 slot (host-b): the layout that it had needs other slots\n" in done.stdout
    assert "\n  continues after iteration 20 of 25 at the latest, with learning rate " in done.stdout
    assert "iteration 25/25 | " in done.stdout


LONG = {
    "train__train_iters": 1500, "train__save_interval": 10, "train__keep_checkpoints": 2, "restart__max": 1,
    "restart__node_timeout": 30,
}  # fmt: skip
COPIED = {"parallel": "{strategy: fsdp}", "train__checkpoint_copies": 2}


@dataclass(frozen=True)
class Run:
    """A run whose head is host-a."""

    rack: Rack
    folder: str

    def records(self, name: str) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in self.rack["host-a"].execute(f"cat {self.folder}/{name}").stdout.splitlines()
        ]

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in self.records("events.jsonl") if event["event"] in names]

    def losses(self) -> dict[int, float]:
        return {it["iteration"]: it["loss"] for it in self.records("metrics.jsonl") if "split" not in it}


def launched(rack: Rack, cluster: str, name: str, fields: Mapping[str, object]) -> Run:
    """Launches a run of 1,500 iterations."""
    done = rack.fab(
        *("launch", *tiny(**{**LONG, **fields}), "--detach", "--run-id-file", name), hosts=f"hostfiles/{cluster}"
    )
    assert done.returncode == 0, done.stderr
    return Run(rack, f"{RUNS.replace(CLUSTER, cluster)}/{run_id_of(rack.project / name)}")


@pytest.fixture(scope="module")
def calm(rack_up: Up) -> dict[int, float]:
    """The losses of a run to which nothing happens."""
    rack, fields = rack_up.rack, {"parallel": "{strategy: fsdp}", "train__save_interval": 1500}
    done = rack.fab("launch", *tiny(**{**LONG, **fields}), "--run-id-file", "calm")
    assert done.returncode == 0, done.stdout + done.stderr
    return Run(rack, f"{RUNS}/{run_id_of(rack.project / 'calm')}").losses()


ENGINES = {
    "zero-3": {"parallel": "{strategy: zero, zero_stage: 3}"},
    "megatron-core": {"engine": "megatron-core", "parallel": "{pipeline_model_parallel_size: 2}"},
}


@pytest.mark.full  # tests/distributed/test_restart.py: a killed rank of every engine; test_run.py: on hosts
@pytest.mark.parametrize("engine", ENGINES)
def test_a_killed_rank_changes_no_loss(rack_up: Up, engine: str) -> None:
    rack, fields = rack_up.rack, {**ENGINES[engine], "train__train_iters": 400}
    calm = launched(rack, CLUSTER, f"calm-{engine}", fields)
    wait_until(lambda: bool(calm.events("run_finished")), "the run has ended", WORK_S)
    run = launched(rack, CLUSTER, f"killed-{engine}", fields)
    wait_until(lambda: bool(run.events("checkpoint_saved")), "a checkpoint is complete", WORK_S)
    rack.node("host-b", "pkill", "-KILL", "-f", "tridock.train")
    wait_until(lambda: bool(run.events("run_finished", "not_restarted")), "the run has ended", WORK_S)
    (restarted,) = run.events("run_restarted")
    assert restarted["reason"].startswith("rank 1 on host-b was ended by SIGKILL")
    assert restarted["iteration"] >= 10
    assert run.losses() == calm.losses()


def lose_host_b(
    rack: Rack, cluster: str, name: str, fields: Mapping[str, object], after: str = "checkpoint_copied"
) -> Run:
    """Kills host-b's node after this event of a run, and waits for the run's end. Prints how long it took."""
    run = launched(rack, cluster, name, fields)
    wait_until(lambda: bool(run.events(after)), "a checkpoint is complete")
    rack["host-b"].sh(f"docker kill tridock-{cluster}")
    killed, seconds = datetime.now(UTC), time.monotonic()

    def has_stepped() -> bool:
        loaded = run.events("checkpoint_loaded")
        return bool(loaded) and max(run.losses(), default=0) > loaded[-1]["iteration"]

    wait_until(lambda: has_stepped() or bool(run.events("not_restarted")), "it has stepped or ended", WORK_S)
    print(f"the next step {time.monotonic() - seconds:.1f} s after the node was killed")
    wait_until(lambda: bool(run.events("run_finished", "not_restarted")), "the run has ended", WORK_S)
    for event in ("node_lost", "run_moved", "checkpoint_loaded", "not_restarted"):
        for found in run.events(event)[-1:]:
            after_s = (datetime.fromisoformat(found["time"]) - killed).total_seconds()
            print(f"{event} {after_s:.1f} s after the node was killed")
    return run


def went_on(run: Run, calm: Mapping[int, float], after: str = "checkpoint_copied") -> dict[str, Any]:
    """How a run that trained to its end went on: from the last checkpoint with this event, or from a later one."""
    assert run.events("not_restarted") == []
    # The newest that the head knows may lack what was not copied when the node was lost.
    (loaded,), (restarted,) = run.events("checkpoint_loaded"), run.events("run_restarted")
    until_lost = takewhile(lambda event: event["event"] == after, run.events(after, "run_restarted"))
    *_, last = (event["iteration"] for event in until_lost)
    assert last <= loaded["iteration"] <= restarted["iteration"]
    assert run.events("run_finished")[0]["iteration"] == 1500
    (moved,) = run.events("run_moved")
    # On as many ranks to the last bit; on fewer, sums come in another order.
    same = moved["layout"] == "TP1 PP1 DP2"
    assert run.losses() == (calm if same else pytest.approx(calm, abs=1e-4, rel=0))
    return moved


@pytest.mark.full  # tests/distributed/test_blends.py; a data set on hosts: test_data_on_hosts.py
def test_a_blend_is_checked_on_each_host_brought_there_and_goes_on(rack_up: Up) -> None:
    rack = rack_up.rack
    write_data(rack.project / "data" / "more")
    sets = "[0.7, data/tiny/text_document, 0.3, data/more/text_document]"
    blend = {
        "data": f"{{train_data_path: {sets}, valid_data_path: {{more: data/more/text_document}}}}",
        "train__eval_interval": 2, "train__train_iters": 4, "train__save_interval": 2,
    }  # fmt: skip
    refused = rack.fab("launch", *tiny(**blend))
    assert refused.returncode == 2, refused.stdout
    for name in rack.hosts:
        missing = "data/more/text_document.bin, data/more/text_document.idx"
        assert f"configs/tiny.yaml: data.train_data_path: is not on node {name}; got {missing}; copy" in refused.stderr
    assert "data/tiny" not in refused.stderr
    done = rack.fab("data", *tiny(**blend))
    assert done.returncode == 0, done.stdout + done.stderr
    done = rack.fab("launch", *tiny(**blend), "--run-id-file", "blend")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data:  30.00% data/more/text_document: " in done.stdout
    run_id = run_id_of(rack.project / "blend")
    assert [list(it["losses"]) for it in metrics(rack, run_id) if "split" in it] == [["more"], ["more"]]  # type: ignore[call-overload]
    done = rack.fab("resume", "--run", run_id, "--set", "train.train_iters=6", "--set", "optimizer.lr_decay_iters=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continues after iteration 4 of 6" in done.stdout


@pytest.mark.full  # tests/distributed/test_local_disks.py: with every engine
def test_a_lost_host_costs_no_checkpoint_of_which_there_are_copies(rack_up: Up, calm: dict[int, float]) -> None:
    """What the lost one wrote, the other has a copy of."""
    try:
        moved = went_on(lose_host_b(rack_up.rack, CLUSTER, "copied", COPIED), calm)
    finally:
        assert rack_up.rack.fab("up").returncode == 0
    assert (moved["lost"], moved["layout"]) == (["host-b"], "TP1 PP1 DP1")


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_lost_host_without_copies_costs_what_it_alone_had(rack_up: Up, calm: dict[int, float], strategy: str) -> None:
    """With DDP each host has the whole checkpoint; with FSDP the run ends, and says why."""
    try:
        fields = {"parallel": f"{{strategy: {strategy}}}"}
        run = lose_host_b(rack_up.rack, CLUSTER, strategy, fields, "checkpoint_saved")
    finally:
        assert rack_up.rack.fab("up").returncode == 0
    if strategy == "ddp":
        assert went_on(run, calm, "checkpoint_saved")["layout"] == "TP1 PP1 DP1"
    else:
        assert run.events("not_restarted")
        log = rack_up.rack["host-a"].sh(f"cat {run.folder}/logs/launcher.log")
        assert "is on no node of this run; " in log
        assert "train.checkpoint_copies" in log


@pytest.mark.full  # test_run.py: a killed rank; tests/distributed/test_local_disks.py: a lost host
def test_the_readmes_launch_survives_a_killed_rank_and_a_lost_host(rack_up: Up) -> None:
    rack = rack_up.rack
    done = rack.fab("launch", "--set=train.train_iters=600", "--detach", "--run-id-file", "lasting")
    assert done.returncode == 0, done.stderr
    run = Run(rack, f"{RUNS}/{run_id_of(rack.project / 'lasting')}")
    wait_until(lambda: bool(run.events("checkpoint_copied")), "a checkpoint is copied")
    rack.node("host-b", "pkill", "-KILL", "-f", "tridock.train")

    def saved_again() -> bool:
        names = [event["event"] for event in run.events("run_restarted", "checkpoint_copied")]
        return "run_restarted" in names and names[-1] == "checkpoint_copied"

    wait_until(saved_again, "the run saves again after its restart", WORK_S)
    rack["host-b"].sh(f"docker kill tridock-{CLUSTER}")
    wait_until(lambda: bool(run.events("run_finished", "not_restarted")), "the run has ended", WORK_S)
    killed, lost = run.events("run_restarted")
    assert killed["reason"].startswith("rank 1 on host-b was ended by SIGKILL")
    (moved,) = run.events("run_moved")
    assert (moved["layout"], run.events("run_finished")[0]["iteration"]) == ("TP1 PP1 DP1", 600)
    assert lost["iteration"] >= killed["iteration"] + 20
    losses = run.losses()
    assert losses[600] < losses[5] - 1


@pytest.mark.full  # a third host takes minutes
def test_a_spare_gets_its_part_from_the_copies(rack_up: Up, calm: dict[int, float]) -> None:
    """It has a disk of its own, and none of the run's checkpoints."""
    rack, name = rack_up.rack, "spared"
    rack.add("host-c")
    try:
        rack.write_ssh_config()
        hosts = rack.write_cluster(name, spares=["host-c"], ssh_port=2231)
        for task in (("up",), ("data", "--path", "data/tiny")):
            done = rack.fab(*task, hosts=hosts)
            assert done.returncode == 0, done.stderr
        moved = went_on(lose_host_b(rack, name, name, COPIED), calm)
        assert (moved["nodes"], moved["layout"]) == (["host-a", "host-c"], "TP1 PP1 DP2")
        run_id = run_id_of(rack.project / name)
        checkpoint = f"/home/{USER}/tridock/{name}/workspace/runs/{run_id}/checkpoints/iter_0001500/files.json"
        assert rack["host-c"].execute(f"test -e {checkpoint}").returncode == 0
        done = rack.fab("down", "--force", hosts=hosts)  # the next tests have no use for it
        assert done.returncode == 0, done.stderr
    finally:
        rack.take_away("host-c")
        rack.write_ssh_config()
