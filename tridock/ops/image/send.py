"""Brings an image to hosts that lack it: from its registries, else the layers that they lack from here."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tridock.cluster.transports import SshTransport
from tridock.command import Command
from tridock.errors import ClusterError, Problem, count
from tridock.ops.hosts.session import Session
from tridock.ops.image.archive import Archive, ImageParts, digest_of
from tridock.ops.image.distribute import Distribution, inline_bytes
from tridock.ops.image.export import export_image, not_written
from tridock.ops.image.registries import base_of, pull, through_registry
from tridock.ops.image.schedule import OPERATOR
from tridock.ops.image.transfer import Delivery, Inventory
from tridock.progress import bars
from tridock.remote import LocalHost


def distribute(session: Session, image_id: str, nodes: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Uses the registry of the settings if there is one; else queries ``nodes`` and sends what they cannot pull.

    Returns the layers to keep here: hosts that take only whole images need them after every edit.
    """
    transport = session.transport
    assert isinstance(transport, SshTransport)  # with Compose the hosts' engine is the operator's
    paths = {
        node: (f"{arrivals}/{folder.name}", notes)
        for node in nodes
        for arrivals, notes in [transport.image_paths(node, session.states()[node].facts)]
    }
    if session.cluster.settings.registry is not None:
        through_registry(session, image_id, {node: notes for node, (_, notes) in paths.items()})
        return ()
    layers = Command.of("docker", "image", "inspect", "--format", "{{json .RootFS.Layers}}", image_id)
    diff_ids = json.loads(LocalHost().run(layers).checked(image_id).stdout)
    deliveries = {node: Delivery(node, session.hosts[node], *paths[node]) for node in nodes}

    def ask(nodes: tuple[str, ...]) -> dict[str, Inventory]:
        return session.each(lambda node, _: deliveries[node].inventory(diff_ids, _note), only=nodes)

    inventories = ask(nodes)
    if pulled := _pull_base(session, diff_ids, inventories):
        inventories |= ask(pulled)
    _note_refusals(inventories)
    parts, incomplete = _send(session, diff_ids, deliveries, inventories, folder, image_id)
    if incomplete:
        again = {node: replace(inventories[node].whole(reason), files={}) for node, reason in incomplete.items()}
        _note_refusals(again)
        inventories |= again
        parts, _ = _send(session, diff_ids, {node: deliveries[node] for node in again}, again, folder, image_id)
    return parts.layers if any(inventory.layers_refused for inventory in inventories.values()) else ()


def _note_refusals(inventories: Mapping[str, Inventory]) -> None:
    for node, inventory in inventories.items():
        if inventory.layers_refused:
            _note(f"{node}: gets the whole image, not only the layers that it lacks: {inventory.layers_refused}")


def _pull_base(session: Session, diff_ids: Sequence[str], inventories: Mapping[str, Inventory]) -> tuple[str, ...]:
    """Makes the hosts without the base image pull it from its registry; returns those that succeeded."""
    policy = session.cluster.settings.image_base
    base = base_of(diff_ids) if policy != "send" else None
    if base is None:
        if policy == "pull" and not all(inventory.present_layers(diff_ids) for inventory in inventories.values()):
            todo = "docker pull the base image here and build again, or set image_base: auto"
            raise ClusterError(
                Problem("image_base: pull", "the local Docker engine has no base image from a registry", "", todo)
            )
        return ()
    nodes = tuple(
        node
        for node, inventory in inventories.items()
        if not inventory.layers_refused and inventory.present_layers(diff_ids) < base.layers
    )
    if not nodes:
        return ()
    _note(f"{', '.join(nodes)}: docker pull {base.reference}")
    failed = pull(session, base.reference, nodes)
    if failed and policy == "pull":
        todo = f"make docker pull {base.reference} work there, or set image_base: auto"
        raise ClusterError(Problem(node, "cannot pull the base image", reason, todo) for node, reason in failed.items())
    for reason in dict.fromkeys(failed.values()):
        names = ", ".join(node for node, own in failed.items() if own == reason)
        _note(f"{names}: gets the base image from here, it cannot pull it: {reason}")
    return tuple(node for node in nodes if node not in failed)


def _send(
    session: Session,
    diff_ids: Sequence[str],
    deliveries: Mapping[str, Delivery],
    inventories: Mapping[str, Inventory],
    folder: Path,
    image_id: str,
) -> tuple[ImageParts, dict[str, str]]:
    """Exports the layers that any host lacks, and sends them to all hosts.

    Returns also the nodes whose image store could not complete the image, and why.
    """
    image = session.cluster.settings.image
    present = {node: inventory.present_layers(diff_ids) for node, inventory in inventories.items()}
    with bars(quiet=session.quiet) as begin:
        bar = begin("compress the layers", None)
        try:
            zstd = all(inventory.zstd for inventory in inventories.values())
            parts = export_image(image, diff_ids, min(present.values()), folder, bar, _note, zstd=zstd)
        except OSError as error:
            raise not_written(image, folder, str(error)) from None
        bar.end()

        def arrived(node: str, archive: Archive) -> None:
            if not session.quiet:
                layers = count(archive.layers, "layer")
                print(f"{node}: got {layers} of the image, {archive.size / 1e6:,.1f} MB")

        inline = inline_bytes(len(deliveries))
        made: dict[tuple[object, ...], Archive] = {}
        archives: dict[str, Archive] = {}
        for node, inventory in inventories.items():
            kind = present[node], inventory.containerd, inventory.blobs
            if kind not in made:
                own = parts.with_blobs(inventory.blobs) if inventory.containerd else parts
                made[kind] = own.archive(image, present[node], inline)
            archives[node] = made[kind]
        ids = {node: (parts.ids[0], digest_of(archive.manifest), image_id) for node, archive in archives.items()}
        distribution = Distribution(session, deliveries, archives, ids, begin, _note, arrived)
        distribution.run(parts, present, inventories)
    if (between := distribution.from_hosts()) and not session.quiet:
        here = distribution.sent[OPERATOR] / 1e6
        print(f"{here:,.1f} MB of layers went out from here, {between / 1e6:,.1f} MB from host to host")
    return parts, distribution.incomplete


def _note(text: str) -> None:
    print(text, file=sys.stderr)
