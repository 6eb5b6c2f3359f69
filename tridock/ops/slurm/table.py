"""The table of ``tridock slurm status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from tridock.contracts.run_state import RunState


def as_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The runs, oldest first."""
    table = Table(Column("run", no_wrap=True), "job", "state", "nodes", "time", "step", "loss")
    for row in rows:
        why = f"exit code {row['exit_code']}" if row["state"] == RunState.FAILED else row["reason"]
        table.add_row(
            row["run"],
            row["job"],
            f"{row['state']} ({why})" if why and why != "None" else row["state"],
            row["nodes"],
            f"{row['elapsed']} of {row['limit']}" if row["elapsed"] else "",
            f"{row['iteration'] or 0}/{row['train_iters']}" if row["train_iters"] else "",
            "" if row["loss"] is None else f"{row['loss']:.4f}",
        )
    return table
