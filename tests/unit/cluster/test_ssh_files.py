"""SSH inside a cluster: every node's ssh_config has all options, and they stand in one place."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.sources import nodes
from tridock.cluster.keys import ssh_config
from tridock.cluster.settings import load_cluster
from tridock.contracts import cluster_ssh

SOURCE = Path(__file__).parents[3] / "tridock"


def test_the_ssh_config_of_a_node_has_every_option(tmp_path: Path) -> None:
    (tmp_path / "lab").write_text("a slots=1\nb slots=1\n")
    lines = ssh_config(load_cluster(tmp_path / "lab")).splitlines()
    assert [line for name, value in cluster_ssh.CONFIG.items() if (line := f"    {name} {value}") not in lines] == []


def test_no_other_module_sets_an_ssh_option() -> None:
    options = (*cluster_ssh.CONFIG, "ProxyCommand", "Compression", "TCPKeepAlive")
    found = [
        f"{path.relative_to(SOURCE)}: {node.value}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path not in (SOURCE / "contracts" / "cluster_ssh.py", SOURCE / "remote" / "ssh.py")  # within; to the hosts
        for node in nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(options)
    ]
    assert found == []
