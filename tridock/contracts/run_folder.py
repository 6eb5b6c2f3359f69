"""Names shared by the operator's machine and the containers: paths, files of a run, the run marker."""

from __future__ import annotations

import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Final

from tridock.contracts.partials import partial_of

WORKSPACE: Final = "/workspace"
CODE: Final = "/opt/tridock"
PYTHON: Final = "tridock-python"
"""The interpreter for Tridock's own code in a container; `python` may be the user's, of any version."""
MEGATRON: Final = "/opt/megatron-v1.1.5"
SECRETS: Final = "/run/tridock/secrets"
SSHD_PID: Final = "/run/tridock/state/sshd.pid"
USER: Final = "tridock"
SSH_PORT: Final = 2222
# Rendezvous ports, below the kernel's ephemeral range (from 32768 by default).
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
# The scripts that these start on every node when DeepSpeed's launcher does not.
RANKS_SCRIPT: Final = "launch-ranks.sh"
RESUME_RANKS_SCRIPT: Final = "launch-resume-ranks.sh"
SUPERVISION: Final = "supervision.json"
# The first file that a launch writes on a node; it goes once the run is queued, or watched on that node.
INCOMPLETE: Final = ".incomplete"
# In a run that Slurm started: its sbatch script, and the facts about the job.
JOB_SCRIPT: Final = "job.sh"
JOB: Final = "slurm.json"
# srun's placeholder for the node's number in a job, as in the name of a node's script.
NODE_NUMBER: Final = "%n"
# In a run of your own program under Slurm: a folder with only the package, for the program's Python.
LIBRARY: Final = ".python"
# In such a run: the signal to send to its ranks.
SIGNALLED: Final = ".signalled"
# In a run of your own program: the copy of the code that it runs in, and the store of all runs' code by content.
CODE_INDEX: Final = "code.json"
CODE_COPY: Final = "code"
CODE_STORE: Final = ".code"
CODE_DIFF: Final = "code.diff"
LAUNCHER_LOG: Final = "logs/launcher.log"
# torch's flight recorder appends the rank's number.
FLIGHT: Final = "logs/flight-rank-"
EVENTS: Final = "events.jsonl"
METRICS: Final = "metrics.jsonl"
TENSORBOARD: Final = "tensorboard"
PROFILE: Final = "profile"
CHECKPOINTS: Final = "checkpoints"
FETCHED_TOKENIZER: Final = "tokenizer"
"""In the copy of a run that was fetched with its checkpoints: the tokenizer that made its data."""
EXIT_CODE: Final = "exit_code"
# exit_code of a run that was stopped: 128 + SIGTERM.
EXIT_STOPPED: Final = 143
# exit_code of a run that its scheduler ended after it had saved: it can resume from there.
EXIT_PREEMPTED: Final = 85
# Beside the runs: one file for each queued run.
QUEUE: Final = ".queue"
# Its content tells whether nodes share the folder that it lies in.
FOLDER_ID: Final = ".folder-id"
# The status of the ranks on all nodes, written by the supervisor.
RANKS: Final = ".ranks.json"
# Its presence asks the supervisor to end the run at once.
STOPPED: Final = ".stopped"
# Marks in a run's output for fab, in which each NUL of its own is doubled: a keepalive, at least every so many seconds,
# and the end of the output.
BEAT: Final = b"\0+"
BEAT_S: Final = 5.0
END: Final = b"\0."
# The bytes of a line of output above which it is passed on in parts.
LONGEST_LINE: Final = 1 << 20
LOSS_CURVE: Final = "loss.png"
REPORT: Final = "report.html"
# In the folder of a Megatron log: the arguments at its beginning.
LOG_ARGUMENTS: Final = "arguments.json"
# The result of a run that reproduces another.
REPRODUCTION: Final = "reproduction.json"

_RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,40}-\d{8}-\d{6}-[0-9a-f]{4}")


def new_run_id(name: str) -> str:
    """Returns ``<name>-<UTC yyyymmdd-hhmmss>-<4 hex>``. Ids of one name sort by time; two in one second differ."""
    return f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"  # noqa: UP017 - Python 3.8


def is_run_id(text: str) -> bool:
    """Whether the text has the form of a run id, and so is safe as a folder name."""
    return _RUN_ID.fullmatch(text) is not None


def launch_script(node_rank: int) -> str:
    """The script that a node executes. It differs from the head's only if each node starts its own ranks."""
    return LAUNCH_SCRIPT if node_rank == 0 else f"launch-{node_rank}.sh"


def node_script(script: str, node_rank: object) -> str:
    """The script of one node for ``script``, the head's, in a run of your own program."""
    return f"{script.rpartition('.')[0]}-node-{node_rank}.sh"


def rank_log(rank: int) -> str:
    """The log of one rank, relative to the run's folder."""
    return f"logs/rank-{rank}.log"


def read_text(path: Path) -> str:
    """Returns the text of a file, or an empty text if it is missing, or no file: a FIFO has no end."""
    try:
        return path.read_text(errors="replace") if path.is_file() else ""
    except FileNotFoundError:
        return ""


def write_atomic(
    path: Path,
    content: bytes | IO[bytes] | Iterator[bytes],
    mode: int | None = None,
    *,
    durable: bool = True,
    dir_fd: int | None = None,
) -> None:
    """Writes bytes, a stream or parts to a file: atomically, with this ``mode`` or else what the umask leaves.

    A file that is not ``durable`` may be empty after a power failure; writing it takes no wait for the disk.
    ``dir_fd``: the folder that ``path``, then a mere name, is in.
    """
    if dir_fd is None:
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    try:
        descriptor = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode, dir_fd=dir_fd
        )
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            if isinstance(content, (bytes, io.IOBase)):
                shutil.copyfileobj(io.BytesIO(content) if isinstance(content, bytes) else content, file, 1 << 20)
            else:
                file.writelines(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(partial, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial, dir_fd=dir_fd)
        raise
