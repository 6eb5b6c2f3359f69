"""Compares a repeated run with the original: the environment field by field, the losses number by number (pure)."""

from tridock.reproduction.losses import LossComparison, Point, compare_losses
from tridock.reproduction.original import Original, data_problems, environment, read_original
from tridock.reproduction.outcome import Outcome, judge

__all__ = [
    "LossComparison",
    "Original",
    "Outcome",
    "Point",
    "compare_losses",
    "data_problems",
    "environment",
    "judge",
    "read_original",
]
