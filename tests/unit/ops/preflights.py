"""Two nodes that answer what a launch asks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.experiments import make_plan
from tridock.cluster.settings import load_cluster
from tridock.contracts.supervision import contract
from tridock.experiment import Experiment
from tridock.ops.hosts.client import NodeClient
from tridock.ops.hosts.hosts import Hosts
from tridock.ops.runs.preflight import (
    Preflight,
    check_nodes,
)
from tridock.remote import Completed

BIN, IDX, VOCAB, MERGES = "data/t_document.bin", "data/t_document.idx", "data/vocab.json", "data/merges.txt"


GOOD: dict[str, Any] = {
    BIN: {"bytes": 100, "sha256": None},
    IDX: {"bytes": 42, "sha256": "aa"},
    VOCAB: {"bytes": 7, "sha256": "bb", "entries": 9},
    MERGES: {"bytes": 7, "sha256": "cc"},
}


def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, Any], head: Mapping[str, Any], **fields: Any
) -> Preflight:
    """The answer of two nodes: node-1 leads and holds what is GOOD, node-2 holds ``files``."""
    (tmp_path / "lab").write_text("node-1 slots=1\nnode-2 slots=1\n")
    client = NodeClient(Hosts(load_cluster(tmp_path / "lab")), {})
    asked: dict[str, tuple[str, ...]] = {}
    train, other = {"load": fields.pop("load", None)}, {"files": files, "loads": fields.pop("loads", True)}
    launch = fields

    def node_verb(node: str, *arguments: str, stdin: bytes | None, timeout: float) -> Completed:
        asked[node] = arguments
        read = {"data/t_document.json": {"vocab_size": 9, "tokens": 100, "bin_sha256": "ee"}}
        answer = {"files": GOOD, "read": read, "contract": contract(), **head} if node == "node-1" else other
        return Completed(0, json.dumps(answer).encode(), b"")

    monkeypatch.setattr(client, "node_verb", node_verb)
    experiment = Experiment.model_validate(
        {
            "name": "t",
            "engine": "megatron-deepspeed",
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "seq_length": 8},
            "batch": {"micro_batch_size": 1},
            "precision": "fp32",
            "data": {"data_path": "data/t_document", "vocab_file": VOCAB, "merge_file": MERGES},
            "train": {"train_iters": 1, **train},
            "launch": launch,
        }
    )
    try:
        plan = make_plan(experiment, client.cluster.slots, "t.yaml")
        return check_nodes(client, Path("t.yaml"), experiment, plan)
    finally:
        loads = () if train["load"] is None else (f"--load={train['load']}",)
        assert asked["node-2"] == (
            "preflight",
            "--needs=megatron-source",
            *loads,
            "--save=runs",
            "--",
            BIN,
            IDX,
            VOCAB,
            MERGES,
        )
        assert asked["node-1"][: 4 + len(loads)] == (
            "preflight",
            "--needs=megatron-source",
            *loads,
            "--save=runs",
            "--head",
        )
        assert "--read=data/t_document.json" in asked["node-1"]
        assert train["load"] is None or f"--load={train['load']}" in asked["node-1"]
        assert asked["node-1"][-5:] == ("--", BIN, IDX, VOCAB, MERGES)


SHARDED: dict[str, Any] = {
    "name": "t",
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8},
    "parallel": {"strategy": "fsdp"},
    "batch": {"micro_batch_size": 2},
    "data": {"data_path": "data/t_document"},
    "train": {"train_iters": 1},
}
