"""The engines, by the name in the experiment; nothing outside this package compares that name. Pure."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from pydantic import BaseModel

from tridock.contracts import environment, run_folder
from tridock.contracts.hang_limits import collective_minutes
from tridock.engines.cost_model import CostModel
from tridock.engines.deepspeed import deepspeed_config
from tridock.engines.fields import Refused, as_yaml
from tridock.engines.megatron_core.cost_model import MegatronCoreCostModel
from tridock.engines.megatron_core.program import MegatronCoreProgram
from tridock.engines.megatron_core.rules import MegatronCoreRules
from tridock.engines.megatron_lm.cost_model import MegatronLMCostModel
from tridock.engines.megatron_lm.program import MegatronLMProgram
from tridock.engines.megatron_lm.rules import MegatronLMRules
from tridock.engines.other_programs import other_programs
from tridock.engines.program import Program, RankProgram, checkpoints_folder
from tridock.engines.rules import Rules
from tridock.engines.torch.cost_model import TorchCostModel
from tridock.engines.torch.program import TorchProgram
from tridock.engines.torch.rules import TorchRules
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment
from tridock.layout import Plan
from tridock.layout.split import either

__all__ = [
    "ENGINES",
    "NO_ESTIMATE",
    "CostModel",
    "Engine",
    "RankProgram",
    "checkpoints_folder",
    "cost_model_of",
    "engines_with",
    "field_problems",
    "program_of",
    "rank_program",
    "rules_of",
]


@dataclass(frozen=True, slots=True)
class Engine:
    """The three roles of an engine. Callers take the one that they need."""

    program: Program
    rules: Rules
    cost_model: CostModel | None = None
    """None: runs start, and their plans have neither memory nor time."""


ENGINES: Final[Mapping[str, Engine]] = {
    "torch": Engine(TorchProgram(), TorchRules(), TorchCostModel()),
    "megatron-deepspeed": Engine(MegatronLMProgram(), MegatronLMRules(), MegatronLMCostModel()),
    "megatron-core": Engine(MegatronCoreProgram(), MegatronCoreRules(), MegatronCoreCostModel()),
}
NO_ESTIMATE: Final = "has no cost model: its memory and time are not estimated"


def program_of(experiment: Experiment) -> Program:
    return ENGINES[experiment.engine].program


def rules_of(experiment: Experiment) -> Rules:
    return ENGINES[experiment.engine].rules


def cost_model_of(experiment: Experiment) -> CostModel:
    """Returns the cost model of the experiment's engine. Raises :class:`RequestError` if it has none."""
    if (model := ENGINES[experiment.engine].cost_model) is None:
        what, todo = NO_ESTIMATE, "leave out what needs an estimate: --search, --why and --from-run"
        raise RequestError(Problem("engine", what, experiment.engine, todo))
    return model if experiment.program is None else model.as_program(other_programs()[experiment.program])


def engines_with(path: str) -> list[str]:
    """Returns the names of the engines that support a field; an engine with its own default for the field counts."""
    tables = {name: engine.rules.fields.get(path) for name, engine in ENGINES.items()}
    return [name for name, it in tables.items() if not isinstance(it, Refused) or it.default is not None]


def field_problems(experiment: Experiment) -> Iterator[Problem]:
    """Yields fields that are set although the experiment's engine refuses them."""
    for path, refused in rules_of(experiment).fields.items():
        if not isinstance(refused, Refused):
            continue
        section, _, name = path.rpartition(".")
        fields = getattr(experiment, section) if section else experiment
        value = getattr(fields, name)
        default = _default(type(fields), name) if refused.default is None else refused.default  # type: ignore[arg-type]
        if value != default:
            nearest = default if type(default) is int else as_yaml(default)
            names = {"engine": experiment.engine, "others": either(engines_with(path))}
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
    program = program_of(experiment).of_rank(experiment, plan, run_path, load)
    files = dict(program.files)
    if experiment.parallel.strategy == "zero":
        config = deepspeed_config(experiment, plan.data_parallel_size)
        files[run_folder.DEEPSPEED_CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    env = {
        environment.COLLECTIVE_TIMEOUT: str(collective_minutes(experiment.launch.hang_timeout)),
        **program.env,
        **experiment.env,
        environment.RUN_ID: run_id,
        environment.WORLD_SIZE: str(plan.world_size),
    }
    return replace(program, env=env, files=files)
