"""GPU hours, their cost and the goodput of a plan, in a line each."""

from tridock.plan import Assessment
from tridock.report.plan_text import count_short, duration

_LEAST_HOURS = 0.1


def days_line(assessment: Assessment) -> str | None:
    """Returns the time and GPU hours to train on the tokens asked for; None if they or the step time are unknown."""
    cost = assessment.cost
    if cost is None or (days := cost.days(assessment.tokens)) is None:
        return None
    counted = f"{count_short(assessment.tokens)} {assessment.experiment.model.unit}"
    for length, unit in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes"), (1 / 86400, "seconds")):
        if days >= length:
            return f"{counted} take about {days / length:,.1f} {unit}{_hours(assessment)}"
    return f"{counted} take less than a second"


def _hours(assessment: Assessment) -> str:
    """Returns GPU hours and their cost; empty below a tenth of an hour."""
    hours, price, each = assessment.gpu_hours, assessment.price, assessment.assumptions.cost_per_gpu_hour
    if hours is None or (hours < _LEAST_HOURS and price is None):
        return ""
    cost = "" if price is None else f", which cost {price:,.2f} at {each:g} each"
    energy = assessment.energy_kwh
    used = "" if energy is None else f", at most {energy:,.{0 if energy >= 10 else 1}f} kWh of the GPUs"
    return f": {hours:,.1f} GPU hours{cost}{used}"


def goodput_line(assessment: Assessment) -> str | None:
    """Returns the goodput with the experiment's and the best ``save_interval``; None if it was not asked for."""
    found, size = assessment.goodput, assessment.checkpoint_bytes / 1e9
    if found is None:
        return None
    failing = f"a failure every {duration(found.mtbf_hours * 3600)}"
    saving = (
        f"{size:,.1f} GB of a checkpoint take {duration(found.writing)}, and stop training for {duration(found.pause)}"
    )
    intervals = {"train.save_interval": found.own, "the best interval": found.best}
    shown = (
        f"{interval.goodput:.1%} with {name} {interval.iterations:,} ({duration(interval.seconds)})"
        for name, interval in intervals.items()
        if interval is not None
    )
    return f"goodput {', '.join(shown)}: {failing}; {saving}"
