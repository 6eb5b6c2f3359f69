"""What every rank of a run executes: a Python module with its arguments, its environment and its files."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tridock.contracts import run_folder
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.megatron_lm.arguments import MODULE, megatron_arguments
from tridock.experiment import Experiment
from tridock.layout import Plan


@dataclass(frozen=True, slots=True)
class RankProgram:
    """``python -m module *arguments`` with ``env``, and the files that it reads from the run's folder."""

    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def rank_program(
    experiment: Experiment, plan: Plan, run_id: str, run_path: str, *, resume: bool = False
) -> RankProgram:
    """The program of one rank; the same on every rank, which read their number from the launcher's environment.

    ``resume``: it goes on from the run's own checkpoints.
    """
    load = checkpoints_folder(experiment, run_path) if resume else None
    files: dict[str, bytes] = {}
    if experiment.parallel.strategy == "zero":
        config = deepspeed_config(experiment, plan.data_parallel_size)
        files[run_folder.DEEPSPEED_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    env = {
        **experiment.env,
        run_folder.RUN_ID_VARIABLE: run_id,
        run_folder.WORLD_SIZE_VARIABLE: str(plan.world_size),
    }
    folder: tuple[str, ...] = ("--run-folder", run_path)
    if experiment.engine == "megatron-deepspeed":
        if load is not None:
            train = experiment.train.model_copy(update={"load": load})
            experiment = experiment.model_copy(update={"train": train})
        words = megatron_arguments(experiment, plan, run_path)
        return RankProgram(MODULE, (*folder, *words), env, files)
    folder = folder if load is None else (*folder, "--load", load)
    if experiment.engine == "megatron-core":
        return RankProgram("tridock.train.megatron_core.pretrain_gpt", folder, {**_MEGATRON_CORE, **env}, files)
    return RankProgram("tridock.train", folder, env, files)


_MEGATRON_CORE: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""GPUs before Blackwell then start work and communication in the order in which Megatron asks for them."""


def checkpoints_folder(experiment: Experiment, run_path: str) -> str:
    """Where the run's checkpoints go, as an absolute path."""
    workspace = posixpath.dirname(posixpath.dirname(run_path))
    return posixpath.join(workspace, experiment.train.checkpoint_folder or f"{run_path}/{run_folder.CHECKPOINTS}")


def checkpoint_pointer(experiment: Experiment) -> str:
    """The file in there that names the newest one, and is written last."""
    return "latest" if experiment.engine == "torch" else "latest_checkpointed_iteration.txt"
