"""What a run's folder, which may come from a host, would execute or set: confirmed before anything starts."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tridock.contracts.run_folder import EXPERIMENT
from tridock.differences import flattened
from tridock.errors import Problem, RequestError
from tridock.experiment import recorded_run

Confirm = Callable[[Path, Sequence[str]], None]
"""Called with a run's folder and what it would execute or set. Raises :class:`RequestError` unless the user agrees."""
_CHOICES: Final = re.compile(r"name|engine|precision|per|metrics|(model|parallel|batch|data|optimizer|fp16|launch)\..*")
"""Fields that choose among what Tridock has, or name data to read; code is confirmed by its number of files."""
_TRAIN: Final = re.compile(r"train\.(load|override_checkpoint|sample_prompts)|restart\..*|code")
_VALUE: Final = re.compile(r"-?[0-9.]+(e[-+]?[0-9]+)?|true|false|null|\[\]|\{\}")
"""A number, a truth value or nothing: names no program, file or place."""
_ON_CPU: Final = "env.DS_ACCELERATOR: cpu"
_LOADERS: Final = re.compile(
    r"(LD|DYLD|GLIBC|GCONV|BASH|PERL5|RUBY|NODE|GIT|TRIDOCK)_?\w*|PERLLIB|\w*JAVA\w*OPTIONS|PATH|ENV|IFS|PS4|SHELL\w*"
    r"|BASHOPTS|PROMPT_COMMAND|ZDOTDIR|HOME"
    r"|PYTHON(?!(HASHSEED|UNBUFFERED|FAULTHANDLER|DONTWRITEBYTECODE|UTF8|IOENCODING)$)\w*"
)
"""Variables with which a loader, an interpreter or a shell runs other code than it was asked to."""


def confirm_run(
    run: Path, confirm: Confirm, request: Mapping[str, Any] | None = None, more: Iterable[str] = ()
) -> None:
    """Asks to confirm what the experiment in a run's folder would execute or set, a job's ``request``, and ``more``.

    Raises :class:`RequestError` for variables that would change which code runs, whatever the user says; of a program
    of the user's own, folders of its code may be on PYTHONPATH.
    """
    path = run / EXPERIMENT
    fields = {**recorded_run(run).model_dump(mode="json", exclude_defaults=True), "slurm": request or {}}
    todo = f"if it is yours, start it as an experiment of your own: --config {shlex.quote(str(path))}"
    RequestError.raise_for(
        Problem(f"{run}: {prefix}env.{name}", "would change which code runs", value, todo)
        for prefix, section in (("", fields), ("slurm.", fields["slurm"]))
        for name, value in (section.get("env") or {}).items()
        if _LOADERS.fullmatch(name) and not (name == "PYTHONPATH" and "command" in fields and _stays_in_code(value))
    )
    confirm(run, [*_effects(fields), *more])


def _stays_in_code(folders: str) -> bool:
    """Whether PYTHONPATH has only folders below the current one, which for a program is its code's."""
    paths = [PurePosixPath(folder) for folder in folders.split(":")]
    return not any(path.is_absolute() or ".." in path.parts for path in paths)


def _effects(fields: Mapping[str, Any]) -> Iterator[str]:
    for name, value in flattened(fields):
        line = f"{name}: {value}"
        if not (_CHOICES.fullmatch(name) or _TRAIN.fullmatch(name) or _VALUE.fullmatch(value) or line == _ON_CPU):
            yield f"set {line}" if name != "command" else f"run {shlex.join(json.loads(value))}"
