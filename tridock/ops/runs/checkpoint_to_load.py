"""The checkpoint that a run continues from: its files may be on nodes of the cluster that are not the run's."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from tridock.contracts.checkpoints import checkpoint_name
from tridock.contracts.run_folder import WORKSPACE
from tridock.errors import ClusterError, count
from tridock.experiment import CommandExperiment, Experiment
from tridock.ops.hosts.client import NodeClient, everywhere
from tridock.ops.runs.saved_checkpoints import SavedCheckpoints
from tridock.progress import size_text


def saved_in(client: NodeClient, load: str) -> SavedCheckpoints:
    """Returns what the nodes of ``client`` that are up have in ``load``, or of it if it is one checkpoint."""
    place = PurePosixPath(WORKSPACE, load)
    with TemporaryDirectory() as folder:
        return SavedCheckpoints.look(client, load, place.parent if checkpoint_name(place.name) else place, Path(folder))


def lacking_files(client: NodeClient, experiment: Experiment | CommandExperiment) -> Callable[[], None] | None:
    """Returns what brings to a run's nodes the files of the checkpoint it continues from that only other nodes of its
    hostfile have; None if there are none.

    A node that is not the run's and does not tell is left out, with a warning.
    """
    if isinstance(experiment, CommandExperiment) or not client.hosts.transport.separate_hosts:
        return None
    train, nodes = experiment.train, tuple(client.cluster.slots)
    if train.load is None or train.pretrained is not None or len(nodes) == len(client.cluster.nodes):
        return None
    try:
        saved = saved_in(everywhere(client), train.load)
    except ClusterError as error:
        print(f"warning: what other nodes than the run's have of {train.load} is not known: {error}", file=sys.stderr)
        return None
    name = PurePosixPath(train.load).name
    given = next((it.iteration for it in saved.by_iteration.values() if it.name == name), None)
    iteration = given if checkpoint_name(name) else saved.newest
    if iteration not in saved.whole or not (files := saved.lacking_on(nodes, iteration)):
        return None
    it = saved.by_iteration[iteration]
    if not client.hosts.quiet:
        said = f"{count(len(files), 'file')}, {size_text(it.size(files))}, of other nodes than the run's are needed"
        print(f"{train.load}: iteration {iteration}: {said}", file=sys.stderr)
    return partial(saved.bring_to, nodes, iteration)
