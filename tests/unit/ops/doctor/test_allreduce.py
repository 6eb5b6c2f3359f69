"""The command of the all-reduce, what the ranks say, and who is to blame."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tridock.ops.doctor.allreduce import (
    Attempts,
    Group,
    blame,
    reduce_findings,
)
from tridock.ops.rank_group import Reduced, parse, reduce_command
from tridock.remote import Completed

GOOD = Reduced({"ranks": 2})
PAIR = "the all-reduce of these two fails"


def test_pdsh_starts_it_on_several_nodes_and_nobody_on_one() -> None:
    argv = reduce_command({"host-1": (0, 1), "host-2": (0,)}, "192.0.2.1", 20001, 40)
    assert argv[:10] == ("pdsh", "-S", "-R", "ssh", "-f", "1024", "-u", "42", "-w", "host-1,host-2")
    assert argv[10:15] == ("python", "-P", "-m", "tridock.train.allreduce", "--world")
    assert json.loads(base64.urlsafe_b64decode(argv[15])) == {"host-1": [0, 1], "host-2": [0]}
    assert " ".join(argv[16:]) == "--node-rank %n --master-addr 192.0.2.1 --master-port 20001 --limit 40"
    alone = reduce_command({"host-1": (0, 1)}, "192.0.2.1", 20001, 40)
    assert (alone[0], alone[7]) == ("python", "0")


def done(out: str, err: str = "", code: int = 0) -> Completed:
    return Completed(code, out.encode(), err.encode())


def test_what_the_ranks_say_is_read() -> None:
    assert parse(done('node-2: noise {\nhost-1: {"ranks": 4, "seconds": 0.1}\n'), 40) == Reduced(
        {"ranks": 4, "seconds": 0.1}
    )
    failed = 'host-2: {"rank": 3, "error": "Connection closed by peer; reset"}\n'
    assert parse(done(failed, "pdsh@host-1: host-2: ssh exited with exit code 1\n", 1), 40) == Reduced(
        None, "rank 3 on host-2: Connection closed by peer, reset"
    )
    assert parse(done('{"rank": 1, "error": "no"}\n', code=1), 40).error == "rank 1: no"
    assert parse(done("", "host-2: bash: python: not found\n", 127), 40).error == "host-2: bash: python: not found"
    assert parse(done("", "pdsh@a: b: ssh exited with exit code 142\n", 142), 40).error == "no end within 40 s"
    # A result beside a node that failed is none.
    assert parse(done('host-1: {"ranks": 4}\n', "host-2: killed\n", 137), 40) == Reduced(None, "host-2: killed")


def world(*broken: str) -> Attempts:
    """Nodes of which the broken ones are well alone, and reach nobody."""

    def attempts(groups: Sequence[Group]) -> dict[Group, Reduced]:
        return {few: Reduced(None, "error") if len(few) > 1 and set(few) & set(broken) else GOOD for few in groups}

    return attempts


@given(st.integers(3, 9), st.data())
def test_one_node_that_reaches_nobody_is_named(count: int, data: st.DataObject) -> None:
    nodes = [f"host-{number}" for number in range(count)]
    bad = data.draw(st.sampled_from(nodes))
    (found,) = blame(nodes, world(bad))
    if bad == nodes[0]:
        what = "the all-reduce fails with every other node, which pass without it"
        assert found == ((bad,), what, "error")
    else:
        assert found == ((nodes[0], bad), PAIR, "error")


def test_a_node_whose_own_ranks_fail_is_tried_with_nobody() -> None:
    tried: list[Group] = []

    def attempts(groups: Sequence[Group]) -> dict[Group, Reduced]:
        tried.extend(groups)
        return {few: Reduced(None, "no /dev/shm") if "b" in few else GOOD for few in groups}

    assert blame(["a", "b", "c"], attempts) == [(("b",), "the all-reduce fails among its own ranks", "no /dev/shm")]
    assert tried == [("a",), ("b",), ("c",), ("a", "c")]


def test_two_nodes_are_named_together() -> None:
    assert blame(["a", "b"], world("b")) == [(("a", "b"), PAIR, "error")]


def test_all_pairs_are_named_where_nobody_reaches_anybody() -> None:
    found = blame(["a", "b", "c"], world("a", "b", "c"))
    assert found == [(("a", "b"), PAIR, "error"), (("a", "c"), PAIR, "error")]


def test_nobody_is_blamed_where_all_pairs_pass() -> None:
    assert blame(["a", "b", "c"], world()) == []


def test_what_is_said_of_it() -> None:
    why = "the first step of a run would hang or fail here"
    look = "look at their network with NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL in env"
    alone = "the all-reduce fails among its own ranks"
    blamed = [(("b",), alone, "no"), (("c",), alone, "no"), (("a", "d"), PAIR, ""), (("a",), "all", "why")]
    found = reduce_findings(["a", "b", "c", "d"], "no end", blamed)
    assert [finding.why for finding in found] == [why] * 3
    assert [str(finding.problem) for finding in found] == [
        f"b, c: {alone}; got no; fix that there, or restart its container: tridock down, then tridock up",
        f"a and d: {PAIR}; got no end; {look}",
        f"a: all; got why; {look}",
    ]
    assert [str(finding) for finding in reduce_findings(["a", "b", "c"], "no end", [])] == [
        "fail  a, b, c: the all-reduce of all 3 fails, and each node alone and each pair with the head passes; "
        f"got no end; {look}"
    ]
