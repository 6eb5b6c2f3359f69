"""A run that is ended while it compiles an extension: its next attempt does not wait for the lock that is left."""

from __future__ import annotations

import os
import secrets
import signal
from pathlib import Path

import pytest

from tests.distributed.supervised import Make, Run
from tests.patience import WORK_S
from tridock.node.agent.evidence import evidence
from tridock.node.agent.observed_ranks import find_ranks
from tridock.node.probes.build_locks import locks_in
from tridock.node.probes.held_files import held
from tridock.triage import diagnose, facts_of

pytestmark = [pytest.mark.distributed, pytest.mark.full]

SCRIPT = (
    "export CXX={{folder}}/c++ TORCH_EXTENSIONS_DIR={{folder}}/extensions\n"
    "for rank in 0 1; do RANK=$rank WORLD_SIZE=2 {{python}} {program} {{folder}} {segment} & done\n"
    "wait -n && wait -n\n"
)
COMPILER = """\
#!/bin/sh
# The first compilation does not end; what torch asks before and the later ones do.
case " $* " in *" -c "*)
    if mkdir {folder}/compiles; then exec sleep 1000; fi
esac
exec c++ "$@"
"""


def made(make: Make, segment: Path, **fields: object) -> tuple[Run, Path]:
    """A run of two ranks that build an extension; the extension's folder."""
    program = Path(__file__).with_name("built.py")
    script = SCRIPT.format(program=program, segment=segment)
    run = make(script=script, observed=True, checkpoints=None, **fields)
    (run.folder / "added.cpp").write_text('extern "C" int added(int a, int b) { return a + b; }\n')
    (run.folder / "c++").write_text(COMPILER.format(folder=run.folder))
    (run.folder / "c++").chmod(0o755)
    return run, run.folder / "extensions" / "added"


@pytest.fixture
def segment() -> Path:
    return Path("/dev/shm", f"nccl-{secrets.token_hex(6)}")


def test_a_restart_builds_what_a_killed_attempt_had_begun(make: Make, segment: Path) -> None:
    run, extension = made(make, segment, max_restarts=1, hang_timeout_s=WORK_S)
    (run.folder / "extensions").mkdir()
    run.start()
    run.until(lambda: (run.folder / "compiles").exists() and (run.folder / "maps-1").exists(), WORK_S)
    run.until((run.folder / "maps-0").exists, WORK_S)
    ranks = find_ranks(run.folder.name)
    (waits,) = [rank for rank, it in ranks.items() if not held(locks_in([extension]), [it.pid])]
    os.kill(ranks[waits].pid, signal.SIGKILL)  # Tridock then ends the one that compiles
    assert run.end(WORK_S) == 0
    assert len(run.events("run_restarted")) == 1
    assert all((run.folder / f"built-{rank}").exists() for rank in (0, 1))
    assert not list(segment.parent.glob(f"{segment.name}*"))
    removed = " ".join(
        line for line in run.said() if line.startswith("tridock: removed what killed processes had left")
    )
    assert f"{extension}/lock" in removed


def test_a_lock_that_was_left_before_is_the_cause(make: Make, segment: Path) -> None:
    run, extension = made(make, segment, max_restarts=0, hang_timeout_s=20.0)
    extension.mkdir(parents=True)
    (extension / "lock").touch()
    run.start()
    assert run.end(WORK_S) == 4
    (event,) = run.events("rank_hung")
    assert (event["cause"], event["path"]) == ("build_locked", f"{extension}/lock")
    found = diagnose(facts_of({"here": evidence(run.folder)}, "here", 4))
    assert found.rule == "build-locked"
    assert f"rm -f -- {extension}/lock; " in found.remedy
    assert not list(segment.parent.glob(f"{segment.name}*"))
