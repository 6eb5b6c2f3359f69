"""A test session removes what killed ones have left on the engine, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import uuid

from tests.integration.support import ROOT, execute, killed_sessions, remove_everything, succeed

HOLD = "from tests.integration.support import hold_session; hold_session(); print('held', flush=True); input()"


def test_what_a_killed_session_left_is_removed_and_only_that(docker: str) -> None:
    sessions = {uuid.uuid4().hex[:8]: "killed", uuid.uuid4().hex[:8]: "alive", uuid.uuid4().hex[:8]: "unknown"}
    names = {what: f"tridock-test-{session}" for session, what in sessions.items()}
    holders = {}
    try:
        for session, what in sessions.items():
            succeed("docker", "volume", "create", f"tridock-test-{session}-abc123")
            succeed("docker", "tag", "debian:bookworm-slim", f"tridock-test-{session}:cpu")
            if what != "unknown":
                argv = ("env", f"TEST_SESSION={session}", sys.executable, "-c", HOLD)
                pipe = subprocess.PIPE
                holder = holders[what] = subprocess.Popen(argv, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
                assert holder.stdout is not None
                assert holder.stdout.readline() == "held\n"
        holders["killed"].kill()
        holders["killed"].wait()
        found = [*killed_sessions()]
        assert names["killed"] in found
        assert not {names["alive"], names["unknown"]} & {*found}
        remove_everything(names["killed"])
        volumes = execute("docker", "volume", "ls", "--quiet").stdout.split()
        images = execute("docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").stdout.split()
        for what, name in names.items():
            assert (f"{name}-abc123" in volumes, f"{name}:cpu" in images) == ((what != "killed",) * 2), what
        assert names["killed"] not in killed_sessions()
    finally:
        for holder in holders.values():
            holder.kill()
            holder.communicate()
        for name in names.values():
            remove_everything(name)
