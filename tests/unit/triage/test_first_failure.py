"""Which rank failed first, out of what the nodes hold of events.jsonl."""

from __future__ import annotations

import json

import pytest

from tridock.triage.first_failure import FirstFailure, evidence_beside, first_failure, memory_kills

NODES = {0: "a", 1: "a", 2: "b", 3: "b"}


def failed(rank: int, second: int, reason: str = "boom", **kind: object) -> str:
    event = {"time": f"2026-01-01T00:00:{second:02d}.000+00:00", "event": "run_failed", "rank": rank, "reason": reason}
    return json.dumps({**event, **kind}) + "\n"


def test_a_rank_that_lost_another_is_not_first_whatever_its_clock_says() -> None:
    lost = failed(0, 1, "collective: lost the connection to another rank", consequence=True)
    own = failed(3, 9, "RuntimeError('boom')\nand a trace")
    expected = FirstFailure(3, "b", "RuntimeError('boom')")
    assert first_failure({"a": lost, "b": own}, NODES) == expected
    assert first_failure({"a": lost + own, "b": lost + own}, NODES) == expected
    assert str(expected) == "rank 3 on b first: RuntimeError('boom')"


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ((0, 1, 3), "rank 2 on b first: ended without a message "),
        ((0, 1), "rank 2 on b first: ended without a message, as did 3 "),
    ],
)
def test_a_rank_that_a_signal_ended_says_nothing_itself(lost: tuple[int, ...], message: str) -> None:
    text = (
        "collective: lost the connection to another rank; got Connection reset by peer;"
        " look for the rank that failed first"
    )
    found = first_failure({"a": "".join(failed(rank, rank, text, consequence=True) for rank in lost)}, NODES)
    assert str(found) == f"{message}(killed by a signal, perhaps because memory ran out: see dmesg there)"


def test_of_a_message_of_ours_its_beginning_is_enough() -> None:
    problem = {"where": "data.data_path", "what": "no such file", "got": "x.bin", "todo": "bring the data here"}
    assert (
        str(first_failure({"a": failed(2, 1, "whatever it says", problem=problem)}, NODES))
        == "rank 2 on b first: data.data_path: no such file"
    )


def test_of_two_the_earlier() -> None:
    assert first_failure({"a": failed(1, 5), "b": failed(2, 4)}, NODES) == FirstFailure(2, "b", "boom")


def test_what_all_agreed_on_is_nobodys() -> None:
    found = first_failure({"a": failed(0, 1, "train.load: holds no checkpoint", agreed=True), "b": ""}, NODES)
    assert str(found) == "every rank: train.load: holds no checkpoint"


@pytest.mark.parametrize("content", ["", '{"event": "run_started"}\n', '{"event": "run_fai', "[1]\n\ufffd\n"])
def test_no_failure_on_record(content: str) -> None:
    assert first_failure({"a": content}, NODES) is None


def test_a_rank_without_a_reason() -> None:
    found = first_failure({"a": failed(7, 1, "")}, NODES)
    assert str(found) == "rank 7 on an unknown node first: no reason on record"


def seen(event: str, second: int, **fields: object) -> str:
    found = {"time": f"2026-01-01T00:00:{second:02d}.000+00:00", "event": event, **fields}
    return json.dumps(found) + "\n"


DIED = {"rank": 3, "node": "b", "reason": "was ended by SIGKILL after iteration 7"}


def test_what_the_supervisor_saw_comes_before_what_ranks_said() -> None:
    lost = failed(0, 1, "collective: lost the connection to another rank", consequence=True)
    found = first_failure({"a": lost + failed(1, 1) + seen("rank_died", 2, **DIED), "b": lost}, NODES)
    assert found is not None
    assert (found.rank, str(found)) == (3, "rank 3 on b was ended by SIGKILL after iteration 7")


@pytest.mark.parametrize(
    ("event", "fields", "said"),
    [
        ("rank_hung", {"rank": 1, "node": "a", "reason": "hangs; no progress"}, "rank 1 on a hangs; no progress"),
        ("node_lost", {"node": "b", "reason": "has not answered for 20 s"}, "b has not answered for 20 s"),
        ("launcher_ended", {"reason": "was ended by SIGKILL"}, "the launcher was ended by SIGKILL"),
        ("head_lost", {"node": "b", "reason": "heard nothing from the head"}, "b heard nothing from the head"),
    ],
)
def test_every_observation_has_its_text(event: str, fields: dict[str, object], said: str) -> None:
    assert str(first_failure({"a": seen(event, 1, **fields)}, NODES)) == said


def test_a_node_that_lost_the_head_is_heard_last() -> None:
    fields = {"node": "b", "reason": "heard nothing from the head for 25 s"}
    found = first_failure({"a": seen("head_lost", 1, **fields) + seen("rank_died", 2, **DIED)}, NODES)
    assert found is not None
    assert found.rank == 3


def test_a_node_that_ended_its_ranks_explains_the_launcher_s_end() -> None:
    lost = seen("head_lost", 1, node="b", reason="heard nothing from the head for 20 s")
    found = first_failure({"a": lost + seen("launcher_ended", 2, reason="ended with exit code 4")}, NODES)
    assert str(found) == "b heard nothing from the head for 20 s"


def test_a_rank_that_was_asked_to_end_is_not_first() -> None:
    def died(rank: int, cause: str, reason: str) -> str:
        return json.dumps({"event": "rank_died", "rank": rank, "node": "n", "cause": cause, "reason": reason}) + "\n"

    asked, own = died(0, "rank_signalled", "was ended by SIGTERM"), died(2, "rank_exited", "exited with code 1")
    program = json.dumps({"event": "node_failed", "node": "b", "cause": "program_failed", "reason": "failed"}) + "\n"
    ranks = [first_failure(files, NODES) for files in ({"a": program + asked, "b": own}, {"a": program + asked})]
    assert [found and found.rank for found in ranks] == [2, 0]


def test_only_the_last_attempt_counts() -> None:
    head = seen("rank_died", 1, **DIED) + seen("run_restarted", 5, attempt=1, iteration=0, reason="x")
    assert first_failure({"a": head, "b": failed(2, 1)}, NODES) is None
    assert first_failure({"a": head, "b": failed(2, 1, "first") + failed(2, 9)}, NODES) == FirstFailure(2, "b", "boom")


def test_kills_for_memory_are_those_of_the_last_attempt() -> None:
    def event(name: str, second: int, **fields: object) -> str:
        return json.dumps({"time": f"2026-01-01T00:00:{second:02d}.000+00:00", "event": name, **fields}) + "\n"

    head = event("memory_kills", 1, node="a", processes=3) + event("run_restarted", 2)
    head += event("memory_kills", 3, node="b", processes=1) + event("memory_kills", 3, node="c", processes="many")
    assert memory_kills({"a": head}) == {"b": 1}


def test_a_clock_that_differs_on_record_changes_who_was_first() -> None:
    ahead = failed(1, 9, "late by its own clock")
    other = failed(2, 3, "early by its own clock")
    clock = {"time": "2026-01-01T00:00:10.000+00:00", "event": "clock_differs", "node": "a", "seconds": 8.0}

    def first(**changes: object) -> FirstFailure | None:
        return first_failure({"a": ahead + json.dumps({**clock, **changes}) + "\n", "b": other}, NODES)

    assert first() == FirstFailure(1, "a", "late by its own clock")
    for changes in ({"seconds": 5.0}, {"seconds": "many"}, {"seconds": 1e300}, {"node": "b"}, {"event": "link_faults"}):
        assert first(**changes) == FirstFailure(2, "b", "early by its own clock"), changes
    assert evidence_beside({"a": json.dumps(clock)}) == ("the clock of a is 8 s ahead of the head's",)


def test_links_that_went_down_are_evidence_beside() -> None:
    link = {"time": "t", "event": "link_faults", "node": "b", "link": "eth0", "downs": 1}
    text = json.dumps(link) + "\n"
    assert evidence_beside({"a": text, "b": text}) == ("eth0 of b went down 1 time",)
    for downs in (0, "x", None):
        assert evidence_beside({"a": json.dumps({**link, "downs": downs})}) == ()
