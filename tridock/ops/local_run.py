"""A run on this machine: in a container (`docker compose run trainer …`) or in a virtual environment, without ssh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tridock import run_folder
from tridock.errors import EXIT_INTERRUPTED, Problem, RequestError
from tridock.experiment import Experiment, load_experiment
from tridock.launchers import make_bundle
from tridock.launchers.bundle import default_port
from tridock.ops.origin import origin
from tridock.plan import make_plan

HERE = "localhost"


def run_here(
    config: Path, nproc: int | None, workspace: Path, overrides: Sequence[str] = (), run_id_file: Path | None = None
) -> int:
    """Runs the experiment as local ranks and follows it; returns its exit code.

    Ctrl-C stops the run: it belongs to this terminal, unlike one that ``fab launch`` started.
    """
    workspace = workspace.resolve()
    if not workspace.is_dir():
        raise RequestError(
            Problem("--workspace", "is not a folder", str(workspace), "give the folder that holds data/")
        )
    if nproc is not None and nproc < 1:
        raise RequestError(Problem("--nproc", "must be at least 1", str(nproc), "give the number of ranks"))
    experiment = load_experiment(config, overrides)
    slots = {HERE: range(nproc or _default_ranks())}
    plan = make_plan(experiment, slots, str(config))
    run_id = run_folder.new_run_id(experiment.name)
    bundle = make_bundle(
        experiment,
        plan,
        slots,
        run_id=run_id,
        master_addr="127.0.0.1",
        master_port=experiment.launch.master_port or default_port(run_id),
        manifest=_manifest(config, experiment),
        workspace=str(workspace),
    )
    folder = workspace / "runs" / run_id
    for name, content in bundle.files.items():
        run_folder.write_atomic(folder / name, content)
    if run_id_file is not None:
        run_folder.write_atomic(run_id_file, f"{run_id}\n".encode())
    print(f"run {run_id}: {plan.world_size} ranks on this machine, {plan.layout}; folder {folder}", flush=True)
    return _start_and_follow(folder, run_id, plan.world_size)


def _start_and_follow(folder: Path, run_id: str, ranks: int) -> int:
    node = [sys.executable, "-P", "-m", "tridock.node"]
    # The ranks import this package and DeepSpeed's launcher from the environment that this process runs in.
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        # Ranks that each take all cores slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // ranks))),
        "PYTHONPATH": ":".join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    }
    started = subprocess.run([*node, "start", str(folder)], env=env, check=False)
    if started.returncode:
        return started.returncode
    try:
        return subprocess.run([*node, "follow", str(folder)], env=env, check=False).returncode
    except KeyboardInterrupt:
        print(f"\nstopping run {run_id}", flush=True)
        subprocess.run(
            [*node, "stop", run_id, "--workspace", str(folder.parent.parent)],
            env=env,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        return EXIT_INTERRUPTED


def _default_ranks() -> int:
    """A rank a GPU, or two on a machine without: enough for every code path that needs company."""
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return 2
    return len(listed.stdout.splitlines()) if listed.returncode == 0 and listed.stdout else 2


def _manifest(config: Path, experiment: Experiment) -> dict[str, object]:
    image = Path(run_folder.CODE) / "manifest.json"
    return {
        **origin(Path(__file__).parents[2]),
        "python": sys.version.split()[0],
        "image_manifest": json.loads(image.read_text()) if image.is_file() else None,
        "config": str(config),
        "seed": experiment.train.seed,
    }
