"""The experiment: one YAML file that says what is trained and how."""

from tridock.experiment.load import (
    dump_experiment,
    fields_digest,
    is_command,
    load_command,
    load_experiment,
    parse_experiment,
)
from tridock.experiment.schema import Experiment

__all__ = [
    "Experiment",
    "dump_experiment",
    "fields_digest",
    "is_command",
    "load_command",
    "load_experiment",
    "parse_experiment",
]
