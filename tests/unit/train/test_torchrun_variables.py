"""The variables of `tridock run --per node`, as torchrun reads them."""

from __future__ import annotations

import pytest
from torch.distributed.run import get_args_parser

from tridock.launchers.programs import Place, on_node


def test_torchrun_takes_its_nodes_and_its_rendezvous_from_the_variables_of_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place({"a": (0, 1), "b": (0, 1)}, 1, "192.0.2.1", 29500, "/r/hostfile")
    argv = on_node(("bash", "run.sh"), place, "node")
    for argument in argv[1 : argv.index("bash")]:
        monkeypatch.setenv(*argument.split("=", 1))
    found = get_args_parser().parse_args(["train.py"])
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == ("2", 1, "2")
    assert (found.master_addr, found.master_port) == ("192.0.2.1", 29500)
