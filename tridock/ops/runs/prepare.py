"""Prepares a run with a plan, the same way for every launcher.

``tridock launch``, ``tridock train``, ``tridock slurm`` and ``tridock replan`` all begin here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from tridock.cluster.settings import Cluster, load_cluster
from tridock.contracts import run_folder
from tridock.contracts.limits import LEAST_RATE, MOST_RANKS, MOST_RATE, MOST_SLOTS, refuse_too_many
from tridock.errors import Problem, RequestError
from tridock.experiment import Experiment, load_experiment
from tridock.gpus import Gpu, find_gpu, least_of
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.facts import States
from tridock.ops.runs import preflight
from tridock.ops.runs.prepared import Preflight, Prepared, Slots
from tridock.ops.runs.trackers import with_cluster_trackers
from tridock.plan import Assessment, Assumptions, Plan, assess
from tridock.plan.goodput import RESTART_S, Failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Prepared):
    """An experiment that may run on these slots, with its plan."""

    config: Path
    experiment: Experiment
    assessment: Assessment
    force: bool = False
    """Starts even if the plan does not fit."""

    @property
    def plan(self) -> Plan:
        return self.assessment.laid_out

    def check_nodes(self, client: NodeClient) -> Preflight:
        """Asks every node whether the run can start there, as :func:`preflight.check_nodes` does."""
        return preflight.check_nodes(client, self.config, self.experiment, self.plan)

    def with_files_of(self, workspace: Path) -> Self:
        """Returns it with its data's fingerprints. Raises :class:`RequestError` if this machine's files do not fit."""
        data = preflight.check_files(self.config, self.experiment, self.plan, workspace)
        return replace(self, manifest={**self.manifest, **data})


def prepare(
    config: Path,
    slots: Slots,
    assumptions: Assumptions,
    overrides: Sequence[str] = (),
    *,
    force: bool = False,
    run_id: str | None = None,
) -> Planned:
    """Loads the experiment and plans it on the slots. Contacts no host.

    Raises :class:`RequestError` with every problem: invalid fields, a plan that does not fit.
    """
    assessment = assess(load_experiment(config, overrides), slots, str(config), assumptions)
    assessment.checked(force=force)
    return prepared_from(assessment, slots, run_id, force=force)


def prepared_from(assessment: Assessment, slots: Slots, run_id: str | None = None, *, force: bool = False) -> Planned:
    """Returns the run of a legal plan. Raises :class:`RequestError` if it is one of another program."""
    experiment = assessment.resolved.experiment
    if experiment.program is not None:
        what, todo = "describes another program, which Tridock can plan but not start", "leave it out"
        raise RequestError(Problem(f"{assessment.source}: program", what, experiment.program, todo))
    return Planned(
        config=Path(assessment.source),
        experiment=experiment,
        assessment=assessment.resolved,
        slots=slots,
        run_id=run_id or run_folder.new_run_id(experiment.name),
        manifest={"config": assessment.source, "seed": experiment.train.seed, "tf32": experiment.train.tf32},
        force=force,
    )


def prepare_on(cluster: Cluster, config: Path, overrides: Sequence[str] = (), *, force: bool = False) -> Planned:
    """Returns the experiment prepared for the cluster's slots, as the settings describe them. Contacts no host."""
    prepared = prepare(config, cluster.slots, assumptions_for(cluster), overrides, force=force)
    return replace(prepared, experiment=with_cluster_trackers(prepared.experiment, cluster.settings))


def on_hosts_gpus(states: States, prepared: Planned) -> Planned:
    """Replans it for GPUs of the hosts, if the settings name none. Raises :class:`RequestError` if it does not fit."""
    assumptions = with_hosts_gpu(prepared.assessment.assumptions, states)
    assessment = assess(prepared.experiment, prepared.slots, str(prepared.config), assumptions)
    assessment.checked(force=prepared.force)
    return replace(prepared, assessment=assessment)


def slots_of(
    hosts: Path | None, include: str = "", exclude: str = "", nodes: int | None = None, gpus_per_node: int = 8
) -> tuple[Cluster | None, Slots]:
    """Returns the slots of a hostfile and its cluster, or the slots of ``nodes`` nodes and no cluster."""
    if hosts is not None and nodes is None:
        cluster = load_cluster(hosts, include=include, exclude=exclude)
        return cluster, cluster.slots
    if hosts is not None or nodes is None:
        got, todo = ("both" if hosts is not None else ""), "give a DeepSpeed hostfile, or a number of --nodes"
        raise RequestError(Problem("--hosts", "or --nodes must describe the cluster", got, todo))
    problems = []
    for option, number, most in (("--nodes", nodes, MOST_RANKS), ("--gpus-per-node", gpus_per_node, MOST_SLOTS)):
        if not 1 <= number <= most:
            what = "must be at least 1" if number < 1 else f"must be at most {most}"
            problems.append(Problem(option, what, str(number), "give a number"))
    RequestError.raise_for(problems)
    slots = {f"node-{number}": range(gpus_per_node) for number in range(nodes)}
    refuse_too_many(slots, "--nodes", "give fewer nodes, or fewer --gpus-per-node")
    return None, slots


def assumptions_for(
    cluster: Cluster | None,
    gpu: str | None = None,
    network_gbit: float | None = None,
    tflops: float | None = None,
    tokens: float | None = None,
    cost_per_gpu_hour: float | None = None,
) -> Assumptions:
    """Returns the plan's assumptions from command-line options, else the cluster's settings. Contacts no host."""
    _check_numbers(
        ("--network-gbit", network_gbit, LEAST_RATE, MOST_RATE, "400"),
        ("--tflops", tflops, LEAST_RATE, MOST_RATE, "150"),
        ("--tokens", tokens, 1, 1e20, "300e9"),
        ("--cost-per-gpu-hour", cost_per_gpu_hour, LEAST_RATE, MOST_RATE, "2.5"),
    )
    settings = None if cluster is None else cluster.settings
    chosen: Gpu | None = None
    if gpu is not None:
        chosen = find_gpu(gpu, "--gpu")
    elif settings is not None and settings.gpu is not None:
        chosen = find_gpu(settings.gpu, "gpu")
    if network_gbit is None and settings is not None:
        network_gbit = settings.network_gbit
    return Assumptions(chosen, network_gbit, tflops, tokens, cost_per_gpu_hour)


def failures_for(
    node_mtbf_hours: float | None, checkpoint_gb_s: float | None, restart_s: float | None
) -> Failures | None:
    """Returns the plan's assumptions about failures and storage, if it is to include them."""
    _check_numbers(
        ("--node-mtbf", node_mtbf_hours, LEAST_RATE, MOST_RATE, "6300"),
        ("--checkpoint-gb-s", checkpoint_gb_s, LEAST_RATE, MOST_RATE, "10"),
        ("--restart-time", restart_s, LEAST_RATE, MOST_RATE, "120"),
    )
    given = {"--node-mtbf": node_mtbf_hours, "--checkpoint-gb-s": checkpoint_gb_s}
    missing = [option for option, value in given.items() if value is None]
    if missing and (len(missing) == 1 or restart_s is not None):
        what = "failures are counted with both of --node-mtbf and --checkpoint-gb-s"
        raise RequestError([Problem(option, what, "", "give it too") for option in missing])
    if node_mtbf_hours is None or checkpoint_gb_s is None:
        return None
    return Failures(node_mtbf_hours, checkpoint_gb_s, RESTART_S if restart_s is None else restart_s)


def _check_numbers(*options: tuple[str, float | None, float, float, str]) -> None:
    """Checks the options' values against their minimum and maximum; the message has the example."""
    problems = []
    for option, value, least, most, example in options:
        if value is not None and not least <= value <= most:
            is_number = value > 0 and math.isfinite(value)
            what = f"must be from {least:g} to {most:g}" if is_number else "must be a number above 0"
            problems.append(Problem(option, what, f"{value:g}", f"give one, as in {example}"))
    RequestError.raise_for(problems)


def with_hosts_gpu(assumptions: Assumptions, states: States) -> Assumptions:
    """Returns the same assumptions; if no GPU is named, with what each of the hosts' GPUs has at least."""
    if assumptions.gpu is not None:
        return assumptions
    found = [state.gpu for state in states.values() if state.gpu is not None]
    return replace(assumptions, gpu=least_of(found)) if found else assumptions
