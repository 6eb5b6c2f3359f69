"""Corrects a plan by a run: the factor on the estimated kernels and messages with which the run's own plan has the
measured step time, and the factor on the memory of its tensors."""

import math
from dataclasses import replace
from typing import Final

from tridock.engines import cost_model_of
from tridock.errors import Problem, RequestError
from tridock.layout.shape import LayoutShape
from tridock.plan.assess import Assessment, assess
from tridock.plan.assumptions import Assumptions
from tridock.plan.correction import Correction, MeasuredRun
from tridock.plan.cost import cost_of
from tridock.plan.memory import tensor_bytes
from tridock.plan.rates import GIVEN, Rates

_RANGE: Final = 1e4
"""The factor is within this range of the ratio of the times."""
_HALVINGS: Final = 60


def correction_of(run: MeasuredRun, assumptions: Assumptions) -> Correction:
    """Returns the correction. ``assumptions``: network, calibration and attention of the plan to correct.

    Raises :class:`RequestError` if the run's experiment is illegal, if its engine has no cost model, or if its messages
    alone would take longer over a network whose rate was given.
    """
    assumptions = replace(assumptions, gpu=run.gpu, correction=None)
    planned = assess(run.experiment, run.slots, run.source, assumptions)
    planned.checked(force=True)
    cost_model_of(run.experiment)
    assert planned.cost is not None
    assert planned.shape is not None
    if (known := planned.seconds) is None:
        assumptions = replace(assumptions, tflops=1.0)
    rates = assumptions.rates(run.experiment, planned.shape)
    used = dict.fromkeys(one.link for one in planned.cost.traffic)
    links = tuple(link for link in used if link == "node" or rates.network_source != GIVEN)
    correction = Correction(
        source=run.source,
        gpu=run.gpu,
        iterations=run.iterations,
        measured_s=run.step_s,
        planned_s=known,
        time=1.0,
        links=links,
        measured_bytes=run.peak_bytes,
        planned_bytes=max(tensor_bytes(stage.terms) for stage in planned.memory),
    )
    return replace(correction, time=_factor(planned, planned.shape, rates, correction))


def _factor(planned: Assessment, shape: LayoutShape, rates: Rates, correction: Correction) -> float:
    """Returns the factor that makes the estimate equal the measurement, by bisection: the time increases with it."""
    states = max(stage.state_bytes for stage in planned.memory)

    def seconds(factor: float) -> float:
        slower = rates.corrected(replace(correction, time=factor))
        estimate = cost_of(planned.experiment, shape, states, slower).estimate
        assert estimate is not None
        return estimate.iteration

    ratio = correction.measured_s / seconds(1.0)
    low, high = math.log(ratio / _RANGE), math.log(ratio * _RANGE)
    if not seconds(math.exp(low)) < correction.measured_s < seconds(math.exp(high)):
        what, got = "its step is shorter than its messages take in the plan", f"{correction.measured_s:g} s"
        todo = "give the network's rate with --network-gbit, or leave it out"
        raise RequestError(Problem(correction.source, what, got, todo))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(math.exp(middle)) < correction.measured_s else (low, middle)
    return math.exp(high)
