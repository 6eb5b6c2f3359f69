"""Which run a `tridock reproduce` is about; the rest needs nodes (tests/integration/test_reproduce.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tridock.errors import ClusterError, Problem, RequestError
from tridock.ops.hosts.session import Session
from tridock.ops.runs import reproduce_remote


@pytest.mark.parametrize("error", [RequestError, ClusterError])
def test_a_run_that_was_fetched_before_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RequestError] | type[ClusterError]
) -> None:
    def unknown(*given: object, **named: object) -> None:
        raise error(Problem("--run", "is not a run of this cluster", "a-1", "see tridock status"))

    monkeypatch.setattr(reproduce_remote, "choose_run", unknown)
    (tmp_path / "lab").write_text("node-1 slots=1\n")
    session = Session.open(tmp_path / "lab")
    for wanted in ("a-1", None):
        with pytest.raises(error) as caught:
            reproduce_remote.original_of(session, wanted, tmp_path / "runs")
        assert str(caught.value) == "--run: is not a run of this cluster; got a-1; see tridock status"
    (tmp_path / "runs" / "a-1").mkdir(parents=True)
    assert reproduce_remote.original_of(session, "a-1", tmp_path / "runs") == tmp_path / "runs" / "a-1"
