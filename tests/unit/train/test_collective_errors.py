"""Errors of collectives: what is a consequence, and how NCCL's own message reaches triage. The texts are on record."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tridock.contracts.events import Cause
from tridock.train.rank.collective_errors import collective_error, reason
from tridock.triage import Facts, diagnose
from tridock.triage.first_failure import FirstFailure

IN = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268,"
STACK = "\nException raised from getNCCLComm at /pytorch/x.cpp:1287 (most recent call first):\nframe #0: c10::Error"
SYSTEM = "System call (e.g. socket, malloc) or external library call failed or device error"

NO_INTERFACE = f"""\
{IN} internal error - please report this issue to the NCCL developers, NCCL version 2.21.5
ncclInternalError: Internal check failed.
Last error:
Bootstrap : no socket interface found"""
DUPLICATE = f"""\
{IN} invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.20.5
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10{STACK}"""
NO_ROUTE = f"""\
{IN} unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.18.6
ncclSystemError: {SYSTEM}.
Last error:
socketStartConnect: Connect to 198.51.100.14<52822> failed : No route to host"""
SHARED_MEMORY = f"""\
{IN} unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclSystemError: {SYSTEM}.
Last error:
Error while creating shared memory segment /dev/shm/nccl-tDR2kq (size 9637888)"""
SILENT = f"""\
{IN} unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
{STACK}"""
GONE = f"""\
{IN} remote process exited or there was a network error, NCCL version 2.21.5
ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.
Last error:
socketProgressOpt: Call to recv from 203.0.113.3<33759> failed : Connection reset by peer"""
REMOTE = "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely"
WATCHDOG = """\
[rank3]:[E602 11:18:47.489301002 ProcessGroupNCCL.cpp:629] [Rank 3] Watchdog caught collective operation timeout: \
WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600060 milliseconds \
before timing out.
[rank3]:[W602 11:18:52.489301002 ProcessGroupNCCL.cpp:2111] [PG ID 1 PG GUID 1 Rank 3] timed out after waiting for \
60000ms flight recorder dumps to finish.
[rank3]:[E602 11:18:52.566602063 ProcessGroupNCCL.cpp:1896] [PG ID 1 PG GUID 1 Rank 3] Process group watchdog thread \
terminated with exception: [Rank 3] Watchdog caught collective operation timeout
"""


@pytest.mark.parametrize(
    ("text", "cause", "got", "rule"),
    [
        (
            NO_INTERFACE,
            Cause.NCCL_FAILED,
            "Bootstrap : no socket interface found (ncclInternalError: Internal check failed)",
            "no-such-interface",
        ),
        (
            DUPLICATE,
            Cause.NCCL_FAILED,
            "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10 "
            "(ncclInvalidUsage: This usually reflects invalid usage of NCCL library)",
            "duplicate-gpu",
        ),
        (
            NO_ROUTE,
            Cause.NCCL_FAILED,
            "socketStartConnect: Connect to 198.51.100.14<52822> failed : No route to host "
            f"(ncclSystemError: {SYSTEM})",
            "nccl-cannot-connect",
        ),
        (
            SHARED_MEMORY,
            Cause.NCCL_FAILED,
            "Error while creating shared memory segment /dev/shm/nccl-tDR2kq (size 9637888) "
            f"(ncclSystemError: {SYSTEM})",
            "shared-memory-too-small",
        ),
        (SILENT, Cause.NCCL_FAILED, "ncclUnhandledCudaError: Call to CUDA function failed.", "nccl-error"),
        (
            GONE,
            Cause.PEER_LOST,
            f"socketProgressOpt: Call to recv from 203.0.113.3<33759> failed : Connection reset by peer ({REMOTE})",
            "peer-lost",
        ),
    ],
    ids=["no interface", "duplicate GPU", "no route", "shared memory", "no last error", "peer gone"],
)
def test_nccls_message_reaches_triage(text: str, cause: Cause, got: str, rule: str) -> None:
    problem = collective_error(dist.DistBackendError(text))
    assert problem is not None
    assert (problem.cause, problem.got) == (cause, got)
    assert reason(dist.DistBackendError(text)) == got  # what the doctor's all-reduce prints
    event = {
        "event": "run_failed", "rank": 1, "time": "2026-01-02T03:04:05.678+00:00", "cause": cause,
        "problem": problem.message, "consequence": cause == Cause.PEER_LOST,
    }  # fmt: skip
    found = diagnose(Facts(4, FirstFailure(1, "b", str(problem), event=event), str(problem)))
    assert found.rule == rule
    assert "{" not in found.cause + found.remedy


def test_a_failure_of_nccl_has_nccls_message() -> None:
    assert str(collective_error(dist.DistBackendError(DUPLICATE))) == (
        "collective: NCCL failed; got Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 10 "
        "(ncclInvalidUsage: This usually reflects invalid usage of NCCL library); "
        "set NCCL_DEBUG: INFO in the experiment's env, and read the lines before this one"
    )


def test_a_watchdog_that_ends_the_rank_is_a_timeout_and_the_flight_recorders_name_who_is_missing() -> None:
    event = {"event": "rank_died", "rank": 3, "cause": Cause.RANK_SIGNALLED}
    failure = FirstFailure(3, "b", "was ended by SIGABRT", seen=True, event=event)
    stuck = "rank 2 on a came to collective 1579, the others to 1580"
    found = diagnose(Facts(4, failure, "was ended by SIGABRT", log=WATCHDOG, stuck=stuck))
    assert found.rule == "collective-timeout"
    assert found.cause.endswith(stuck)


@pytest.mark.parametrize(
    ("text", "got"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [192.0.2.2]:41869: Connection "
            "reset by peer. This is typically caused by a remote worker hanging or bugs in the application.",
            "Read error [192.0.2.2]:41869: Connection reset by peer",
        ),
        (
            "[x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:30611. This is typically caused "
            "by a remote worker crashing.",
            "Connection closed by peer [192.0.2.2]:30611",
        ),
        ("NCCL error: remote process exited or there was a network error", None),
    ],
)
def test_a_lost_rank(text: str, got: str | None) -> None:
    problem = collective_error(RuntimeError(text))
    assert problem is not None
    assert problem.cause == Cause.PEER_LOST
    assert str(problem) == (
        f"collective: lost the connection to another rank; got {got or text}; "
        "look for the rank that failed first: its message is in logs/rank-<N>.log"
    )


def test_any_other_error_is_no_error_of_a_collective() -> None:
    assert collective_error(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None
