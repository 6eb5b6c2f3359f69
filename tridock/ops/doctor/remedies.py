"""``tridock check --fix``: safe fixes, each printed. What an active run needs is never touched."""

from collections.abc import Callable
from functools import partial

from tridock.errors import TridockError
from tridock.ops.doctor.finding import KEYS, UP, Report
from tridock.ops.hosts.keys import distribute_keys
from tridock.ops.hosts.nodes import up
from tridock.ops.hosts.session import Session
from tridock.ops.runs import registry


def apply_fixes(session: Session, report: Report, say: Callable[[str], object]) -> bool:
    """Applies the remedies of the findings and prints each result; returns whether there were any."""
    wanted = {finding.remedy for finding in report.findings if finding.remedy}
    for run_id in sorted(remedy[1] for remedy in wanted if remedy[0] == "stop"):
        _try(
            say,
            f"end the leftover processes of run {run_id}",
            partial(registry.stop, session, registry.Run(run_id, session.head)),
        )
    if UP in wanted:
        _try(say, "bring the nodes up: keys, image, containers", partial(up, session))
    elif KEYS in wanted:
        _try(say, "give all nodes the cluster's keys again", partial(distribute_keys, session))
    session.forget_states()
    return bool(wanted)


def _try(say: Callable[[str], object], what: str, action: Callable[[], object]) -> None:
    try:
        action()
    except TridockError as error:
        say(f"not fixed: {what}")
        for problem in error.problems:
            say(f"    {problem}")
    else:
        say(f"fixed: {what}")
