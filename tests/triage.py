"""Which test provokes the fault of each rule that no recorded text covers."""

from __future__ import annotations

from typing import Final

_RANKS: Final = "distributed/test_triage.py"
_NODE: Final = "unit/node/test_evidence.py"
_CONTAINERS: Final = "integration/test_triage.py"

PROVOKED: Final = {
    "login-refused": "integration/test_host_faults.py",
    "devices-taken": "distributed/test_device_locks.py",
    "oom-killed": _CONTAINERS,
    "shared-memory-too-small": _CONTAINERS,
    "rank-stopped": _RANKS,
    "build-locked": "distributed/test_leftovers.py",
    "host-out-of-memory": _RANKS,
    "too-many-open-files": _RANKS,
    "too-many-processes": _RANKS,
    "address-in-use": _RANKS,
    "collective-timeout": _RANKS,
    "no-such-interface": _RANKS,
    "rendezvous": _RANKS,
    "loss-not-finite": _RANKS,
    "nothing-trained": "distributed/ill_health.py",
    "vocabulary-too-small": _RANKS,
    "checkpoint-of-another-layout": _RANKS,
    "checkpoint-corrupted": _RANKS,
    "checkpoint-of-another-version": _RANKS,
    "index-maps-missing": _RANKS,
    "disk-full": _RANKS,
    "missing-file": _RANKS,
    "permission": _RANKS,
    "collectives-differ": _RANKS,
    "import": _RANKS,
    "version-mismatch": _RANKS,
    "terminated": _RANKS,
    "peer-lost": _RANKS,
    "exited-without-message": _RANKS,
    "program-failed": "integration/test_run.py",
    "separate-worlds": "integration/test_run.py",
    "mpirun-signal": "integration/test_mpirun.py",
    "setup-failed": "unit/node/test_node_starter.py",
    "program-not-started": "unit/node/test_node_starter.py",
    "node-program-failed": "unit/node/test_node_starter.py",
    "ssh-host-key": "integration/test_security.py",
    "ssh-refused": "integration/test_security.py",
    "ssh-unreachable": "unit/triage/test_rules.py",
    "launcher-ended": _NODE,
    "unknown": _NODE,
}
