"""The sbatch scripts: compared with golden files, line for line, and read by shellcheck."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tridock.experiment import load_experiment
from tridock.launchers.slurm.profile import make_request
from tridock.launchers.slurm.script import Script, program_argv, render
from tridock.plan import assess

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "slurm"
CPU = "gpu_request: none\ngpus_per_node: 2\ncpus_per_node: 4\n"
GPU = "gpus_per_node: 4\ncpus_per_node: 32\npartition: train\ntime: '2:00:00'\n"
IMAGES = {"apptainer": "/images/tridock.sif", "pyxis": "/images/tridock.sqsh", "docker": "tridock:latest"}
MEGATRON = "configs/megatron/gpt2-345m-3d.yaml"
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "jean-zay-7.5b": ("configs/jean-zay/7.5b.yaml", "jean-zay", {"nodes": 4, "account": "abc@v100"}),
    "gcp-ddp": ("configs/gcp/gpt-xl-ddp.yaml", "gcp", {"nodes": 4}),
    "gcp-pipeline": ("configs/gcp/gpt-xl-pipeline.yaml", "gcp", {"nodes": 4, "launcher": "deepspeed"}),
    "megatron-srun": (MEGATRON, GPU, {"nodes": 4, "launcher": "srun", "gpu_type": "v100", "mem": "160G"}),
    "megatron-pdsh": (MEGATRON, GPU, {"nodes": 4, "launcher": "deepspeed-pdsh"}),
    "demo-deepspeed-slurm": ("configs/demo.yaml", CPU, {"nodes": 2, "launcher": "deepspeed-slurm"}),
    "demo-on-cpus": ("configs/demo.yaml", CPU, {"nodes": 2, "requeue": False, "exclusive": True}),
    **{
        f"demo-{kind}": ("configs/demo.yaml", GPU, {
            "container.kind": kind, "container.image": image, "container.mounts": ["/data", "/a:/b:ro"],
            "container.extra_args": ["--env=X=it's"], "env": {"NCCL_DEBUG": "INFO"},
            "launcher": "srun" if kind == "docker" else "torchrun",
        })
        for kind, image in IMAGES.items()
    },
}  # fmt: skip


def script(name: str, runs: int = 1, **changes: object) -> Script:
    config, profile, fields = CASES[name]
    path = ROOT / "configs" / "slurm" / f"{profile}.yaml"
    text = profile if "\n" in profile else path.read_text()
    request = make_request(text, "profile", {**fields, **changes})
    experiment = load_experiment(ROOT / config)
    assessment = assess(experiment, request.slots, config)
    assessment.checked()
    elements = [
        SimpleNamespace(
            experiment=experiment, assessment=assessment, run_id=f"{experiment.name}-20260102-030405-{n:04x}"
        )
        for n in range(1, runs + 1)
    ]
    return Script(request, elements, "/scratch/me")


def shellcheck(text: str, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(text)
    subprocess.run(["shellcheck", str(file)], check=True)


@pytest.mark.parametrize("name", CASES)
def test_the_script_is_the_golden_one(name: str, tmp_path: Path) -> None:
    text = render(script(name))
    assert text == (GOLDEN / f"{name}.sh").read_text()
    shellcheck(text, tmp_path)


def test_the_script_of_an_array(tmp_path: Path) -> None:
    text = render(script("jean-zay-7.5b", runs=3, array_tasks=2))
    assert text == (GOLDEN / "array.sh").read_text()
    shellcheck(text, tmp_path)


def test_every_golden_file_is_compared() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == {*CASES, "array"}


@pytest.mark.parametrize(("size", "nodes"), [("7.5b", 4), ("30b", 16), ("76b", 30)])
def test_the_seeds_allocations_are_asked_for_as_they_were(size: str, nodes: int) -> None:
    CASES["a"] = (f"configs/jean-zay/{size}.yaml", "jean-zay", {"nodes": nodes})
    try:
        head = render(script("a")).split("\n\n")[0].splitlines()
    finally:
        del CASES["a"]
    # salloc --nodes=4 --ntasks=4 --cpus-per-task=32 --gres=gpu:4 --hint=nomultithread --time=6:00:00, -C v100-32g
    options = {line.removeprefix("#SBATCH --") for line in head}
    assert options >= {
        f"nodes={nodes}", "ntasks-per-node=1", "cpus-per-task=32", "gres=gpu:4", "hint=nomultithread", "time=6:00:00",
        "constraint=v100-32g",
    }  # fmt: skip


def test_in_an_allocation_there_is_nothing_to_ask_for_and_to_queue_again() -> None:
    there = script("demo-on-cpus", requeue=True)
    text = render(Script(there.request, there.elements, there.workspace, in_allocation=True))
    assert "#SBATCH" not in text
    assert 'exec tridock slurm supervise --no-requeue "$RUN" -- \\\n' in text


def run_script(text: str, folder: Path, **env: str) -> list[str]:
    """Runs a script with stand-ins for Slurm's commands; the arguments of the supervisor, and the port."""
    bin_ = folder / "bin"
    bin_.mkdir()
    show = (
        'import json, os, sys; print(json.dumps([os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], *sys.argv[1:]]))'
    )
    (bin_ / "tridock").write_text(f"#!/bin/sh\nexec python3 -c '{show}' \"$@\"\n")
    (bin_ / "scontrol").write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-2]' ] && printf 'n1\\nn2\\n'\n")
    for program in bin_.iterdir():
        program.chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "30007", "SLURM_CPUS_PER_TASK": "2", **env}
    path = f"{bin_}:{os.environ['PATH']}"
    done = subprocess.run(["bash"], input=text, env={"PATH": path, **job}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    argv: list[str] = json.loads(done.stdout)
    return argv


def test_what_the_script_does(tmp_path: Path) -> None:
    made = script("demo-deepspeed-slurm")
    text = render(Script(made.request, made.elements, str(tmp_path), ["--config", "it's.yaml"]))
    run = f"{tmp_path}/runs/{made.first.run_id}"
    assert run_script(text, tmp_path) == [
        "n1", "20007", "slurm", "supervise", "--config", "it's.yaml", run, "--",
        "deepspeed", f"--hostfile={run}/hostfile", "--master_addr=n1", "--master_port=20007", "--launcher=slurm",
        "--no_ssh_check",
        "--launcher_args=--ntasks-per-node=2 --distribution=block --kill-on-bad-exit=0 --cpus-per-task=2",
        "--", "-m", "tridock.train", "--run-folder", run,
    ]  # fmt: skip
    assert Path(run, "hostfile").read_text() == "n1 slots=2\nn2 slots=2\n"


def test_a_task_of_an_array_starts_the_run_of_its_number(tmp_path: Path) -> None:
    made = script("demo-on-cpus", runs=2)
    made = Script(made.request, made.elements, str(tmp_path))
    run = f"{tmp_path}/runs/{made.elements[1].run_id}"
    Path(run).mkdir(parents=True)
    argv = program_argv(made, made.elements[1])
    Path(run, "program").write_text("".join(f"{word}\n" for word in argv))
    found = run_script(render(made), tmp_path, SLURM_ARRAY_TASK_ID="1")
    assert found[-4:] == ["-m", "tridock.train", "--run-folder", run]
    assert argv == ("tridock.train", "--run-folder", run)


def test_two_jobs_of_one_node_have_ports_of_their_own(tmp_path: Path) -> None:
    text = render(script("demo-on-cpus")).replace("/scratch/me", str(tmp_path))
    ports = set()
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        ports.add(run_script(text, tmp_path / str(number), SLURM_JOB_ID=str(49999 + number))[1])
    assert ports == {"29999", "20000", "20001"}


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"SLURM_STEP_GPUS": "4,5", "SLURM_JOB_GPUS": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}, '"device=4,5"'),
        ({"SLURM_JOB_GPUS": "6", "CUDA_VISIBLE_DEVICES": "0"}, '"device=6"'),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}, '"device=GPU-aa,GPU-bb"'),
    ],
)
def test_dockers_containers_get_the_gpus_of_the_allocation(env: dict[str, str], gpus: str, tmp_path: Path) -> None:
    (tmp_path / "docker").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (tmp_path / "docker").chmod(0o755)
    text = render(script("demo-docker"))
    command = text[text.index("bash -c") : text.index(" --rm")].replace("\\\n", "")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", **env}
    done = subprocess.run(["bash", "-c", f"{command} --rm image"], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run", f"--gpus={gpus}", "--rm", "image"]
