"""What the README promises a new user, in a clean clone: the demo, with an engine and without."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clone import Clone, a_clone
from tests.integration.support import execute, succeed
from tests.patience import STEP_S

NO_ENGINE = {"DOCKER_HOST": "unix:///nowhere/docker.sock"}


@pytest.fixture(scope="module")
def clone(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    with a_clone(tmp_path_factory.mktemp("clone")) as made:
        yield made


# ---- nothing is touched --------------------------------------------------------------------------


def test_a_dry_run_writes_nothing_and_asks_no_program_for_a_host(clone: Clone, tmp_path: Path) -> None:
    for name in ("ssh", "docker"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/$(basename $0)-was-called\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    lab = tmp_path / "lab"
    lab.write_text("gpu-1.invalid slots=2\ngpu-2.invalid slots=2\n")
    before = clone.files()
    for hosts in (str(lab), "hostfiles/twin"):
        line = f"PATH={tmp_path}:$PATH fab launch --hosts {hosts} --config configs/demo.yaml --dry-run"
        shown = clone.succeed(line)
        assert "# on the head, in /workspace/runs/demo-" in shown
        assert "deepspeed --hostfile" in shown
    assert clone.files() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docker", "lab", "ssh"]
    assert execute("docker", "ps", "--all", "--quiet", "--filter", f"name={clone.name}").stdout == ""


# ---- the demo ------------------------------------------------------------------------------------


def check_result(clone: Clone, output: str) -> Path:
    """The table, the curve and the run's folder that the demo ends with."""
    folder = clone.folder / re.findall(r"^run folder +(\S+)$", output, re.MULTILINE)[-1]
    rows = dict(re.findall(r"^│ (\S.*?) +│ (.*?) +│$", output, re.MULTILINE))
    assert rows["state"] == "finished"
    assert (rows["nodes"], rows["ranks"]) == (str(len({*ranks(folder)})), "4")
    assert rows["layout"].startswith("TP2 PP2 DP1")
    assert float(rows["last loss"]) < float(rows["first loss"]) - 1
    assert float(rows["tokens/s (median)"].replace(",", "")) > 0
    assert f"loss curve  {folder.relative_to(clone.folder)}/loss.png\n" in output
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (folder / "loss.png").stat().st_size > 10_000
    assert re.search(r"^finished in \d+ s$", output, re.MULTILINE)

    names = ["experiment.yaml", "plan.json", "manifest.json", "hostfile", "launch.sh"]
    names += ["deepspeed_env"] if rows["nodes"] == "2" else []
    names += ["events.jsonl", "metrics.jsonl", "exit_code", "logs/launcher.log"]
    names += [f"logs/rank-{rank}.log" for rank in range(4)]
    assert [name for name in names if not (folder / name).exists()] == []
    assert list((folder / "tensorboard").iterdir())
    assert (folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()
    assert (folder / "exit_code").read_text() == "0\n"
    commit = succeed("git", "rev-parse", "HEAD", cwd=clone.folder).strip()
    assert json.loads((folder / "manifest.json").read_text())["git_commit"] == commit
    return folder


def ranks(folder: Path) -> list[str]:
    return [rank["node"] for rank in json.loads((folder / "plan.json").read_text())["ranks"]]


@pytest.fixture(scope="module")
def demo(clone: Clone) -> str:
    """The output of `make demo` on two containers."""
    return clone.succeed("make demo")


def test_the_demo_trains_on_two_containers(clone: Clone, demo: str) -> None:
    folder = check_result(clone, demo)
    assert ranks(folder) == ["node-1", "node-1", "node-2", "node-2"]
    assert re.search(
        r"^engine: (Megatron-LM v1.1.5, which the image has$|megatron-core, because the image is )", demo, re.M
    )
    steps = [line for line in demo.splitlines() if line.startswith("== ")]
    assert [step.split(":")[0] for step in steps] == ["== image", "== data", "== run", "== result", "== sample"]
    sample = demo.partition("\n== sample: ")[2].splitlines()[1]
    assert sample.startswith("def ")
    assert len(sample) > len("def ")
    assert re.search(r"iteration +30", demo)  # progress is visible
    owners = {path.stat().st_uid for path in (folder, *folder.rglob("*"))}
    assert owners == {clone.folder.stat().st_uid}


def test_the_twin_is_still_up_as_the_demo_says(clone: Clone, demo: str) -> None:
    assert "The twin is still up: fab status --hosts hostfiles/twin; fab down --hosts hostfiles/twin" in demo
    shown = clone.succeed("fab status --hosts hostfiles/twin")
    assert re.search(r"│ node-1 +│ 2 +│ running ", shown)
    assert re.search(r"│ demo-3d-\S+ +│ 2 +│ done +│ 60/60 ", shown)
    again = clone.succeed("fab logs --hosts hostfiles/twin")
    assert "is done; its folder is " in again


@pytest.mark.full  # test_doctor.py: hosts
def test_the_doctor_finds_the_twin_fit(clone: Clone, demo: str) -> None:
    report = json.loads(clone.succeed("fab check --hosts hostfiles/twin --config configs/demo.yaml --json"))
    assert [finding for finding in report["findings"] if finding["severity"] == "fail"] == []
    assert report["seen"]["space"].endswith("; /workspace/runs is shared by all")
    assert report["seen"]["all-reduce"].startswith("4 ranks, Gloo, 8 MB: ")


def test_a_port_in_a_node_of_the_twin_is_reached_from_here(clone: Clone, demo: str) -> None:
    """In a network of its own, where the program listens on loopback alone."""
    serve = "cd /tmp && echo here >page && setsid tridock-python -m http.server 8123 --bind 127.0.0.1"
    tridock = "python -m tridock.cli"
    clone.succeed(f"{tridock} exec --hosts hostfiles/twin node-1 -- sh -c '{serve} >/dev/null 2>&1 </dev/null &'")
    said = clone.succeed(f"""
        until {tridock} exec --hosts hostfiles/twin node-1 -- bash -c '</dev/tcp/localhost/8123'; do sleep 1; done
        timeout {STEP_S} {tridock} forward --hosts hostfiles/twin node-1 8123 0 >forward &
        until grep -q http forward; do sleep 0.2; done
        curl --silent --max-time {STEP_S} $(grep -o 'http://[0-9.:]*' forward)/page
        kill $!""")
    assert said == "here\n"


@pytest.mark.full  # test_readme.py has the same command
def test_one_container_runs_the_script_as_the_readme_says(clone: Clone, demo: str) -> None:
    (clone.folder / "probe").write_text("")
    run = "docker compose run --rm -T trainer"
    short = "--set train.train_iters=4 --set train.eval_interval=0 --set optimizer.lr_warmup_iters=2"
    before = {path.name for path in (clone.folder / "runs").iterdir()}
    clone.succeed(f"{run} ds_pretrain_gpt2.sh {short} --set model.num_layers=1 --set model.hidden_size=64 </dev/null")
    (new,) = {path.name for path in (clone.folder / "runs").iterdir()} - before
    assert (clone.folder / "runs" / new / "exit_code").read_text() == "0\n"
    assert clone.succeed(f"{run} ls probe </dev/null") == "probe\n"
    assert clone.succeed(f"{run} id -u </dev/null").strip() == str(clone.folder.stat().st_uid)


CONTINUED = {
    "fsdp": "configs/demo.yaml --nproc 2 --set parallel.strategy=fsdp --set parallel.zero_stage=0",
    "megatron-core": "configs/demo-3d.yaml --nproc 2 --set engine=megatron-core"
    " --set parallel.tensor_model_parallel_size=1",
}


@pytest.mark.full  # tests/distributed/test_checkpoints.py, with .venv's Python
@pytest.mark.parametrize("case", CONTINUED)
def test_a_run_continues_from_a_checkpoint_with_the_images_python(clone: Clone, demo: str, case: str) -> None:
    """It is not the Python of most other tests, and pickles in its own way."""
    train = f"docker compose run --rm -T trainer tridock train {CONTINUED[case]} --run-id-file .cache/run"
    train += " --set model.hidden_size=64 --set train.eval_interval=0 --set train.log_interval=1"
    train += " --set optimizer.lr_warmup_iters=2 --set optimizer.lr_decay_iters=6 --set train.save_interval=4"

    def run(more: str) -> tuple[str, list[int]]:
        clone.succeed(f"{train} {more} </dev/null")
        run_id = (clone.folder / ".cache" / "run").read_text().strip()
        lines = (clone.folder / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
        return run_id, [record["iteration"] for record in map(json.loads, lines) if "split" not in record]

    (clone.folder / ".cache").mkdir(exist_ok=True)
    first, iterations = run("--set train.train_iters=4")
    assert iterations == [1, 2, 3, 4]
    assert run(f"--set train.train_iters=6 --set train.load=runs/{first}/checkpoints")[1] == [5, 6]


def test_down_leaves_runs_and_data(clone: Clone, demo: str) -> None:
    clone.succeed("fab down --hosts hostfiles/twin")
    assert execute("docker", "ps", "--all", "--quiet", "--filter", f"name={clone.twin}-node").stdout == ""
    assert (clone.folder / "data" / "demo" / "stdlib_text_document.bin").is_file()
    assert list((clone.folder / "runs").iterdir())


@pytest.mark.full  # tests/distributed/test_processes.py: local ranks
def test_the_demo_without_an_engine_says_so_and_runs_local_ranks(clone: Clone) -> None:
    output = clone.succeed("make demo", **NO_ENGINE)
    said = "No Docker engine answers here: the same experiment runs as local ranks in .venv, without ssh."
    assert output.splitlines().count(said) == 1
    folder = check_result(clone, output)
    assert len({*ranks(folder)}) == 1
    assert "The twin is still up" not in output
