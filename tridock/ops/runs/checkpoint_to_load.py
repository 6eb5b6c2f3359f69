"""The checkpoint that a run continues from: its files may be on nodes of the cluster that are not the run's."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from tridock.contracts.checkpoints import checkpoint_name
from tridock.contracts.run_folder import WORKSPACE
from tridock.errors import count
from tridock.experiment import CommandExperiment, Experiment
from tridock.ops.hosts.client import NodeClient, everywhere
from tridock.ops.runs.saved_checkpoints import SavedCheckpoints
from tridock.progress import size_text


def saved_in(client: NodeClient, load: str) -> SavedCheckpoints:
    """Returns what the nodes of the hostfile that are up have in ``load``, or of it if it is one checkpoint.

    Of one iteration that was saved twice, the save counts that the run's nodes, those of ``client``, have. Raises
    :class:`ClusterError` with those of them that do not tell; of another node that does not it prints a warning.
    """
    place, every = PurePosixPath(WORKSPACE, load), everywhere(client)
    if checkpoint_name(place.name):
        place = place.parent
    nodes = client.cluster.slots
    with TemporaryDirectory() as folder:
        return SavedCheckpoints.look(every, load, place, Path(folder), nodes, every.hosts.keys() - nodes.keys())


def lacking_files(client: NodeClient, experiment: Experiment | CommandExperiment) -> Callable[[], None] | None:
    """Returns what brings to a run's nodes the files of the checkpoint it continues from that only other nodes of its
    hostfile have; None if there are none.
    """
    if isinstance(experiment, CommandExperiment) or not client.hosts.transport.separate_hosts:
        return None
    train, nodes = experiment.train, tuple(client.cluster.slots)
    if train.load is None or train.pretrained is not None or len(nodes) == len(client.cluster.nodes):
        return None
    saved = saved_in(client, train.load)
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
