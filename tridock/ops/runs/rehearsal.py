"""A rehearsal on this machine's CPUs: a run that loses a rank on purpose and repeats its losses, and its weights."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Any, Final

from tridock.contracts import environment, run_folder
from tridock.contracts.events import Event, events_of
from tridock.contracts.pretrained import HF
from tridock.contracts.records import read_lines
from tridock.contracts.tokenizers import TOKENIZER_FILES
from tridock.errors import EXIT_INTERRUPTED, ClusterError, Problem, RequestError, RunError
from tridock.experiment import CommandExperiment, Experiment
from tridock.experiment.data_sets import PART_PATHS
from tridock.ops.runs.local_run import Ended, run_here, run_program_here
from tridock.ops.runs.preflight import data_files
from tridock.ops.runs.this_machine import node_argv, node_environment
from tridock.ops.runs.weights import EXPORT, GENERATE
from tridock.plan.shrunk import INTERVAL, rehearsal_name
from tridock.remote import clock

Say = Callable[[str, str], None]
"""Called with what was rehearsed, and what came of it."""
Reasons = dict[str, str]
"""What was not rehearsed, each with the reason."""

_POLL_S: Final = 0.01
_LIMIT_S: Final = 900.0
_PROGRAM_S: Final = 180.0
"""Seconds for your own program to start, to lose a rank and to go on; then it is stopped."""
_SETTLED_S: Final = 20.0
"""Seconds of training after which your own program loses a rank: it may have saved by then."""
_RANK_BYTES: Final = 600 << 20
"""A rank with a small model takes 400 to 500 MiB."""
_PROMPT: Final = "The "
_INTERRUPTED: Final = (EXIT_INTERRUPTED, run_folder.EXIT_PREEMPTED)
"""Of a run here: by Ctrl-C, by SIGTERM."""

Losses = list[tuple[int, Any]]


@dataclass(frozen=True, slots=True)
class Lost:
    """What came of a run that lost a rank."""

    folder: Path
    exit_code: int
    rank: int | None = None
    """The rank that was killed; None if the run ended before."""
    after: int = 0
    """The last iteration before."""
    restarted_from: int | None = None
    """The iteration that it continued from; None if it was not restarted."""
    repeated: Mapping[int, tuple[Any, Any]] = field(default_factory=dict)
    """Losses of the iterations that it trained twice: before, and again."""

    @property
    def differing(self) -> list[int]:
        return [iteration for iteration, (before, again) in self.repeated.items() if before != again]

    def check(self, *, program: bool) -> None:
        """Raises :class:`RunError` if the run did not go on as before. A ``program`` need not repeat its losses."""
        if self.exit_code in _INTERRUPTED:
            raise KeyboardInterrupt
        lost = f"after it had lost rank {self.rank}"
        if self.exit_code and not (program and self.exit_code == run_folder.EXIT_STOPPED):
            what = f"ended with exit code {self.exit_code}"
        elif self.rank is None:
            what = "ended, or was ended, before it had lost a rank"
        elif self.restarted_from is None:
            what = f"was not restarted {lost}"
        elif not program and not self.repeated:
            what = f"repeated no iteration {lost}"
        elif not program and self.differing:
            what = f"has other losses {lost}"
        else:
            return
        got = ", ".join(f"{self.repeated[it]} at iteration {it}" for it in self.differing[:3])
        todo = f"see {self.folder}/{run_folder.EVENTS} and {self.folder}/logs"
        raise RunError(Problem(self.folder.name, what, got, todo))


def rehearse_experiment(config: Path, ranks: int, workspace: Path) -> Lost:
    """Trains an experiment, which loses its last rank between two checkpoints. Raises :class:`RunError`."""
    watcher = _Watcher(workspace, ranks)
    return watcher.lost_in(lambda: run_here(config, ranks, workspace, quiet=True, approve=watcher.begin))


def rehearse_program(program: CommandExperiment, source: Path, ranks: int, workspace: Path) -> Lost:
    """Runs your own program, which loses its last rank after some losses and is stopped once it has repeated them;
    where its losses are not known, after a while. Raises :class:`RunError`."""
    restart = program.restart.model_copy(update={"max": max(1, program.restart.max)})
    launch = program.launch.model_copy(update={"master_port": None})
    update = {"name": rehearsal_name(program.name), "restart": restart, "launch": launch}
    watcher, store = _Watcher(workspace, ranks, program), workspace / "runs" / run_folder.CODE_STORE
    is_new = not store.exists()
    small = program.model_copy(update=update)
    try:
        return watcher.lost_in(lambda: run_program_here(small, source, ranks, workspace, watcher.begin))
    finally:
        if is_new:  # the run's folder has its own copy
            shutil.rmtree(store, ignore_errors=True)


class _Watcher:
    """A thread that kills a rank of a run, and ends a run that takes too long."""

    def __init__(self, workspace: Path, ranks: int, program: CommandExperiment | None = None) -> None:
        self._workspace, self._ranks, self._program = workspace.resolve(), ranks, program
        self._ended, self._thread = threading.Event(), threading.Thread(target=self._watch, daemon=True)
        self._folder = Path()
        self._deadline = self._seen = 0.0
        self._before: Losses = []
        self._killed: int | None = None

    def lost_in(self, run: Callable[[], Ended]) -> Lost:
        """Returns what came of a run, which calls :meth:`begin`. Raises as :meth:`Lost.check` does."""
        try:
            ended = run()
        finally:
            self._ended.set()
            if self._thread.ident is not None:
                self._thread.join()
        lost = self._result(ended)
        lost.check(program=self._program is not None)
        return lost

    def begin(self, manifest: Mapping[str, Any], _plan: Mapping[str, Any]) -> None:
        """Watches the run that is about to start."""
        self._folder = self._workspace / "runs" / manifest["run_id"]
        self._deadline = clock.now() + (_LIMIT_S if self._program is None else _PROGRAM_S)
        self._thread.start()

    def _result(self, ended: Ended) -> Lost:
        if self._killed is None:
            return Lost(ended.folder, ended.exit_code)
        lost = Lost(ended.folder, ended.exit_code, self._killed, self._before[-1][0] if self._before else 0)
        if not (restarts := events_of(ended.folder, Event.RUN_RESTARTED)):
            return lost
        since, before = restarts[0]["iteration"], self._before
        if self._program is None:  # its records after the checkpoint were replaced
            again = [it for it in _losses(ended.folder) if it[0] > since]
        else:
            before, again = _attempts(_losses(ended.folder))
            since = again[0][0] - 1 if again else since
        losses = dict(again)
        repeated = {iteration: (loss, losses[iteration]) for iteration, loss in before if iteration in losses}
        return replace(lost, restarted_from=since, repeated=repeated)

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            if clock.now() > self._deadline or (self._killed is not None and self._is_done()):
                argv = [*node_argv(), "stop", self._folder.name, "--workspace", str(self._workspace)]
                subprocess.run(argv, env=node_environment(1), stdout=subprocess.DEVNULL, check=False)
                return
            if self._killed is None and self._can_be_lost():
                self._kill()

    def _can_be_lost(self) -> bool:
        losses = _losses(self._folder)
        if self._program is not None:
            return bool(losses or self._program.metrics is None) and self._is_settled()
        last = losses[-1][0] if losses else 0
        saved = [event["iteration"] for event in events_of(self._folder, Event.CHECKPOINT_SAVED)]
        # Not so near to the next checkpoint that it may be the one to continue from.
        return bool(saved) and last > saved[-1] and 2 <= last % INTERVAL <= INTERVAL - 3

    def _kill(self) -> None:
        rank = self._ranks - 1
        if (pid := min(_processes(self._folder.name, rank), default=None)) is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._killed, self._before, self._seen = rank, _losses(self._folder), 0.0

    def _is_done(self) -> bool:
        """Whether a program, which may have no end, has repeated what it had done before."""
        if self._program is None or not events_of(self._folder, Event.RUN_RESTARTED):
            return False
        if self._program.metrics is None:
            return self._is_settled()
        before, again = _attempts(_losses(self._folder))
        return bool(again) and again[-1][0] >= before[-1][0]

    def _is_settled(self) -> bool:
        """Whether the last rank has been there for a while."""
        if not any(_processes(self._folder.name, self._ranks - 1)):
            self._seen = 0.0
            return False
        self._seen = self._seen or time.monotonic()
        return time.monotonic() - self._seen > _SETTLED_S


def _losses(folder: Path) -> Losses:
    """Returns the logged iterations with their losses, in the file's order."""
    lines = read_lines(folder / run_folder.METRICS)
    return [(it["iteration"], it.get("loss")) for it in lines if "split" not in it]


def _attempts(losses: Losses) -> tuple[Losses, Losses]:
    """Returns the losses before and after an iteration that follows a later one."""
    pairs = enumerate(itertools.pairwise(losses), start=1)
    cut = next((place for place, (one, other) in pairs if other[0] <= one[0]), len(losses))
    return losses[:cut], losses[cut:]


def _processes(run_id: str, rank: int) -> Iterator[int]:
    """Yields the processes of a rank of a run on this machine."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            entries = file.read_bytes().split(b"\0")
            variables = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
            if variables.get(environment.RUN_ID) == run_id and environment.rank_of(variables) == rank:
                yield int(file.parent.name)


def ranks_that_fit() -> int:
    """Returns how many ranks of a small model this machine has cores and memory for."""
    return max(1, min(os.cpu_count() or 1, _memory() // _RANK_BYTES))


def refuse_too_many(ranks: int) -> None:
    """Raises :class:`ClusterError` for more ranks than this machine has memory for."""
    if (most := _memory() // _RANK_BYTES) < ranks:
        what, todo = "has too little memory for every parallel size above one", "rehearse it on a larger machine"
        raise ClusterError(Problem("this machine", what, f"{ranks} ranks, memory for {most}", todo))


def _memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_data(experiment: Experiment, workspace: Path) -> bool:
    """Whether the files that every rank reads are on this machine."""
    return all((workspace / name).is_file() for name in data_files(experiment))


def with_linked_data(experiment: Experiment, workspace: Path, folder: Path) -> Experiment:
    """Returns the experiment with its data, and the tokenizer beside them, as links in a new ``folder``: what ranks
    write beside the data goes there."""
    linked = dict[str, str]()
    folder.mkdir()
    for number, prefix in enumerate(experiment.data.prefixes):
        data, place = (workspace / prefix).absolute(), folder / str(number) if number else folder
        beside = (data.parent / name for name in (*TOKENIZER_FILES, "tokenizer"))
        place.mkdir(exist_ok=True)
        for path in (*data.parent.glob(f"{data.name}[._]*"), *beside):
            if path.exists():
                (place / path.name).symlink_to(path.resolve())
        linked[prefix] = str(place / data.name)
    return experiment.model_copy(update={"data": experiment.data.moved(linked)})


def with_data(experiment: Experiment, data_path: str, **tokenizer: str) -> Experiment:
    """Returns the experiment with one data set, and other files of its tokenizer."""
    one = {"data_path": data_path, **dict.fromkeys(PART_PATHS), **tokenizer}
    return experiment.model_copy(update={"data": experiment.data.model_copy(update=one)})


def use_weights(
    run: Path, real: Experiment, config: Path, ranks: int, workspace: Path, scratch: Path, say: Say
) -> Reasons:
    """Exports a run's weights and samples from them; trains ``config`` from them if the ``real`` experiment starts from
    transformers' weights. Returns what this was not possible for. Raises :class:`RunError`."""
    if real.model.is_vision:
        return {"export, generate": "a model of images has neither"}
    exported = scratch / "exported"
    prompt = next(iter(real.train.sample_prompts), _PROMPT)
    format_, folder = real.train.pretrained or ("", "")
    has_weights = format_ == HF and (workspace / folder).is_dir()
    tokenizer = [f"--tokenizer={workspace / folder}"] * (has_weights and has_data(real, workspace))
    for program, *words in (
        (EXPORT, str(run), f"--output={exported}", "--quiet", *tokenizer),
        (GENERATE, str(exported), f"--prompt={prompt}", "--max-new-tokens=16"),
    ):
        code, text = _told(program, words)
        if code == RequestError.exit_code:
            return {program.rpartition(".")[2]: text}
        if code:
            raise RunError(Problem(run.name, f"python -m {program} failed", text, f"try it again with {run}"))
        name = "exported" if program == EXPORT else "sampled"
        say(name, repr(text) if program == GENERATE else text.replace(f", written to {exported}", ""))
    if format_ != HF:
        return {}
    length = ("train.train_iters=4", "optimizer.lr_warmup_iters=0", "optimizer.lr_decay_iters=null")
    others = ("trackers=[]", "notify=[]", "train.save_interval=0", "train.profile_iters=0")
    with redirect_stdout(StringIO()):  # its folder, which goes
        ended = run_here(config, ranks, scratch, (f"train.load={HF}:{exported}", *length, *others), quiet=True)
    if ended.exit_code in _INTERRUPTED:
        raise KeyboardInterrupt
    if ended.exit_code:
        what, todo = "was exported to weights that do not train", "read the messages above"
        raise RunError(Problem(run.name, what, f"exit code {ended.exit_code}", todo))
    say("loaded", f"train.load {HF}: of these weights, and trained 4 iterations")
    what = "was compared with the experiment" if has_weights else "is not on this machine"
    return {"train.load": f"the rehearsal loaded its own small export; {folder} {what}"}


def _told(module: str, arguments: Sequence[str]) -> tuple[int, str]:
    """Runs a program from the ranks' environment; returns its exit code and what it said."""
    argv = [sys.executable, "-m", module, *arguments]
    done = clock.run(argv, _LIMIT_S, env=node_environment(1))
    return done.returncode, (done.stderr if done.returncode else done.stdout).decode(errors="replace").strip()
