"""The engines, by the name in the experiment; nothing outside this package compares that name. Pure."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from tridock.contracts import environment, run_folder
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.engine import Engine, RankProgram, checkpoints_folder
from tridock.engines.fields import Refused, as_yaml
from tridock.engines.megatron_core.engine import MegatronCore
from tridock.engines.megatron_lm.engine import MegatronLM
from tridock.engines.torch.engine import Torch
from tridock.errors import Problem
from tridock.experiment import Experiment
from tridock.layout import Plan
from tridock.layout.split import either

__all__ = [
    "ENGINES",
    "Engine",
    "RankProgram",
    "as_yaml",
    "checkpoints_folder",
    "engine_of",
    "engines_with",
    "field_problems",
    "rank_program",
]

ENGINES: Final[Mapping[str, Engine]] = {engine.name: engine for engine in (Torch(), MegatronLM(), MegatronCore())}


def engine_of(experiment: Experiment) -> Engine:
    """Returns the engine that the experiment names."""
    return ENGINES[experiment.engine]


def engines_with(path: str) -> list[str]:
    """Returns the names of the engines that support a field; an engine with its own default for the field counts."""
    tables = {name: engine.fields.get(path) for name, engine in ENGINES.items()}
    return [name for name, it in tables.items() if not isinstance(it, Refused) or it.default is not None]


def field_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields fields that are set although the experiment's engine refuses them."""
    engine = engine_of(experiment)
    for path, refused in engine.fields.items():
        if not isinstance(refused, Refused):
            continue
        section, _, name = path.rpartition(".")
        fields = getattr(experiment, section) if section else experiment
        value = getattr(fields, name)
        default = _default(type(fields), name) if refused.default is None else refused.default  # type: ignore[arg-type]
        if value != default:
            nearest = default if type(default) is int else as_yaml(default)
            names = {"engine": engine.name, "others": either(engines_with(path))}
            what, todo = refused.what.format(**names), refused.todo.format(**names)
            yield Problem(path, what, as_yaml(value), todo, (nearest,))


@cache
def _default(section: type[BaseModel], name: str) -> Any:
    return section.model_fields[name].get_default(call_default_factory=True)


def rank_program(
    experiment: Experiment, plan: Plan, run_id: str, run_path: str, *, resume: bool = False
) -> RankProgram:
    """Returns the program of a rank, the same for every rank: a rank reads its number from the launcher's environment.

    ``resume``: continue from the run's own checkpoints.
    """
    load = checkpoints_folder(experiment, run_path) if resume else None
    program = engine_of(experiment).program(experiment, plan, run_path, load)
    files: dict[str, bytes] = {}
    if experiment.parallel.strategy == "zero":
        config = deepspeed_config(experiment, plan.data_parallel_size)
        files[run_folder.DEEPSPEED_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    env = {
        **program.env,
        **experiment.env,
        environment.RUN_ID: run_id,
        environment.WORLD_SIZE: str(plan.world_size),
    }
    return RankProgram(program.module, program.arguments, env, files)
