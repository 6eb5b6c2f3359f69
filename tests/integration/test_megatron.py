"""Megatron-LM v1.1.5 in the image, as its users start it: one container, two containers, two Docker hosts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.clone import Clone, a_clone
from tests.integration.rack import USER, Rack
from tests.integration.support import execute
from tests.megatron_source import pristine_source

pytestmark = pytest.mark.optional

SPREAD = "configs/megatron/tiny-345m-3d.yaml"


@pytest.fixture(scope="module")
def clone(docker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """A clone whose image bundles Megatron, and whose twin has two slots a node."""
    pristine_source(tmp_path_factory.mktemp("source") / "megatron")
    with a_clone(tmp_path_factory.mktemp("clone")) as made:
        (made.folder / "hostfiles" / "four").write_text("node-1 slots=2\nnode-2 slots=2\n")
        settings = (made.folder / "hostfiles" / "twin.yaml").read_text()
        (made.folder / "hostfiles" / "four.yaml").write_text(settings)
        made.succeed(f"make image FLAVOR=cpu MEGATRON={os.environ['TRIDOCK_MEGATRON']}")
        made.succeed("tridock data demo")
        yield made


def losses(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "split" not in record]


def only_run(clone: Clone, name: str) -> Path:
    (run,) = (clone.folder / "runs").glob(f"{name}-2*")
    return run


@pytest.mark.parametrize(
    ("script", "experiment", "layout"),
    [
        ("ds_pretrain_gpt2.sh", "tiny-345m", "2 ranks on this machine, TP1 PP1 DP2"),
        ("ds_pretrain_gpt2_pipe.sh", "tiny-345m-3d", "4 ranks on this machine, TP2 PP2 DP1"),
        ("pretrain_gpt2_distributed.sh", "tiny-345m-distributed", "2 ranks on this machine, TP1 PP1 DP2"),
    ],
)
def test_one_container_runs_a_script(clone: Clone, script: str, experiment: str, layout: str) -> None:
    shown = clone.succeed(f"docker compose run --rm trainer {script}", TRIDOCK_IMAGE=clone.image)
    assert layout in shown
    run = only_run(clone, experiment)
    found = losses(run)
    assert found[-1] < found[0] - 1.0
    assert (run / "exit_code").read_text() == "0\n"


def test_two_containers_of_a_script_are_one_run(clone: Clone) -> None:
    """Started by hand on each, without ssh and keys, as upstream's users start torch.distributed."""
    name, project = f"{clone.name}-first", f"--project-name {clone.name}-pair"
    text = "--env NNODES=2 --env GPUS_PER_NODE=1 --env MASTER_PORT=6000 --env OMP_NUM_THREADS=1"
    start = f"docker compose {project} run {text}"
    script = "trainer pretrain_gpt2_distributed.sh --set name=pair"
    lines = [
        f"{start} --detach --name {name} --env NODE_RANK=0 --env MASTER_ADDR={name} {script}",
        f"{start} --rm --env NODE_RANK=1 --env MASTER_ADDR={name} {script}",
        f"docker wait {name}",
    ]
    try:
        _, second, code = (clone.succeed(line, TRIDOCK_IMAGE=clone.image) for line in lines)
    finally:
        execute("docker", "rm", "--force", name)
        execute("docker", "network", "rm", f"{clone.name}-pair_default")
    assert code == "0\n"
    run = only_run(clone, "pair")
    assert f"run {run.name}: 2 ranks on 2 nodes, this one is 1, TP1 PP1 DP2" in second
    found = losses(run)
    assert found[-1] < found[0] - 1.0


def test_fab_launch_runs_3d_over_two_containers(clone: Clone) -> None:
    shown = clone.succeed(f"fab launch --hosts hostfiles/four --config {SPREAD} --set name=spread")
    run = only_run(clone, "spread")
    assert f"run {run.name}: 4 ranks on 2 nodes, TP2 PP2 DP1\n" in shown
    assert re.search(r"^node-1: +iteration +60/ +60 ", shown, re.MULTILINE)
    found = losses(run)
    assert found[-1] < found[0] - 1.0
    assert sorted(path.name for path in (run / "logs").iterdir()) == [
        "launcher.log", *(f"rank-{rank}.log" for rank in range(4)),
    ]  # fmt: skip


def test_fab_launch_runs_3d_over_two_docker_hosts(clone: Clone, rack: Rack) -> None:
    """Over ssh, with the image brought by Tridock; beside the rack's other cluster, on a port of its own."""
    hosts = rack.write_cluster("megatron", "host-a slots=2\nhost-b slots=2\n", image=clone.image, ssh_port=2223)
    try:
        execute("cp", "-r", str(clone.folder / "data" / "demo"), str(rack.project / "data"))
        for arguments in (("up",), ("data", "--config", SPREAD)):
            done = rack.fab(*arguments, hosts=hosts)
            assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.splitlines()[-1] == "index maps: 9 files, made on host-a, sent to host-b"
        script = f"cd /home/{USER}/tridock/megatron/workspace/data/demo && "
        digests = [host.sh(script + "sha256sum stdlib*") for host in rack]
        assert digests[0] == digests[1]
        assert digests[0].count("_indexmap_") == 9
        before = [host.sh(script + "stat -c '%n %i %y' stdlib*") for host in rack]
        done = rack.fab("data", "--config", SPREAD, hosts=hosts)
        assert done.stdout.splitlines()[-1] == "index maps: 9 files, already on host-a"
        done = rack.fab("launch", "--config", SPREAD, hosts=hosts)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        assert [host.sh(script + "stat -c '%n %i %y' stdlib*") for host in rack] == before
        fetched = rack.fab("fetch", hosts=hosts)
        assert fetched.returncode == 0, fetched.stderr
        run = rack.project / fetched.stdout.splitlines()[-1]
        found = losses(run)
        assert found[-1] < found[0] - 1.0
        assert {path.name for path in (run / "logs").iterdir()} >= {f"rank-{rank}.log" for rank in range(4)}
    finally:
        rack.fab("down", "--force", hosts=hosts)
