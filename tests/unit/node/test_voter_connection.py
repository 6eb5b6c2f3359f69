"""The connection to a voter: each answer belongs to its own request, however late it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tridock.contracts.supervision import Reach, Supervision
from tridock.contracts.vote import VoteRequest
from tridock.node.supervisor import voted_lease
from tridock.node.supervisor.voted_lease import Voter

# A login that takes a while, and a voter that answers each request with its token; one with a token of 9 never.
VOTER = """
import json, sys, time
print("login", file=open(sys.argv[1], "a"), flush=True)
time.sleep(float(sys.argv[2]))
for line in sys.stdin:
    while (token := json.loads(line)["token"]) == 9:
        time.sleep(1)
    print(json.dumps({"granted": True, "token": token, "node": "", "left_s": 0.0, "is_over": False}), flush=True)
"""


@pytest.fixture
def logins(tmp_path: Path) -> Path:
    return tmp_path / "logins"


@pytest.fixture
def voter(
    tmp_path: Path, logins: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Voter]:
    monkeypatch.setattr(voted_lease, "_ANSWER_S", 0.2)
    command = [sys.executable, "-c", VOTER, str(logins), str(request.param)]
    monkeypatch.setattr(Reach, "command", lambda self, node, *arguments: command)
    made = Voter(tmp_path, Supervision("n1", {"n1": (0,)}, (), 1, 30.0), "n2")
    yield made
    made.close()


def ask(voter: Voter, token: int) -> int | None:
    answer = voter.ask(VoteRequest(token, "n1-1", "n1", (0, 0)))
    return None if answer is None else answer.token


def until_answered(voter: Voter, token: int) -> int:
    """Asks with one token after another; returns the first that is answered."""
    deadline = time.monotonic() + 30
    while (answered := ask(voter, token)) is None:
        assert time.monotonic() < deadline
        token += 1
    assert answered == token
    return token


@pytest.mark.parametrize("voter", [0.5], indirect=True)
def test_an_answer_that_comes_late_belongs_to_an_earlier_request(voter: Voter, logins: Path) -> None:
    assert ask(voter, 10) is None
    token = until_answered(voter, 11)
    assert [ask(voter, token + 1), ask(voter, token + 2)] == [token + 1, token + 2]
    assert logins.read_text() == "login\n"


@pytest.mark.parametrize("voter", [0.0], indirect=True)
def test_a_connection_that_has_answered_and_falls_silent_is_made_anew(voter: Voter, logins: Path) -> None:
    until_answered(voter, 10)
    before = logins.read_text()
    assert ask(voter, 9) is None
    until_answered(voter, 20)
    assert logins.read_text() == before + "login\n"
