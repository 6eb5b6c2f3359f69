"""Names that the operator's side and the container's side agree on: paths, files of a run, the run marker."""

from __future__ import annotations

import os
import re
import secrets
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

WORKSPACE: Final = "/workspace"
CODE: Final = "/opt/tridock"
PYTHON: Final = "tridock-python"
"""What runs Tridock's own code in a container: `python` may be the user's, of any version."""
MEGATRON: Final = "/opt/megatron-v1.1.5"
SECRETS: Final = "/run/tridock/secrets"
SSHD_PID: Final = "/run/tridock/state/sshd.pid"
USER: Final = "tridock"
SSH_PORT: Final = 2222
# The ports at which ranks meet: below the range from which the kernel gives out its own (32768 by default).
RENDEZVOUS_PORTS: Final = range(20000, 30000)

EXPERIMENT: Final = "experiment.yaml"
PLAN: Final = "plan.json"
MANIFEST: Final = "manifest.json"
HOSTFILE: Final = "hostfile"
DEEPSPEED_ENV: Final = "deepspeed_env"
DEEPSPEED_CONFIG: Final = "ds_config.json"
LAUNCH_SCRIPT: Final = "launch.sh"
SETUP_SCRIPT: Final = "setup.sh"
RESUME_SCRIPT: Final = "launch-resume.sh"
# What these start on every node, where DeepSpeed's launcher does not.
RANKS_SCRIPT: Final = "launch-ranks.sh"
RESUME_RANKS_SCRIPT: Final = "launch-resume-ranks.sh"
SUPERVISION: Final = "supervision.json"
# Of a run that Slurm started: its sbatch script, and what is known of the job.
JOB_SCRIPT: Final = "job.sh"
JOB: Final = "slurm.json"
# What srun writes for the number of a node in a job, as in the name of a node's script.
NODE_NUMBER: Final = "%n"
# Of a run of the user's own program in a Slurm job: holds the package, alone, for the program's Python.
LIBRARY: Final = ".python"
# Of such a run: the signal that its ranks are to get.
SIGNALLED: Final = ".signalled"
# Of a run of the user's own program: the copy of its code in which it runs, and the code of all runs by content.
CODE_INDEX: Final = "code.json"
CODE_COPY: Final = "code"
CODE_STORE: Final = ".code"
CODE_DIFF: Final = "code.diff"
LAUNCHER_LOG: Final = "logs/launcher.log"
# torch's flight recorder adds the rank's number to it.
FLIGHT: Final = "logs/flight-rank-"
EVENTS: Final = "events.jsonl"
METRICS: Final = "metrics.jsonl"
TENSORBOARD: Final = "tensorboard"
PROFILE: Final = "profile"
CHECKPOINTS: Final = "checkpoints"
EXIT_CODE: Final = "exit_code"
# What exit_code holds for a run that was stopped: 128 + SIGTERM.
EXIT_STOPPED: Final = 143
# A run that its scheduler ended after it had saved: it can continue from there.
EXIT_PREEMPTED: Final = 85
# Beside the runs: a file for each run that waits for its slots.
QUEUE: Final = ".queue"
# The ranks of all nodes, as the supervisor sees them.
RANKS: Final = ".ranks.json"
# The file that says that the end of the run is wanted at once.
STOPPED: Final = ".stopped"
# Beside a run's output on its way to fab: a sign of life, at least every so many seconds, and the end of all.
BEAT: Final = b"\0"
BEAT_S: Final = 5.0
END: Final = b"\4"
LOSS_CURVE: Final = "loss.png"
REPORT: Final = "report.html"
# Of the folder of a Megatron log: the arguments that the log begins with.
LOG_ARGUMENTS: Final = "arguments.json"
# What became of a run that is another one done once more.
REPRODUCTION: Final = "reproduction.json"

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}-\d{8}-\d{6}-[0-9a-f]{4}")


def new_run_id(name: str) -> str:
    """``<name>-<UTC yyyymmdd-hhmmss>-<4 hex>``: sorts by time within a name, and two in one second differ."""
    return f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"  # noqa: UP017 - Python 3.8


def is_run_id(text: str) -> bool:
    """Whether the text has the form of a run id (and so is safe as a folder's name)."""
    return _RUN_ID.fullmatch(text) is not None


def launch_script(node_rank: int) -> str:
    """What a node executes; only nodes that each start their own ranks have others than the head's."""
    return LAUNCH_SCRIPT if node_rank == 0 else f"launch-{node_rank}.sh"


def node_script(script: str, node_rank: object) -> str:
    """The part of a node in ``script``, the head's, of the user's own program."""
    return f"{script.rpartition('.')[0]}-node-{node_rank}.sh"


def rank_log(rank: int) -> str:
    """The log of one rank, relative to the run's folder."""
    return f"logs/rank-{rank}.log"


def read_text(path: Path) -> str:
    """The text of a file; empty if it is missing."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def write_atomic(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Writes a file that appears whole, with its final mode, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
