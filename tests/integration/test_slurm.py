"""A real Slurm: the same experiments as jobs over two nodes, their end, their time limit, a node that fails."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.slurm_cluster import SHARED, Job, SlurmCluster
from tests.integration.support import execute, succeed
from tests.patience import WORK_S

TWO = ("--nodes", "2")
CORE = (
    *("engine=megatron-core", "batch.global_batch_size=8"),
    *("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"),
)


def changed(*fields: str) -> tuple[str, ...]:
    return tuple(word for field in fields for word in ("--set", field))


CASES: dict[str, tuple[str, ...]] = {
    "torchrun": ("--launcher", "torchrun", *changed("name=torchrun")),
    "deepspeed": ("--launcher", "deepspeed", *changed("name=deepspeed")),
    "deepspeed-slurm": ("--launcher", "deepspeed-slurm", *changed("name=deepspeed-slurm")),
    "deepspeed-pdsh": ("--launcher", "deepspeed-pdsh", *changed("name=deepspeed-pdsh")),
    "srun": ("--launcher", "srun", "--gpus-per-node", "2", *changed("name=srun", *CORE)),
}
# Of DeepSpeed's own ways over Slurm `make test` leaves out two.
FULL = ("deepspeed-slurm", "deepspeed-pdsh")
PARAMETERS = [pytest.param(case, marks=pytest.mark.full) if case in FULL else case for case in CASES]
LONG = changed(
    "train.train_iters=1000000", "train.log_interval=50", "train.save_interval=100", "train.keep_checkpoints=2"
)


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, slurm_cluster: SlurmCluster) -> dict[str, Job]:
    """A job of every way to start ranks, to its end; each starts when the ranks of the one before have met."""
    jobs = {}
    full = any(f"[{FULL[0]}]" in item.name for item in request.session.items)
    for name, arguments in CASES.items():
        if name in FULL and not full:
            continue
        job = jobs[name] = slurm_cluster.submit(*TWO, *arguments)
        slurm_cluster.until(
            lambda job=job: slurm_cluster.events(job, "world_formed") or slurm_cluster.has_ended(job), "ranks meet", job
        )
    for job in jobs.values():
        slurm_cluster.wait(job)
    return jobs


@pytest.fixture(autouse=True)
def _empty_queue(slurm_cluster: SlurmCluster) -> Iterator[None]:
    yield
    slurm_cluster.clear()


# ---- ways to start ranks ----


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_job_trains_over_two_nodes(slurm_cluster: SlurmCluster, jobs: dict[str, Job], case: str) -> None:
    job, ranks = jobs[case], 4 if case == "srun" else 2
    assert slurm_cluster.read(job, "exit_code") == "0\n", slurm_cluster.read(job, f"logs/slurm-{job.id}.out")[-4000:]
    losses = slurm_cluster.losses(job)
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    (world,) = slurm_cluster.events(job, "world_formed")
    assert world["world_size"] == ranks
    nodes = [line.split()[0] for line in slurm_cluster.read(job, "hostfile").splitlines()]
    assert len(nodes) == 2
    plan = json.loads(slurm_cluster.read(job, "plan.json"))
    assert [rank["node"] for rank in plan["ranks"]] == sorted(nodes * (ranks // 2))
    logs = slurm_cluster.succeed(f"ls {job.folder}/logs").split()
    assert {f"rank-{rank}.log" for rank in range(ranks)} <= set(logs)
    manifest = json.loads(slurm_cluster.read(job, "manifest.json"))
    assert manifest["slurm"]["job"] == job.id
    output = slurm_cluster.read(job, f"logs/slurm-{job.id}.out")
    assert "iteration 12/12" in output
    assert output.count("test loss after iteration 12") == 1


def test_ranks_are_on_the_nodes_that_the_plan_says(slurm_cluster: SlurmCluster, jobs: dict[str, Job]) -> None:
    launch = slurm_cluster.read(jobs["srun"], "launch.sh")
    assert f"--run-folder {jobs['srun'].folder}\n" in launch
    assert "--distribution=block" in launch
    supervision = json.loads(slurm_cluster.read(jobs["srun"], "supervision.json"))
    (first, second) = supervision["ranks"]
    assert supervision["ranks"] == {first: [0, 1], second: [2, 3]}
    assert supervision["remote"] == [second]


def test_the_losses_are_the_same_however_the_ranks_start(slurm_cluster: SlurmCluster, jobs: dict[str, Job]) -> None:
    losses = [slurm_cluster.losses(job) for case, job in jobs.items() if case != "srun"]
    assert len(losses) > 1
    assert all(found == losses[0] for found in losses)


def test_jobs_on_the_same_nodes_meet_at_ports_of_their_own(jobs: dict[str, Job], slurm_cluster: SlurmCluster) -> None:
    ports = [json.loads(slurm_cluster.read(job, "supervision.json"))["master_port"] for job in jobs.values()]
    assert ports == [20000 + int(job.id) % 10000 for job in jobs.values()]
    assert len(set(ports)) == len(ports)


def test_status_names_every_run(slurm_cluster: SlurmCluster, jobs: dict[str, Job]) -> None:
    shown = slurm_cluster.succeed("tridock slurm status")
    for job in jobs.values():
        name = re.escape(Path(job.folder).name)
        assert re.search(rf"{name} +│ {job.id} +│ done +│ +│ +│ 12/12 ", shown), shown


@pytest.mark.optional
def test_megatron_v115_over_two_nodes(slurm_cluster: SlurmCluster) -> None:
    if slurm_cluster.execute("test -e /opt/megatron-v1.1.5/pretrain_gpt2.py").returncode:
        pytest.skip("Megatron-LM v1.1.5 is not in the image: name its source in TRIDOCK_MEGATRON")
    slurm_cluster.succeed("tridock data demo")
    config = "/opt/tridock/configs/megatron/tiny-345m-3d.yaml"
    arguments = ("--launcher", "srun", "--gpus-per-node", "2", "--set", "train.train_iters=12", "--set", "name=v115")
    job = slurm_cluster.submit(*TWO, *arguments, config=config)
    assert slurm_cluster.wait(job) == 0, slurm_cluster.read(job, f"logs/slurm-{job.id}.out")[-4000:]
    losses = slurm_cluster.losses(job)
    assert losses[-1] < losses[0]


# ---- other ways to begin ----


@pytest.mark.full  # as docs/guides/slurm.md
def test_an_allocation_starts_a_run_at_once(slurm_cluster: SlurmCluster) -> None:
    """salloc's shell is at the login node: the supervisor too, and every node is watched from there."""
    run = "tridock slurm run tiny.yaml --profile site.yaml --set name=inside"
    out = slurm_cluster.succeed(f"salloc --quiet --nodes=2 --ntasks-per-node=1 --cpus-per-task=2 {run}")
    found = re.match(r"run (\S+); folder (/shared/runs/\1)\n", out)
    assert found, out
    job = Job("", found[2])
    assert "iteration 12/12" in out
    assert slurm_cluster.read(job, "exit_code") == "0\n"
    assert len(json.loads(slurm_cluster.read(job, "supervision.json"))["remote"]) == 2
    assert slurm_cluster.execute("squeue --noheader").stdout == ""


@pytest.mark.full  # `submit` gives the same script to sbatch
def test_a_script_that_a_person_gives_to_sbatch(slurm_cluster: SlurmCluster) -> None:
    slurm_cluster.succeed("tridock slurm render tiny.yaml --profile site.yaml --set name=byhand >byhand.sh")
    job_id = slurm_cluster.succeed("sbatch --parsable --wait byhand.sh").strip()
    (folder,) = slurm_cluster.succeed("ls -d runs/byhand-*").split()
    job = Job(job_id, f"{SHARED}/{folder}")
    assert slurm_cluster.read(job, "exit_code") == "0\n"
    assert len(slurm_cluster.losses(job)) == 12
    assert "name: byhand\n" in slurm_cluster.read(job, "experiment.yaml")


@pytest.mark.full  # as docs/guides/slurm.md
def test_a_sweep_is_an_array(slurm_cluster: SlurmCluster) -> None:
    text = "--sweep optimizer.lr=1e-2,1e-3 --array-tasks 2 --set name=sweep"
    out = slurm_cluster.succeed(f"tridock slurm submit tiny.yaml --profile site.yaml {text}")
    first, *runs = out.splitlines()
    job_id = first.removeprefix("job ")
    both = [Job(f"{job_id}_{number}", line.split(" folder ")[1]) for number, line in enumerate(runs)]
    assert [slurm_cluster.wait(job) for job in both] == [0, 0]
    rates = [
        max(record["lr"] for record in slurm_cluster.lines(job, "metrics.jsonl") if "lr" in record) for job in both
    ]
    assert rates == [1e-2, 1e-3]


# ---- the end ----


@pytest.mark.full  # tests/unit/ops/slurm/test_jobs.py
def test_cancel_ends_a_run_and_saves_nothing(slurm_cluster: SlurmCluster) -> None:
    job = slurm_cluster.submit(*TWO, *LONG, "--set", "name=cancelled", "--set", "train.save_interval=0")
    slurm_cluster.until(lambda: slurm_cluster.losses(job), "the run trains", job)
    shown = slurm_cluster.succeed("tridock slurm status --json")
    (row,) = (row for row in json.loads(shown)["runs"] if row["job"] == job.id)
    assert (row["state"], row["nodes"]) == ("running", "n[1-2]")
    assert slurm_cluster.ranks(job, "n1")
    out = slurm_cluster.succeed(f"tridock slurm cancel {job.id}")
    assert out == f"cancelled job {job.id}, run {Path(job.folder).name}\n"
    assert slurm_cluster.wait(job) == 143
    assert slurm_cluster.ranks(job, "n1") == slurm_cluster.ranks(job, "n2") == []
    assert slurm_cluster.events(job, "checkpoint_saved") == []


@pytest.mark.full  # a rank that dies: tests/distributed/test_restart.py; a restart of a job: the next two
def test_a_rank_that_dies_on_another_node_is_named_and_the_run_continues(slurm_cluster: SlurmCluster) -> None:
    arguments = changed("name=killed", "restart.max=1", "train.train_iters=600", "launch.hang_timeout=0")
    job = slurm_cluster.submit(*TWO, *LONG, *arguments)
    # Stopped in its node: asked from here, the run could be over between two answers.
    past = '[ "$phase" = train ] && [ "$iteration" -gt 200 ]'
    beat = f"read -r victim _ _ iteration phase _ <{job.folder}/.heartbeat/rank-1"
    stop = f"until {beat} && {past}; do sleep 0.02; done 2>/dev/null; kill -STOP $victim; echo $victim"
    victim = slurm_cluster.succeed(f"timeout {WORK_S} bash -c {shlex.quote(stop)}", machine="n2").strip()
    slurm_cluster.until(lambda: slurm_cluster.events(job, "checkpoint_saved"), "a checkpoint", job)
    slurm_cluster.succeed(f"kill -KILL {victim}", machine="n2")
    slurm_cluster.until(lambda: slurm_cluster.events(job, "run_restarted"), "a restart", job)
    (died,) = slurm_cluster.events(job, "rank_died")
    assert (died["rank"], died["node"]) == (1, "n2")
    assert died["reason"].startswith("was ended by SIGKILL after iteration ")
    assert slurm_cluster.wait(job) == 0
    assert slurm_cluster.lines(job, "metrics.jsonl")[-1]["iteration"] == 600


@pytest.mark.full  # tests/distributed/test_checkpoints.py: a scheduler's signal; tests/unit/ops/slurm/test_supervise.py
def test_a_run_whose_time_is_over_saves_is_queued_again_and_continues(slurm_cluster: SlurmCluster) -> None:
    # Slurm counts in minutes, and its word may come one early.
    job = slurm_cluster.submit(*TWO, *LONG, "--set", "name=slow", "--time", "2", "--signal-lead", "30")
    slurm_cluster.until(lambda: slurm_cluster.losses(job), "the run trains", job)
    with slurm_cluster.slowed("n1", "n2"):
        slurm_cluster.until(lambda: slurm_cluster.events(job, "run_preempted"), "its time is over", job)
    slurm_cluster.until(lambda: slurm_cluster.events(job, "job_requeued"), "the job is queued again", job)
    # Its second start must not come to its time's end too before this test has looked at it.
    longer = ("scontrol", "update", f"jobid={job.id}", "timelimit=30")
    change = ("docker", "exec", slurm_cluster.container("login"), *longer)
    slurm_cluster.until(lambda: execute(*change).returncode == 0, "it has more time", job)
    saved, requeued = (slurm_cluster.events(job, name)[0] for name in ("run_preempted", "job_requeued"))
    assert requeued["iteration"] == saved["iteration"]
    assert requeued["reason"] == "its time was over, and it has saved"

    def continues() -> bool:
        last = [record["iteration"] for record in slurm_cluster.lines(job, "metrics.jsonl")][-1:]
        return len(slurm_cluster.events(job, "job_started")) > 1 and last > [saved["iteration"] + 100]

    slurm_cluster.until(continues, "the run continues", job)
    iterations = [record["iteration"] for record in slurm_cluster.lines(job, "metrics.jsonl")]
    assert iterations == sorted(set(iterations))
    assert set(range(50, iterations[-1], 50)) <= set(iterations)
    # Slurm's own cancel says no more than SIGTERM does: the run saves once more, and is not queued again.
    slurm_cluster.succeed(f"scancel {job.id}")
    assert slurm_cluster.wait(job) == 85
    assert slurm_cluster.events(job, "job_not_requeued")[-1]["reason"] == "Slurm is ending the job (completing)"


@pytest.mark.full  # a lost node: test_faults.py; a job that is queued again: the one above
@pytest.mark.parametrize("given_up_by", ["tridock", "slurm"])
def test_a_node_that_fails_costs_the_work_since_the_last_checkpoint(
    slurm_cluster: SlurmCluster, given_up_by: str
) -> None:
    """Tridock misses a node after 20 s; Slurm, which here would need 60 s, hears of it at once, or not."""
    job = slurm_cluster.submit(*TWO, *LONG, "--set", f"name=lost-{given_up_by}", "--set", "restart.max=1")
    slurm_cluster.until(lambda: slurm_cluster.events(job, "checkpoint_saved"), "a checkpoint", job)
    container = slurm_cluster.container("n2")
    succeed("docker", "kill", container)
    try:
        if given_up_by == "slurm":
            slurm_cluster.administer("scontrol update nodename=n2 state=down reason=test")
        slurm_cluster.until(lambda: len(slurm_cluster.events(job, "job_started")) > 1, "it starts again", job)
        before, after, *_ = slurm_cluster.events(job, "job_started")
        assert (before["nodes"], after["nodes"]) == (["n1", "n2"], ["n1", "n3"])
        assert slurm_cluster.events(job, "job_not_requeued") == []
        saved = max(event["iteration"] for event in slurm_cluster.events(job, "checkpoint_saved"))
        slurm_cluster.until(
            lambda: max((r["iteration"] for r in slurm_cluster.lines(job, "metrics.jsonl")), default=0) > saved + 100,
            "the run continues", job,
        )  # fmt: skip
        slurm_cluster.succeed(f"tridock slurm cancel {job.id}")
        assert slurm_cluster.wait(job) == 143
    finally:
        execute("docker", "start", container)
        slurm_cluster.wait_until_idle()


# ---- the user's own program ----

PROGRAM = """
import os, signal, sys, time
import torch, torch.distributed as dist
from tridock import heartbeat
dist.init_process_group("gloo")
rank, asked = dist.get_rank(), []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
step = int(open("saved").read()) if "--resume" in sys.argv else 0
print(f"rank {rank} of {dist.get_world_size()} begins after {step}: {open('setup').read()}", end="", flush=True)
while step < int(sys.argv[1]):
    wanted = torch.tensor([float(bool(asked))])
    dist.all_reduce(wanted)
    if wanted.item():
        if rank == 0:
            open("saved", "w").write(str(step))
        dist.barrier()
        sys.exit(0)
    step += 1
    heartbeat.beat(step)
    if rank == 0:
        print(f"step={step} loss={1 / step}", flush=True)
    time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def program(slurm_cluster: SlurmCluster) -> SlurmCluster:
    slurm_cluster.succeed("mkdir mine")
    slurm_cluster.write("mine/train.py", PROGRAM)
    return slurm_cluster


def run_program(cluster: SlurmCluster, options: str, command: str) -> Job:
    fixed = "--slurm site.yaml --nodes 2 --slots 2 --workdir mine --metrics key=value --setup 'echo ready >setup'"
    out = cluster.succeed(f"tridock run {fixed} {options} --detach -- {command}")
    found = re.fullmatch(r"job (\d+)\nrun (\S+); folder (/shared/runs/\2)\n", out)
    assert found, out
    return Job(found[1], found[3])


@pytest.mark.full  # a run whose time is over, above; a program's resume command: test_run.py
def test_a_program_of_ones_own_is_stopped_in_time_requeued_and_continues(program: SlurmCluster) -> None:
    job = run_program(program, "--resume-command 'torchrun train.py 100000 --resume'", "torchrun train.py 100000")
    program.until(lambda: len(program.losses(job)) > 20, "the program trains", job)
    assert {f"rank-{rank}.log" for rank in range(4)} <= set(program.succeed(f"ls {job.folder}/logs").split())
    assert "rank 3 of 4 begins after 0: ready\n" in program.read(job, "logs/rank-3.log")
    program.succeed(f"scancel --batch --signal=USR1 {job.id}")  # as Slurm does before the time limit
    program.until(lambda: len(program.events(job, "job_started")) > 1, "the job is queued again", job)
    requeued = program.events(job, "job_requeued")[0]
    saved = int(program.read(job, "code/saved"))
    assert (requeued["reason"], requeued["iteration"]) == ("its time was over", saved)
    again = f"rank 3 of 4 begins after {saved}: ready\n"
    program.until(lambda: again in program.read(job, "logs/rank-3.log"), "the program continues", job)
    program.until(lambda: program.lines(job, "metrics.jsonl")[-1]["iteration"] > saved, "it trains on", job)
    program.succeed(f"tridock slurm cancel {job.id}")
    assert program.wait(job) == 143
    for node in ("n1", "n2"):
        assert program.execute("pgrep -af 'train[.]py'", machine=node).stdout == ""


@pytest.mark.full  # test_run.py kills one too; a job that starts again: the one above
def test_a_rank_of_ones_own_program_that_dies_is_named_and_the_program_restarts(program: SlurmCluster) -> None:
    job = run_program(program, "--restarts 1", "python train.py 150")
    program.until(lambda: len(program.losses(job)) > 5, "the program trains", job)
    program.succeed("kill -KILL $(pgrep -f '^python train.py' | head -1)", machine="n2")
    program.until(lambda: program.events(job, "run_restarted"), "a restart", job)
    died = program.events(job, "rank_died")[0]
    assert (died["rank"] in (2, 3), died["node"]) == (True, "n2")
    assert died["reason"].startswith("was ended by SIGKILL")
    assert program.wait(job) == 0
    assert program.lines(job, "metrics.jsonl")[-1]["iteration"] == 150


@pytest.mark.full  # test_run.py: on hosts
def test_a_program_of_ones_own_that_fails_says_why(program: SlurmCluster) -> None:
    run = "tridock run --slurm site.yaml --nodes 2 --workdir mine --env DS_ACCELERATOR=cpu"
    done = program.execute(f"{run} -- deepspeed train.py 5")  # no setup: its file is missing
    assert done.returncode == 4
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'setup'" in done.stderr
    done = program.execute(f"{run} -- bash -c 'exit 85'")
    assert done.returncode == 4
    assert "exited with code 85" in done.stderr


@pytest.mark.full
def test_a_program_of_ones_own_runs_again_with_the_code_of_then(program: SlurmCluster) -> None:
    job = run_program(program, "--env WORD=then", "torchrun train.py 20")
    assert program.wait(job) == 0
    program.write("mine/train.py", "raise SystemExit('changed since')")
    try:
        done = program.execute(f"tridock reproduce --yes --run {job.folder}")
    finally:
        program.write("mine/train.py", PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"^run (\S+): repeats {Path(job.folder).name}; folder (/shared/runs/\1)$", done.stdout, re.M)
    assert found, done.stdout
    again = Job("", found[2])
    assert program.losses(again) == program.losses(job) == [1 / step for step in range(1, 21)]
    assert json.loads(program.read(again, "reproduction.json"))["verdict"] == "identical"
    scripts = [program.read(it, "job.sh").replace(Path(it.folder).name, "RUN") for it in (job, again)]
    assert scripts[0] == scripts[1]
    assert [program.execute("pgrep -af 'train[.]py'", machine=node).stdout for node in ("n1", "n2")] == ["", ""]


# ---- what cannot be ----


def test_a_bad_request_has_slurms_message(slurm_cluster: SlurmCluster) -> None:
    before = slurm_cluster.succeed("ls runs 2>/dev/null || true")
    todo = "correct the request; sinfo shows what the cluster has"
    done = slurm_cluster.execute("tridock slurm submit tiny.yaml --profile site.yaml --nodes 4")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"sbatch: Slurm refuses the job; got .*[Nn]ode.*; {todo}\n", done.stderr)
    done = slurm_cluster.execute("tridock slurm submit tiny.yaml --profile site.yaml --partition gpu")
    assert done.returncode == 2
    assert re.fullmatch(rf"sbatch: Slurm refuses the job; got .*invalid partition.*; {todo}\n", done.stderr)
    done = slurm_cluster.execute("tridock slurm submit tiny.yaml --profile site.yaml --time 2:00:00")
    assert done.returncode == 2, done.stdout  # the partition's MaxTime is an hour
    allowed = "is longer than partition debug allows; got 2:00:00; ask for at most 60 minutes"
    assert done.stderr.startswith(f"site.yaml: time: {allowed}")
    slurm_cluster.administer("scontrol update PartitionName=debug MaxNodes=1")
    try:
        done = slurm_cluster.execute("tridock slurm submit tiny.yaml --profile site.yaml --nodes 2")
    finally:
        slurm_cluster.administer("scontrol update PartitionName=debug MaxNodes=UNLIMITED")
    assert done.returncode == 2, done.stdout
    assert "site.yaml: nodes: are more than partition debug gives to a job; got 2; ask for at most 1\n" in done.stderr
    assert slurm_cluster.succeed("ls runs 2>/dev/null || true") == before
    assert slurm_cluster.execute("squeue --noheader").stdout == ""
