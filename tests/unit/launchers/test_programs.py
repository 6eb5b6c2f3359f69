"""What Tridock adds to the command line of the user's own program, and what it refuses there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import pytest

from tridock.errors import RequestError
from tridock.launchers.programs import Place, has_rank_logs, is_per_slot, on_node, program_of
from tridock.launchers.self_launchers import Per

SLOTS = {"a": (0, 1), "b": (0, 1)}
START_RANKS = "tridock-python -P -m tridock.node start-ranks"
LOG = "tridock.node.rank_output"
WATCHED = f"tridock-python -P -m {LOG} --watched"
DEEPSPEED = (
    f"--hostfile /r/hostfile --master_addr 192.0.2.1 --master_port 29500 --launcher pdsh --no_ssh_check --module {LOG}"
)
RENDEZVOUS = "--master-addr 192.0.2.1 --master-port 29500"


def line(command: str, node_rank: int = 1, slots: Mapping[str, Sequence[int]] = SLOTS, per: Per | None = None) -> str:
    place = Place(slots, node_rank, "192.0.2.1", 29500, "/r/hostfile", ("A", "B"))
    return shlex.join(on_node(tuple(shlex.split(command)), place, per))


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
            "python -u -mtorch.distributed.run train.py",
            "python -u -mtorch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 2"
            f" {RENDEZVOUS} -m {LOG} train.py",
        ),
        (
            "python -u -W ignore -X dev -m deepspeed.launcher.runner train.py",
            "python -u -W ignore -X dev -m deepspeed.launcher.runner --hostfile /r/hostfile --master_addr 192.0.2.1"
            f" --master_port 29500 --launcher pdsh --no_ssh_check --module {LOG} train.py",
        ),
        (
            "accelerate launch --mixed_precision bf16 train.py",
            "accelerate launch --multi_gpu --num_machines 2 --machine_rank 1 --num_processes 4"
            f" --main_process_ip 192.0.2.1 --main_process_port 29500 --mixed_precision bf16 --module {LOG} train.py",
        ),
        (
            "mpirun --bind-to none python train.py",
            f"mpirun --hostfile /r/hostfile -np 4 -x A -x B --bind-to none {WATCHED} python train.py",
        ),
        ("orterun ./a.out", f"orterun --hostfile /r/hostfile -np 4 -x A -x B {WATCHED} ./a.out"),
        (
            "deepspeed train.py --deepspeed_config ds.json",
            "deepspeed --hostfile /r/hostfile --master_addr 192.0.2.1 --master_port 29500 --launcher pdsh"
            f" --no_ssh_check --module {LOG} train.py --deepspeed_config ds.json",
        ),
        ("deepspeed.pt train.py", f"deepspeed.pt {DEEPSPEED} train.py"),
        (
            "accelerate-launch train.py",
            "accelerate-launch --multi_gpu --num_machines 2 --machine_rank 1 --num_processes 4"
            f" --main_process_ip 192.0.2.1 --main_process_port 29500 --module {LOG} train.py",
        ),
        (
            "tune run full_finetune_distributed --config a.yaml lr=1",
            f"tune run --nnodes 2 --node-rank 1 --nproc-per-node 2 {RENDEZVOUS} full_finetune_distributed"
            " --config a.yaml lr=1",
        ),
        (
            "composer train.py",
            "composer --nproc 2 --world_size 4 --base_rank 2 --node_rank 1 --master_addr 192.0.2.1 --master_port 29500"
            f" -m {LOG} train.py",
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
        f"command: {name} gets these options from Tridock; got {refused}; leave them out: the hostfile,"
        " --nodes, --slots and --restarts decide"
    )


@pytest.mark.parametrize(
    "own",
    ["", "--oversubscribe ", "--bind-to none ", "--mca btl tcp,self ", "-x A=b --tag-output -mca a b "],
)
def test_the_options_of_a_program_under_mpirun_are_its_own(own: str) -> None:
    assert line(f"mpirun {own}./a.out -n 5 -H x").endswith(f" {own}{WATCHED} ./a.out -n 5 -H x")


@pytest.mark.parametrize("own", ["-- ./a.out", "--no-such-option ./a.out", "./a.out : -np 2 ./b.out", "--bind-to"])
def test_what_mpirun_starts_is_left_alone_where_it_is_not_certain(own: str) -> None:
    assert line(f"mpirun {own}").endswith(f" {own}")


@pytest.mark.parametrize("own", ["-c ./a.out", "--command_mode run.py", "--module_mode mine"])
def test_what_composer_starts_is_left_alone_unless_it_is_a_script_or_a_module(own: str) -> None:
    assert line(f"composer {own}").endswith(f" {own}")
    assert line("composer -m mine --x").endswith(f" -m {LOG} -m mine --x")


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
        assert f"{LOG} " not in line(it).replace(WATCHED, "")


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("python train.py", "starts once per slot"),
        ("accelerate launch train.py", "accelerate launch starts as many ranks on each node"),
    ],
)
def test_one_process_per_slot_needs_nodes_of_the_same_size(command: str, what: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command, slots={"a": (0,), "b": (0, 1)})
    assert str(refusal.value) == (
        f"command: {what}, and nodes differ in slots; got a: 1, b: 2; use torchrun, or --include"
    )


def test_a_program_per_node_has_the_variables_of_its_node_and_those_of_torchrun() -> None:
    rendezvous = {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "3",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "29500",
    }
    variables = [f"{prefix}{name}={value}" for prefix in ("", "PET_") for name, value in rendezvous.items()]
    slots = {"a": (0,), "b": (0, 1, 2)}
    assert line("bash run.sh 'a b'", slots=slots, per="node") == shlex.join(
        ["env", *variables, "bash", "run.sh", "a b"]
    )
    assert not has_rank_logs(["bash", "run.sh"], "node")


@pytest.mark.parametrize("command", ["torchrun train.py", "deepspeed train.py", "mpirun ./a.out"])
def test_a_launcher_is_started_as_it_needs_and_not_per_node(command: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command, per="node")
    name = command.split()[0]
    todo = f"leave it out: Tridock starts {name} where it belongs"
    assert str(refusal.value) == f"per: node is for programs that start ranks themselves; got {name}; {todo}"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("uv run torchrun train.py", "torchrun"),
        ("env A=b accelerate launch x.py", "accelerate"),
        ("uv run tune run full_finetune_distributed", "tune"),
        ("uv run swift sft --model m", "swift"),
        ("uv run /opt/bin/trl sft --config a.yaml", "trl"),
        ("uv run python deepy.py train.py", "deepy.py"),
    ],
)
def test_a_launcher_behind_another_program_is_not_started_once_per_slot(command: str, named: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command)
    todo = f"begin with {named}, or add --per {'cluster' if named == 'deepy.py' else 'node'}"
    assert str(refusal.value) == f"command: starts {named} once per slot, each alone; got {command}; {todo}"
    assert line("python launch.py torchrun")
    assert line("./launch tune swift --backend ray")
    for per in ("node", "slot"):
        assert line(command, per=per).endswith(command)


def test_another_command_of_a_known_launcher_is_started_where_the_user_says() -> None:
    with pytest.raises(RequestError) as refusal:
        line("axolotl preprocess a.yaml")
    assert str(refusal.value) == (
        "command: starts axolotl once per slot, each alone; got axolotl preprocess a.yaml; add --per node, or --per"
        " slot if you mean it"
    )
    assert line("axolotl preprocess a.yaml", per="slot").endswith("axolotl preprocess a.yaml")


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("llamafactory-cli train a.yaml", "FORCE_TORCHRUN=1"),
        ("python -m llamafactory.cli train a.yaml", "FORCE_TORCHRUN=1"),
        ("/opt/venv/bin/swift sft --model m", "NNODES=2"),
        ("axolotl train a.yaml --launcher torchrun", "NNODES=2"),
        ("axolotl train a.yaml --launcher=torchrun", "NNODES=2"),
        ("python ./deepy.py train.py -d configs a.yml", "DLTS_HOSTFILE=/r/hostfile"),
    ],
)
def test_a_program_that_starts_ranks_itself_is_given_what_it_reads(command: str, first: str) -> None:
    own = line(command)
    assert own.split()[:2] == ["env", first]
    assert own.endswith(f" {command}")
    argv = shlex.split(command)
    assert not is_per_slot(argv)
    assert program_of(argv)[0].runs_on_every_node(in_job=False) is ("deepy.py" not in command)
    assert is_per_slot(argv, "slot")  # who says so means it


@pytest.mark.parametrize(
    ("command", "todo"),
    [
        ("axolotl train a.yaml", "add --launcher torchrun"),
        ("trl sft --config a.yaml", "begin with torchrun -m trl.scripts.sft and the same options"),
        ("horovodrun -np 4 python a.py", "begin with mpirun and the same program"),
        ("colossalai run a.py", "begin with torchrun and the same script"),
        ("ray start --head", "use --per node with a script that starts the head where NODE_RANK is 0"),
    ],
)
def test_a_program_that_starts_ranks_of_one_node_alone_is_refused(command: str, todo: str) -> None:
    with pytest.raises(RequestError) as refusal:
        line(command)
    words = " ".join(command.split()[:2])
    assert str(refusal.value) == (
        f"command: starts ranks itself, and does not read where the other nodes are; got {words}; {todo}"
    )
    assert line(command, per="node").endswith(f" {command}")


def test_a_program_on_the_head_alone() -> None:
    expected = "env DLTS_HOSTFILE=/r/hostfile NNODES=2 MASTER_ADDR=192.0.2.1 MASTER_PORT=29500 bash all.sh"
    assert line("bash all.sh", 0, per="cluster") == expected
    place = Place(SLOTS, 0, "192.0.2.1", 29500, "/r/hostfile", in_job=True)
    with pytest.raises(RequestError) as refusal:
        on_node(("bash", "all.sh"), place, "cluster")
    assert str(refusal.value) == (
        "per: cluster is for programs that reach the other nodes over ssh; use --per node in a job"
    )
