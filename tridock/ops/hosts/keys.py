"""Keys on the nodes: made on the operator's side, pushed over connections that are already trusted."""

from __future__ import annotations

from tridock.contracts import run_folder
from tridock.ops.hosts.key_store import KeyStore
from tridock.ops.hosts.session import Session
from tridock.remote import Host


def distribute_keys(session: Session, *, rotate: bool = False) -> KeyStore:
    """Makes what is missing (or, with ``rotate``, everything anew) and puts each node's files on its host.

    A running node's sshd is told to read its host key again; its sessions, and so its runs, go on.
    """
    store = KeyStore(session.cluster)
    if rotate:
        store.rotate()
    else:
        store.ensure()
    states = session.states()

    def push(node: str, host: Host) -> None:
        files = store.node_files(node)
        if session.transport.separate_hosts:  # on this machine the containers mount the store's own folders
            host.put_tree(files, session.transport.secrets(node, states[node].facts), mode=0o600)
        container = states[node].container
        if container is not None and container.running:
            reload = session.inside(node, "sh", "-c", f"kill -HUP $(cat {run_folder.SSHD_PID})")
            host.run(reload, timeout=30.0).checked(node)

    session.each(push)
    return store
