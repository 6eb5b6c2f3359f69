"""What Tridock adds to the command line of the user's own program, and what it refuses there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import pytest

from tridock.errors import RequestError
from tridock.launchers.programs import Place, has_rank_logs, on_node

SLOTS = {"a": (0, 1), "b": (0, 1)}
START_RANKS = "tridock-python -P -m tridock.node start-ranks"
LOG = "tridock.node.rank_output"
RENDEZVOUS = "--master-addr 10.0.0.1 --master-port 29500"


def line(
    command: str, node_rank: int = 1, slots: Mapping[str, Sequence[int]] = SLOTS, *, per_node: bool = False
) -> str:
    place = Place(slots, node_rank, "10.0.0.1", 29500, "/r/hostfile", ("A", "B"), per_node=per_node)
    return shlex.join(on_node(tuple(shlex.split(command)), place))


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "torchrun train.py --lr 1e-3",
            f"torchrun --nnodes 2 --node-rank 1 --nproc-per-node 2 {RENDEZVOUS} -m {LOG} train.py --lr 1e-3",
        ),
        (
            "/opt/venv/bin/torchrun --nproc_per_node=1 -m pkg.train --nnodes 7",
            f"/opt/venv/bin/torchrun --nnodes 2 --node-rank 1 {RENDEZVOUS} --nproc_per_node=1"
            f" -m {LOG} -m pkg.train --nnodes 7",
        ),
        (
            "python3.12 -m torch.distributed.run train.py",
            "python3.12 -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 2"
            f" {RENDEZVOUS} -m {LOG} train.py",
        ),
        (
            "python -u -W ignore -X dev -m deepspeed.launcher.runner train.py",
            "python -u -W ignore -X dev -m deepspeed.launcher.runner --hostfile /r/hostfile --master_addr 10.0.0.1"
            f" --master_port 29500 --launcher pdsh --no_ssh_check --module {LOG} train.py",
        ),
        (
            "accelerate launch --mixed_precision bf16 train.py",
            "accelerate launch --multi_gpu --num_machines 2 --machine_rank 1 --num_processes 4"
            f" --main_process_ip 10.0.0.1 --main_process_port 29500 --mixed_precision bf16 --module {LOG} train.py",
        ),
        (
            "mpirun --bind-to none python train.py",
            "mpirun --hostfile /r/hostfile -np 4 -x A -x B --bind-to none python train.py",
        ),
        (
            "deepspeed train.py --deepspeed_config ds.json",
            "deepspeed --hostfile /r/hostfile --master_addr 10.0.0.1 --master_port 29500 --launcher pdsh --no_ssh_check"
            f" --module {LOG} train.py --deepspeed_config ds.json",
        ),
        (
            "python train.py 'a b'",
            f"{START_RANKS} --nnodes 2 --node-rank 1 --nproc-per-node 2 {RENDEZVOUS} --no-python tridock-python -P"
            f" -m {LOG} --program python train.py 'a b'",
        ),
    ],
)
def test_the_cluster_is_added_behind_the_programs_name(command: str, expected: str) -> None:
    assert line(command) == expected


def test_what_deepspeed_hands_to_a_shell_is_quoted_for_it() -> None:
    assert line("deepspeed train.py '$HOME %h'").endswith(shlex.join(["train.py", "\\$HOME %%h"]))
    assert line("deepspeed train.py '$HOME %h'", 0, {"a": (0, 1)}).endswith(shlex.join(["train.py", "$HOME %h"]))


def test_chosen_slots() -> None:
    assert "--include a:1@b:0,3" in line("deepspeed train.py", slots={"a": (1,), "b": (0, 3)})
    assert "--nproc-per-node 2" in line("torchrun train.py", slots={"a": (1,), "b": (0, 3)})


@pytest.mark.parametrize(
    ("command", "name", "refused"),
    [
        ("torchrun --nnodes=1 --master_port 1 train.py", "torchrun", "--nnodes=1 --master_port"),
        ("torchrun --max-restarts 3 train.py", "torchrun", "--max-restarts"),
        ("deepspeed --num_gpus 2 train.py", "deepspeed", "--num_gpus"),
        ("accelerate launch --num_machines 2 train.py", "accelerate launch", "--num_machines"),
        ("mpirun -np 4 ./a.out", "mpirun", "-np"),
        ("mpirun --mca btl tcp,self --oversubscribe --bind-to none --unknown -n 4 ./a.out -n 5", "mpirun", "-n"),
    ],
)
def test_options_that_the_cluster_decides_are_refused(command: str, name: str, refused: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command)
    assert str(refusal.value) == (
        f"command: {name} gets these options from Tridock; got {refused}; leave them out: the hostfile and --restarts"
        " decide"
    )


@pytest.mark.parametrize(
    "own",
    ["", "--oversubscribe ", "--bind-to none ", "--mca btl tcp,self ", "-x A=b --tag-output -mca a b ", "-- "],
)
def test_the_options_of_a_program_under_mpirun_are_its_own(own: str) -> None:
    assert line(f"mpirun {own}./a.out -n 5 -H x").endswith(f" {own}./a.out -n 5 -H x")


def test_what_kind_of_ranks_accelerate_starts_is_the_users_to_say() -> None:
    assert "--multi_gpu" not in line("accelerate launch --use_fsdp train.py")
    assert "--multi_gpu" not in line("accelerate launch --config_file a.yaml train.py")
    with pytest.raises(RequestError) as refusal:
        line("accelerate launch --cpu train.py --cpu")
    assert str(refusal.value) == (
        "command: accelerate launch starts no ranks with it; got --cpu; leave it out, or give it behind the script"
    )


def test_output_is_copied_by_rank_unless_the_user_sees_to_it() -> None:
    assert has_rank_logs(["./a.out"])
    for it in ("torchrun --tee 3 train.py", "torchrun --no-python ./run", "torchrun -- train.py", "mpirun ./a.out"):
        assert not has_rank_logs(shlex.split(it))
        assert LOG not in line(it)


def test_one_process_per_slot_needs_nodes_of_the_same_size() -> None:
    with pytest.raises(RequestError) as refusal:
        line("python train.py", slots={"a": (0,), "b": (0, 1)})
    assert str(refusal.value) == (
        "command: starts once per slot, and nodes differ in slots; got a: 1, b: 2; use torchrun, or --include"
    )


def test_a_program_per_node_has_the_variables_of_its_node_and_those_of_torchrun() -> None:
    rendezvous = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "3",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
    }
    variables = [f"{prefix}{name}={value}" for prefix in ("", "PET_") for name, value in rendezvous.items()]
    slots = {"a": (0,), "b": (0, 1, 2)}
    assert line("bash run.sh 'a b'", slots=slots, per_node=True) == shlex.join(
        ["env", *variables, "bash", "run.sh", "a b"]
    )
    assert not has_rank_logs(["bash", "run.sh"], per_node=True)


@pytest.mark.parametrize("command", ["torchrun train.py", "deepspeed train.py", "mpirun ./a.out"])
def test_a_launcher_is_started_as_it_needs_and_not_per_node(command: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command, per_node=True)
    name = command.split()[0]
    todo = f"leave it out: Tridock starts {name} where it belongs"
    assert str(refusal.value) == f"per: node is for programs that start the ranks of their node; got {name}; {todo}"


@pytest.mark.parametrize(
    ("command", "named"), [("uv run torchrun train.py", "torchrun"), ("env A=b accelerate launch x.py", "accelerate")]
)
def test_a_launcher_behind_another_program_is_not_started_once_per_slot(command: str, named: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command)
    todo = f"begin with {named}, or add --per node"
    assert str(refusal.value) == f"command: starts {named} once per slot, each alone; got {command}; {todo}"
    assert line("python launch.py torchrun")
    assert line(command, per_node=True).endswith(command)
