"""The variables that an experiment sets for all of its ranks. Pure."""

from typing import Annotated, Final

from pydantic import AfterValidator

from tridock.strict_yaml import EnvName, EnvValue

_TODO: Final = {"MASTER_PORT": ", and set launch.master_port"}
_OF_THE_LAUNCH: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NNODES", "NPROC_PER_NODE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)


def _same_for_all(name: str) -> str:
    if name in _OF_THE_LAUNCH:
        raise ValueError(f"is set by the launch for each rank: leave it out{_TODO.get(name, '')}")
    return name


ENV: Final = (
    "Environment variables of every rank; they override the cluster's. Variables that the launcher sets for each rank"
    f" are refused: {', '.join(_OF_THE_LAUNCH)}."
)
RankEnv = dict[Annotated[EnvName, AfterValidator(_same_for_all)], EnvValue]
"""By name, without those that tell a rank its place: the launch decides them."""
