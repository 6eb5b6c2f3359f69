"""A run on two Docker hosts, from its launch to its folder at home, and one that continues meanwhile."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from tests.integration.rack import UID, USER, WORKDIR, Up
from tests.integration.rack_runs import (
    HOSTS,
    NODE,
    RUNS,
    SLEEP,
    Finished,
    PausedRun,
    every_node_reaches_every_node,
    lives,
    metrics,
    run_id_of,
    secret_lines,
    sleeping,
    state_of,
    tiny,
)
from tests.integration.support import wait_until
from tests.patience import STEP_S, WORK_S
from tridock.ops.runs.provenance import operator

# ---- a run, from launch to its folder at home ----------------------------------------------------


@pytest.fixture(scope="module")
def finished(rack_up: Up) -> Finished:
    """A short run, followed to its end; as it is by default, started by DeepSpeed's launcher."""
    done = rack_up.rack.fab("launch", *tiny(launch__launcher="deepspeed"), "--run-id-file", "finished")
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(run_id_of(rack_up.rack.project / "finished"), done.stdout)


def test_a_launch_follows_the_run_to_its_end(rack_up: Up, finished: Finished) -> None:
    run_id, output = finished.run_id, finished.output
    assert f"run {run_id}: 2 ranks on 2 nodes, TP1 PP1 DP2\nhang limit: 30 s or 3 longest steps " in output
    assert f"run {run_id} is done; its folder is host-a:{RUNS}/{run_id}" in output
    losses = [entry["loss"] for entry in metrics(rack_up.rack, run_id) if "split" not in entry]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.2
    world = rack_up.rack["host-a"].sh(f"grep world_formed {RUNS}/{run_id}/events.jsonl")
    assert json.loads(world)["world_size"] == 2


@pytest.mark.full  # test_slurm.py: its stages on two machines
def test_the_stages_of_megatron_core_run_on_two_hosts(rack_up: Up) -> None:
    rack = rack_up.rack
    stages = {"engine": "megatron-core", "parallel": "{pipeline_model_parallel_size: 2}", "model__num_layers": 2}
    done = rack.fab("launch", *tiny(**stages), "--run-id-file", "stages")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(rack.project / "stages")
    assert f"run {run_id}: 2 ranks on 2 nodes, TP1 PP2 DP1" in done.stdout
    losses = [entry["loss"] for entry in metrics(rack, run_id) if "split" not in entry]
    assert losses[-1] < losses[0] - 0.2


def test_each_rank_logs_where_it_ran(rack_up: Up, finished: Finished) -> None:
    rack, run_id = rack_up.rack, finished.run_id
    logs = {host.name: host.sh(f"cd {RUNS}/{run_id}/logs && ls").split() for host in rack}
    assert logs == {"host-a": ["launcher.log", "rank-0.log"], "host-b": ["rank-1.log"]}
    for rank, host in enumerate(rack):
        shown = rack.fab("logs", "--run", run_id, "--rank", str(rank))
        assert (shown.returncode, shown.stdout) == (0, host.sh(f"cat {RUNS}/{run_id}/logs/rank-{rank}.log"))
    assert "iteration" in rack.fab("logs", "--run", run_id, "--rank", "0").stdout
    unknown = rack.fab("logs", "--run", run_id, "--rank", "2")
    assert (unknown.returncode, unknown.stderr) == (2, "--rank: is not a rank of this run; got 2; use 0 to 1\n")


def test_what_a_run_writes_belongs_to_the_ssh_user(rack_up: Up, finished: Finished) -> None:
    for host in rack_up.rack:
        assert host.sh(f"find {WORKDIR} -printf '%u:%g\n' | sort -u") == f"{USER}:{USER}\n"


def test_fetch_brings_the_folder_home_with_the_logs_of_both_nodes(rack_up: Up, finished: Finished) -> None:
    rack, run_id = rack_up.rack, finished.run_id
    done = rack.fab("fetch", "--run", run_id)
    assert (done.returncode, done.stdout) == (0, f"runs/{run_id}\n")
    home = rack.project / "runs" / run_id
    assert sorted(path.name for path in (home / "logs").iterdir()) == ["launcher.log", "rank-0.log", "rank-1.log"]
    assert (home / "exit_code").read_text() == "0\n"
    assert not (home / "checkpoints").exists()
    manifest = json.loads((home / "manifest.json").read_text())
    assert manifest["image_id"] == rack["host-a"].image_id(rack.image)
    assert manifest["image_manifest"]["flavor"] == "cpu"
    assert rack.fab("fetch", "--run", run_id, "--checkpoints").returncode == 0
    assert (home / "checkpoints" / "latest").exists()


@pytest.mark.full  # test_run.py: the first rank that fails
def test_a_run_that_fails_says_so_with_its_ranks_own_message(rack_up: Up) -> None:
    rack = rack_up.rack
    for host in rack:
        host.sh(f"mkdir -p {WORKDIR}/workspace/data/lost && echo global_step5 > {WORKDIR}/workspace/data/lost/latest")
    done = rack.fab("launch", *tiny(train__load="data/lost"), "--run-id-file", "failed")
    run_id = run_id_of(rack.project / "failed")
    assert done.returncode == 4, done.stdout + done.stderr
    text = "train.load: "
    assert re.fullmatch(
        rf"{run_id}: the run failed; got exit code 2, every rank: {text}.+; "
        f"look at host-a:{RUNS}/{run_id}/logs, or tridock logs --hosts hostfiles/rack --run {run_id} --rank 0",
        next(line for line in done.stderr.splitlines() if ": the run failed; " in line),
    )
    assert done.stderr.splitlines()[-1] == "  rule     own-message (docs/triage.md)"
    again = rack.fab("triage", "--run", run_id)
    assert again.returncode == 0
    assert done.stderr.endswith(again.stdout)  # after the warnings of the launch
    assert text in done.stdout
    assert text in rack.fab("logs", "--run", run_id, "--rank", "0").stdout
    assert state_of(rack, run_id) == "failed"
    assert [host.processes(run_id) for host in rack] == [[], []]
    again = rack.fab("logs", "--run", run_id)
    assert again.returncode == 4


# ---- a run that is paused in its middle, so that all of this happens while it continues ----------


@pytest.fixture(scope="module")
def paused(rack_up: Up) -> Iterator[PausedRun]:
    """A run whose first rank is paused in mid-training: rank 1 waits for it. Its terminal was left with Ctrl-C."""
    rack = rack_up.rack
    arguments = tiny(train__train_iters=160, launch__hang_timeout=0)
    with rack.attached("launch", *arguments, "--run-id-file", "paused") as terminal:
        run_id = run_id_of(rack.project / "paused")
        wait_until(lambda: rack["host-a"].ranks(run_id) != [], "its rank has started")
        # On the host itself: asked from here on a busy machine, the run could be over between two answers.
        rack["host-a"].sh(
            f'timeout {STEP_S} sh -c \'until [ "$(wc -l <"$0")" -ge 2 ]; do sleep 0.02; done 2>/dev/null\' "$1"\n'
            f"kill -STOP {' '.join(map(str, rack['host-a'].ranks(run_id)))}",
            f"{RUNS}/{run_id}/metrics.jsonl",
        )
        assert state_of(rack, run_id) == "running"
        code = terminal.interrupt()
        yield PausedRun(rack, run_id, terminal.text(), code)
    rack.fab("stop", "--run", run_id)


def test_ctrl_c_detaches_and_says_how_to_come_back(paused: PausedRun) -> None:
    assert paused.exit_code == 130, paused.terminal
    assert paused.terminal.endswith(
        f"\ndetached: run {paused.run_id} continues. "
        f"Come back with: fab logs --hosts hostfiles/rack --run {paused.run_id}\n"
        f"Stop it with:   fab stop --hosts hostfiles/rack --run {paused.run_id}\n"
    )
    assert lives(paused)


def test_a_terminal_that_is_killed_does_not_take_the_run_along(paused: PausedRun) -> None:
    with paused.rack.attached("logs") as terminal:
        wait_until(lambda: "iteration" in terminal.text(), "the output comes")
        terminal.process.kill()
        terminal.process.wait()
    assert lives(paused)


def test_no_secret_shows_while_a_run_continues(paused: PausedRun) -> None:
    shown = paused.terminal
    for host in paused.rack:
        shown += host.sh(f"docker inspect {NODE}; docker logs {NODE} 2>&1; ps -eww -o args; cat /var/log/sshd.log")
        shown += host.sh("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
        shown += host.sh(f"find {RUNS} -type f -exec cat {{}} + | tr -cd '[:print:]\\n'")
    assert "AUTHORIZED_KEY=ssh-ed25519" in shown  # the look into the environments did find some
    assert [line for line in secret_lines(paused.rack) if line in shown] == []
    assert "PRIVATE KEY" not in shown


def test_down_refuses_while_a_run_continues(paused: PausedRun) -> None:
    done = paused.rack.fab("down")
    fate = "its node would be removed by tridock down while a run is active"
    got = f"{paused.run_id} (started by {operator()})"
    expected = [f"{name}: {fate}; got {got}; stop the run first: tridock stop" for name in HOSTS]
    assert (done.returncode, done.stderr.splitlines()) == (2, expected)
    assert lives(paused)


def test_rotated_keys_replace_the_old_ones_while_a_run_continues(paused: PausedRun) -> None:
    rack = paused.rack
    script = 'rm -rf /tmp/old && cp -r "$1" /tmp/old && chmod 700 /tmp/old && chown -R trainer /tmp/old'
    rack["host-a"].sh(script, f"{WORKDIR}/secrets/host-a")
    before = set(secret_lines(rack))
    old = "ssh -F /dev/null -i /tmp/old/id_ed25519 -o BatchMode=yes -o IdentitiesOnly=yes -p 2222"
    done = rack.fab("keys", "--rotate")
    assert done.returncode == 0, done.stderr
    assert before.isdisjoint(secret_lines(rack))
    # Each sshd reloads its keys on SIGHUP; until then it has the old ones, or does not listen.
    login = f"docker exec --user {UID}:{UID} {NODE} ssh -o ConnectionAttempts=1"
    reached = [(source, target) for source in HOSTS for target in HOSTS]
    wait_until(
        lambda: all(rack[source].execute(f"{login} {target} true").returncode == 0 for source, target in reached),
        "every node shows its new key",
    )
    every_node_reaches_every_node(rack)
    # The old client key opens nothing, and the old host key is not the one that is shown.
    anyone = f"{old} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null tridock@host-b true"
    refused = rack["host-a"].execute(anyone, user=USER)
    assert (refused.returncode, "Permission denied (publickey)" in refused.stderr) == (255, True), refused.stderr
    pinned = f"{old} -o StrictHostKeyChecking=yes -o UserKnownHostsFile=/tmp/old/known_hosts tridock@host-b true"
    changed = rack["host-a"].execute(pinned, user=USER)
    assert (changed.returncode, "Host key verification failed" in changed.stderr) == (255, True), changed.stderr
    rack["host-a"].sh("rm -rf /tmp/old")
    assert lives(paused)


@pytest.mark.full  # test_faults.py: a neighbour
def test_stopping_one_of_two_runs_leaves_the_other_alone(paused: PausedRun) -> None:
    rack = paused.rack
    asked = sleeping("second")
    taken = rack.fab(*asked, *SLEEP)
    assert taken.returncode == 2
    see = f"--queue; tridock logs --hosts hostfiles/rack --run {paused.run_id}"
    assert re.sub(r", until about .*? UTC \(iteration \d+ of \d+\)", "", taken.stderr) == (
        f"{paused.run_id}: is running on slots that this run would use; got host-a: 0, host-b: 0, "
        f"started by {operator()}; wait for it ({see}), "
        "stop it (tridock stop), leave its slots out (--exclude), or give --share\n"
    )
    # It starts with the keys that were rotated in a moment ago.
    done = rack.fab(*asked, "--share", *SLEEP)
    assert done.returncode == 0, done.stderr
    second = run_id_of(rack.project / "second")
    assert done.stdout.splitlines()[-2:] == [
        f"Come back with: fab logs --hosts hostfiles/rack --run {second}",
        f"Stop it with:   fab stop --hosts hostfiles/rack --run {second}",
    ]
    wait_until(lambda: all(host.processes(second, "^sleep ") for host in rack), "the second run runs")
    assert {state_of(rack, paused.run_id), state_of(rack, second)} == {"running"}
    unclear = rack.fab("stop")
    listed = f"{paused.run_id}, {second}"
    assert (unclear.returncode, unclear.stderr) == (
        2,
        f"--run: is required because several runs are active; got {listed}; name one of them\n",
    )
    before = {host.name: set(host.processes(paused.run_id)) for host in rack}
    assert all(before.values())

    stopped = rack.fab("stop", "--run", second)
    assert (stopped.returncode, stopped.stdout) == (0, f"stopped {second} on host-a, host-b\n"), stopped.stderr
    assert [host.processes(second) for host in rack] == [[], []]
    assert {host.name: set(host.processes(paused.run_id)) for host in rack} == before
    assert (state_of(rack, paused.run_id), state_of(rack, second)) == ("running", "stopped")
    shown = rack.fab("logs", "--run", second)
    assert (shown.returncode, shown.stderr) == (
        4,
        f"{second}: the run was stopped; its folder is host-a:{RUNS}/{second}\n",
    )


def test_logs_come_back_to_the_run_and_end_with_its_exit_code(paused: PausedRun) -> None:
    with paused.rack.attached("logs") as terminal:
        wait_until(lambda: "iteration" in terminal.text(), "the output comes")
        paused.release()
        assert terminal.process.wait(timeout=WORK_S) == 0, terminal.text()
    losses = [entry for entry in metrics(paused.rack, paused.run_id) if "split" not in entry]
    assert len(losses) == 160
    assert state_of(paused.rack, paused.run_id) == "done"
