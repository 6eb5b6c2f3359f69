"""The files of a run that is the user's own program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tridock.contracts.supervision import Supervision
from tridock.errors import RequestError
from tridock.experiment.command import CommandExperiment
from tridock.launchers.run import Run, make_bundle
from tridock.launchers.ssh import Ssh

ID = "train-20260101-000000-abcd"


def texts(**fields: Any) -> dict[str, str]:
    experiment = CommandExperiment(name="train", engine="command", **fields)
    place = {"master_addr": "a.example", "master_port": 29500, "manifest": {"tridock": "1"}}
    run = Run(experiment, {"a": (0, 1), "b": (2, 3)}, ID, **place)  # type: ignore[arg-type]
    return {name: content.decode() for name, content in make_bundle(run, Ssh()).files.items()}


def test_every_node_has_its_script() -> None:
    files = texts(command=("torchrun", "train.py"), env={"WORD": "it's $5"})
    assert (
        f"exec tridock-python -P -m tridock.node start-nodes /workspace/runs/{ID} 'launch-node-{{node_rank}}.sh'\n"
        in (files["launch.sh"])
    )
    script = files["launch-node-1.sh"]
    assert f"cd /workspace/runs/{ID}/code\n" in script
    assert "export WORD='it'\"'\"'s $5'\n" in script
    assert f"export TRIDOCK_RUN_ID={ID}\n" in script
    assert script.endswith(
        "exec tridock-python -P -m tridock.node on-devices 2,3 \\\n  torchrun --nnodes 2 --node-rank 1"
        " --nproc-per-node 2 --master-addr a.example --master-port 29500 -m tridock.node.rank_output train.py\n"
    )
    assert json.loads(files["manifest.json"]) == {"tridock": "1", "run_id": ID}
    assert json.loads(files["plan.json"])["ranks"] == [
        {"rank": rank, "node": "ab"[rank // 2], "slot": rank} for rank in range(4)
    ]


def test_a_python_path_of_ones_own_leaves_tridock_to_be_found() -> None:
    files = texts(command=("torchrun", "train.py"), env={"PYTHONPATH": "deps"})
    assert all("export PYTHONPATH=deps:/opt/tridock\n" in files[name] for name in ("launch.sh", "launch-node-0.sh"))


def test_the_gpus_of_a_program_are_its_slots() -> None:
    with pytest.raises(RequestError) as refusal:
        texts(command=("torchrun", "train.py"), env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert str(refusal.value) == (
        "env.CUDA_VISIBLE_DEVICES: chooses GPUs of a node, as the slots do; got '0,1'; leave it out: the slots are the"
        " GPUs (--slots 4, or --include NODE:0,2)"
    )


def test_the_supervisor_observes_the_ranks() -> None:
    files = texts(command=("torchrun", "t.py"), restart={"max": 2}, launch={"hang_timeout": 60})
    supervision = Supervision.from_json(files["supervision.json"])
    assert (supervision.observed, supervision.max_restarts, supervision.hang_timeout_s) == (True, 2, 60)
    assert supervision.ranks == {"a": (0, 1), "b": (2, 3)}
    assert "launch-resume.sh" not in files


def test_a_restart_has_the_resume_command_and_setup_comes_first() -> None:
    files = texts(
        command=("deepspeed", "t.py"), resume_command=("torchrun", "t.py", "--resume"), setup="pip install -e . && true"
    )
    start = f"tridock-python -P -m tridock.node start-nodes /workspace/runs/{ID}"
    assert (
        f"export DS_ENV_FILE=/workspace/runs/{ID}/deepspeed_env\n\n{start} setup.sh\nexec deepspeed --hostfile"
        in (files["launch.sh"])
    )
    assert f"\n{start} setup.sh\nexec {start} 'launch-resume-node-{{node_rank}}.sh'\n" in files["launch-resume.sh"]
    assert files["launch-resume-node-0.sh"].endswith(" t.py --resume\n")
    assert files["setup.sh"].endswith("exec flock . bash -c 'pip install -e . && true'\n")


def test_bash_understands_the_scripts(tmp_path: Path) -> None:
    for name, text in texts(command=("python", "a b.py", "'", "$x"), setup="echo 'x'").items():
        if name.endswith(".sh"):
            (tmp_path / name).write_text(text)
            subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)


def test_open_mpi_starts_as_the_operator_who_may_be_root() -> None:
    files = texts(command=("mpirun", "./a.out"), env={"OMPI_ALLOW_RUN_AS_ROOT": "0"})
    assert "export OMPI_ALLOW_RUN_AS_ROOT=0\nexport OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n" in files["launch.sh"]
    assert "-x OMPI_ALLOW_RUN_AS_ROOT_CONFIRM " in files["launch.sh"]
    assert "OMPI" not in texts(command=("torchrun", "t.py"))["launch.sh"]
