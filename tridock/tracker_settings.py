"""``trackers`` and ``notify`` of YAML: fields that experiments and clusters share."""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from tridock.contracts import trackers
from tridock.strict_yaml import AS_TUPLE, EnvName, Section

Occasion = Literal["failed", "restarted", "finished", "stuck", "preempted", "disk"]
OCCASIONS: Final[tuple[Occasion, ...]] = ("failed", "restarted", "finished", "stuck", "preempted", "disk")
Text = Annotated[str, StringConstraints(pattern=r"^[^\n\r\x00]+$")]


class Tracker(Section):
    """A service that shows runs: its name, or its name with options."""

    name: Literal["wandb", "mlflow", "tensorboard"]
    project: Text = Field(default="tridock", description="W&B project or MLflow experiment.")
    entity: Text | None = Field(default=None, description="W&B user or team.")
    address: Text | None = Field(
        default=None,
        description="Server URL; for mlflow and tensorboard also a folder on the head. Default: W&B's own"
        " server, $MLFLOW_TRACKING_URI, and the run folder.",
    )
    offline: bool = Field(default=False, description="Write everything to the run folder, for tridock track.")
    variable: EnvName | None = Field(
        default=None,
        description="Environment variable on your machine with the key or token. Default: the library's own.",
    )
    file: Text | None = Field(default=None, description="File on your machine with the key or token.")

    @model_validator(mode="after")
    def _one_secret(self) -> "Tracker":
        if self.variable is not None and self.file is not None:
            raise ValueError("has a variable and a file for its key: keep one of them")
        if self.name == "wandb" and self.address is not None and not self.address.startswith(("http://", "https://")):
            raise ValueError(f"has an address that is no server, {self.address!r}: write http:// or https:// before it")
        return self

    @property
    def contract(self) -> trackers.Tracker:
        return trackers.Tracker(self.name, self.project, self.entity, self.address, self.offline)


class Notification(Section):
    """An address to notify, in apprise's form; it holds secrets, so it is named and not written here."""

    variable: EnvName | None = Field(default=None, description="Environment variable on your machine with the address.")
    file: Text | None = Field(default=None, description="File on your machine with the address.")
    events: Annotated[tuple[Occasion, ...], AS_TUPLE] = Field(default=OCCASIONS, min_length=1)
    per_hour: Annotated[int, Field(ge=1)] = Field(default=6, description="Maximum number of messages per hour.")

    @model_validator(mode="after")
    def _one_address(self) -> "Notification":
        if (self.variable is None) == (self.file is None):
            raise ValueError("needs either a variable or a file that holds the address")
        return self


def _by_name(value: Any) -> Any:
    return tuple({"name": it} if isinstance(it, str) else it for it in value) if isinstance(value, list) else value


def _named_once(trackers: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
    names = [tracker.name for tracker in trackers]
    if len({*names}) < len(names):
        raise ValueError("names a tracker twice: keep one of the two")
    return trackers


Trackers = Annotated[
    tuple[Tracker, ...],
    BeforeValidator(_by_name),
    AfterValidator(_named_once),
    Field(
        description="Trackers to send runs to: wandb, mlflow, tensorboard, each by name or with options"
        " (docs/trackers.md). An experiment without any uses those of its cluster."
    ),
]
Notifications = Annotated[
    tuple[Notification, ...],
    AS_TUPLE,
    Field(
        description="Where to report the end, failures and restarts of runs: the variable or file that holds each"
        " address, in apprise's form (docs/notifications.md). An experiment without any uses those of its cluster."
    ),
]


def contracts(notify: tuple[Notification, ...]) -> tuple[trackers.Notification, ...]:
    """Converts to the form of ``supervision.json``, where an address is the name of an environment variable."""
    return tuple(
        trackers.Notification(f"TRIDOCK_NOTIFY_{number}", it.events, it.per_hour) for number, it in enumerate(notify)
    )
