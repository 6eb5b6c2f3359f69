"""What every rank of a run executes: a Python module with its arguments, its environment and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tridock import run_folder
from tridock.engines import megatron_deepspeed
from tridock.engines.deepspeed_config import deepspeed_config
from tridock.engines.megatron_deepspeed import megatron_arguments
from tridock.experiment import Experiment
from tridock.plan import Plan


@dataclass(frozen=True, slots=True)
class RankProgram:
    """``python -m module *arguments`` with ``env``, and the files that it reads from the run's folder."""

    module: str
    arguments: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)


def rank_program(experiment: Experiment, plan: Plan, run_id: str, run_path: str) -> RankProgram:
    """The program of one rank; the same on every rank, which read their number from the launcher's environment."""
    files: dict[str, bytes] = {}
    if experiment.parallel.strategy == "zero":
        config = deepspeed_config(experiment, plan.data_parallel_size)
        files[run_folder.DEEPSPEED_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    env = {
        **experiment.env,
        run_folder.RUN_ID_VARIABLE: run_id,
        run_folder.WORLD_SIZE_VARIABLE: str(plan.world_size),
    }
    folder = ("--run-folder", run_path)
    if experiment.engine == "megatron-deepspeed":
        words = megatron_arguments(experiment, plan, run_path)
        return RankProgram(megatron_deepspeed.MODULE, (*folder, *words), env, files)
    if experiment.engine == "megatron-core":
        return RankProgram("tridock.train.pretrain_gpt", folder, {**_MEGATRON_CORE, **env}, files)
    return RankProgram("tridock.train", folder, env, files)


_MEGATRON_CORE: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""GPUs before Blackwell then start work and communication in the order in which Megatron asks for them."""
