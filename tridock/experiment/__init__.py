"""The experiment: one YAML file that describes what to train and how."""

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
