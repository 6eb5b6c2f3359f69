"""The user's own program as an experiment (``engine: command``): its command line, code and environment. Pure."""

from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from tridock.contracts.output_metrics import reader_of
from tridock.experiment.rank_env import ENV, RankEnv
from tridock.experiment.schema import MasterPort, Name, Seconds
from tridock.strict_yaml import Count, PathText, Section
from tridock.tracker_settings import Notifications, Trackers

ENGINE: Final = "command"
Argument = Annotated[str, StringConstraints(pattern=r"^[^\x00\n\r]*$")]


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _pattern(value: str) -> str:
    reader_of(value)
    return value


Argv = Annotated[tuple[Argument, ...], Field(min_length=1), BeforeValidator(_tuple)]


class CommandLaunch(Section):
    """How the program starts, when it counts as hung, and the signal that asks it to save."""

    master_port: MasterPort | None = Field(
        default=None, description="Rendezvous port on the head. Default: a free port."
    )
    hang_timeout: Count = Field(
        default=1800,
        description="Seconds without output or CPU time after which a rank counts as hung and the run is"
        " ended (with heartbeats: without one, as in an engine's run); 0 for never.",
    )
    save_signal: Literal["SIGUSR1", "SIGTERM"] = Field(
        default="SIGUSR1",
        description="Signal that every rank gets under Slurm before the time limit (signal_lead of the profile):"
        " SIGUSR1 or SIGTERM. The program should save and exit; without a handler it just ends.",
    )


class CommandRestart(Section):
    """Restarts of a failed program."""

    max: Count = Field(default=0, description="Maximum number of restarts.")
    node_timeout: Annotated[Seconds, Field(ge=30)] = Field(
        default=60, description="How long to wait for a lost node to come back before the run ends."
    )


class CommandExperiment(Section):
    """The user's own command line, and what it needs on every node."""

    name: Name = Field(description="Short name; every run id starts with it.")
    engine: Literal["command"]
    command: Argv = Field(
        description="Command line: torchrun, deepspeed, accelerate launch or mpirun with its script, or any other"
        " program, which is started once per slot."
    )
    per: Literal["slot", "node", "cluster"] | None = Field(
        default=None,
        description="Where any other program is started: once per slot; once per node, where it starts the ranks"
        " itself, as a shell script with torchrun does; or once per cluster, on the head, which reaches the others with"
        " the hostfile in DLTS_HOSTFILE. Default: as known for programs that start ranks themselves, else slot.",
    )
    resume_command: Argv | None = Field(
        default=None, description="Command line for restarts. Default: the same as command."
    )
    setup: Argument | None = Field(
        default=None, description="Shell command that every node runs in the code folder before the program."
    )
    code: PathText = Field(
        default=".",
        description="Folder with the program on your machine: it is copied to every node, and the program"
        " runs in the copy.",
    )
    env: RankEnv = Field(default_factory=dict, description=ENV)
    metrics: Annotated[str, AfterValidator(_pattern)] | None = Field(
        default=None,
        description="How the program prints its losses: hf-trainer, lightning, megatron, key=value, or a regular"
        " expression with the groups (?P<iteration>…) and (?P<loss>…).",
    )
    trackers: Trackers = ()
    notify: Notifications = ()
    launch: CommandLaunch = Field(default_factory=CommandLaunch)
    restart: CommandRestart = Field(default_factory=CommandRestart)


def name_of(command: tuple[str, ...]) -> str:
    """Returns a default experiment name for a command line: its script's name, else its program's."""
    script = next((word for word in command if word.endswith(".py")), command[0])
    stem = PurePosixPath(script).name.removesuffix(".py").lower()
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in stem).strip("-")[:40] or "run"
