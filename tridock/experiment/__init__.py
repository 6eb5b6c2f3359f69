"""The experiment: one YAML file that describes what to train and how."""

from tridock.experiment.command import CommandExperiment
from tridock.experiment.load import (
    AnyExperiment,
    dump_experiment,
    fields_digest,
    is_command,
    load_command,
    load_experiment,
    parse_experiment,
    parse_recorded,
    recorded_experiment,
    recorded_run,
)
from tridock.experiment.schema import Experiment

__all__ = [
    "AnyExperiment",
    "CommandExperiment",
    "Experiment",
    "dump_experiment",
    "fields_digest",
    "is_command",
    "load_command",
    "load_experiment",
    "parse_experiment",
    "parse_recorded",
    "recorded_experiment",
    "recorded_run",
]
