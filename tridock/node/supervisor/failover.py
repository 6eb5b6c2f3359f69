"""Failover: queries the spares, lays the run out on other nodes, and sends them its new files."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from tridock.contracts import checkpoints, run_folder
from tridock.contracts.codec import decode
from tridock.contracts.events import Event, append_event
from tridock.contracts.node_answers import SpareStatus
from tridock.contracts.supervision import NewLayout, Reach, Supervision
from tridock.errors import ClusterError, Problem, RequestError
from tridock.node.agent.spare_lock import busy_with
from tridock.node.supervisor.program_failover import on_spares

_ASK_S: Final = 30.0
_REPLAN_S: Final = 300.0
_BEFORE: Final = "before-{}"


@dataclass(frozen=True, slots=True)
class FailoverResult:
    """How the run continues. ``supervision`` is None if it cannot, and ``reason`` gives the cause."""

    reason: str
    supervision: Supervision | None = None


def spare_status(folder: Path, *, reserve: bool = False) -> SpareStatus:
    """Returns a spare's answer. ``reserve``: reserves it for this run, unless it is busy with another."""
    manifest = json.loads((folder / run_folder.MANIFEST).read_text())
    supervision = Supervision.from_json((folder / run_folder.SUPERVISION).read_text())
    files = [folder.parent.parent / name for name in manifest.get("data_sha256") or ()]
    missing = tuple(str(path) for path in files if not path.is_file())
    return SpareStatus(busy_with(folder.name, reserve=reserve), missing, _fingerprint(_newest(supervision)))


def move(folder: Path, supervision: Supervision, lost: Sequence[str], *, from_scratch: bool) -> FailoverResult:
    """Lays out the run without the ``lost`` nodes, and sends its files to the others."""
    answers = {node: _ask(supervision.reach, folder, node) for node in supervision.spares}
    while True:
        ready = [node for node, answer in answers.items() if isinstance(answer, SpareStatus)]
        unready = "".join(f"; spare {node}: {why}" for node, why in answers.items() if isinstance(why, str))
        found = _new_layout(folder, supervision, lost, ready, from_scratch)
        if isinstance(found, str):
            return FailoverResult(found + unready)
        reserved = {node: _ask(supervision.reach, folder, node, "--reserve") for node in ready if node in found.nodes}
        answers |= reserved
        if all(isinstance(answer, SpareStatus) for answer in reserved.values()):
            break  # else another run was faster: lay out again without that spare
    files = {name: text.encode() for name, text in found.files.items()}
    after = Supervision.from_json(found.files[run_folder.SUPERVISION])
    _keep(folder, files)
    try:
        for node in after.remote:
            answer = answers.get(node) or _if_other_ranks(folder, supervision, after, node)
            if not from_scratch and isinstance(answer, SpareStatus):
                _bring_checkpoint(after, node, answer.checkpoint)
            send(after.reach, node, folder, _archive(files))
    except ClusterError as error:
        return FailoverResult(str(error) + unready)
    for name, content in _archive(files):
        run_folder.write_atomic(folder / name, content)
    about = {"lost": lost, "nodes": found.nodes, "layout": found.layout, "world_size": found.world_size}
    append_event(folder, Event.RUN_MOVED, **about, reason=found.summary + unready)
    return FailoverResult(found.summary + unready, after)


def _if_other_ranks(folder: Path, before: Supervision, after: Supervision, node: str) -> SpareStatus | str | None:
    """Returns what a node has that gets other ranks than before, and so may lack their part of the checkpoint.

    That happens where another node leads a run whose nodes do not share its folder.
    """
    changed = before.voters and before.ranks.get(node) != after.ranks[node]
    return _ask(before.reach, folder, node) if changed else None


def _new_layout(
    folder: Path, supervision: Supervision, lost: Sequence[str], ready: Sequence[str], from_scratch: bool
) -> NewLayout | str:
    """Returns the layout without the lost nodes, or why there is none."""
    if supervision.observed:
        try:
            return on_spares(folder, supervision, lost, ready)
        except RequestError as error:
            return str(error)
    done = _replan(folder, supervision.head, lost, ready, from_scratch)
    return done.stderr.decode(errors="replace").strip() if done.returncode else decode(NewLayout, done.stdout)


def _ask(reach: Reach, folder: Path, node: str, *options: str) -> SpareStatus | str:
    """Returns the answer of a usable spare, or why it is not usable."""
    done = _run(reach.command(node, "spare-status", *options, str(folder)), timeout=_ASK_S)
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip().splitlines()
        return stderr[-1] if stderr else f"exit code {done.returncode}"
    try:
        answer = decode(SpareStatus, done.stdout)
    except ValueError:
        return "its image has another version of Tridock"
    if answer.busy:
        return f"is busy with {', '.join(answer.busy)}"
    return f"lacks {', '.join(answer.missing)}" if answer.missing else answer


def _replan(
    folder: Path, head: str, lost: Sequence[str], ready: Sequence[str], from_scratch: bool
) -> subprocess.CompletedProcess[bytes]:
    # In a separate process: the supervisor does not import the planner.
    argv = [sys.executable, "-P", "-m", "tridock.cli", "replan", str(folder), "--json", f"--head={head}"]
    argv += [*(f"--without={node}" for node in lost), *(f"--spare={node}" for node in ready)]
    return _run([*argv, "--from-scratch"] if from_scratch else argv, timeout=_REPLAN_S)


def _run(command: Sequence[str], timeout: float) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, b"", f"did not answer within {timeout:.0f} s".encode())


def _newest(supervision: Supervision) -> Path | None:
    found = None if supervision.checkpoints is None else checkpoints.newest(Path(supervision.checkpoints))
    return None if found is None else found[1]


def _fingerprint(checkpoint: Path | None) -> str | None:
    try:
        return (
            None if checkpoint is None else hashlib.sha256((checkpoint / checkpoints.MANIFEST).read_bytes()).hexdigest()
        )
    except OSError:
        return None


def _bring_checkpoint(supervision: Supervision, node: str, seen: str | None) -> None:
    """Sends the newest checkpoint to a node that does not share the folder; its manifest comes last."""
    checkpoint = _newest(supervision)
    if checkpoint is None or seen == _fingerprint(checkpoint):
        return
    folder, manifest = checkpoint.parent, checkpoint / checkpoints.MANIFEST
    files = sorted(
        (path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: (path == manifest, path)
    )
    send(supervision.reach, node, folder, ((str(path.relative_to(folder)), path) for path in files))


def _archive(files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yields the files; the supervision file, which a node's agent reads, comes last."""
    yield from sorted(files.items(), key=lambda item: item[0] == run_folder.SUPERVISION)


def send(reach: Reach, node: str, folder: Path, files: Iterable[tuple[str, bytes | Path]]) -> None:
    """Writes files below ``folder`` on a node. Raises :class:`ClusterError`."""
    pipe = subprocess.PIPE
    command = reach.command(node, "receive-files", str(folder))
    with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        try:
            _pack(files, process.stdin)
            process.stdin.close()
        except BrokenPipeError:
            pass  # its own error says more
        stderr = process.stderr.read().decode(errors="replace").strip()
    if process.returncode:
        todo = "check its disk space and its sshd answers"
        raise ClusterError(Problem(node, f"could not store the run's files in {folder}", stderr, todo))


def _pack(files: Iterable[tuple[str, bytes | Path]], stream: IO[bytes]) -> None:
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, content in files:
            if isinstance(content, Path):
                archive.add(content, name, recursive=False)
                continue
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))


def _keep(folder: Path, names: Iterable[str]) -> None:
    """Copies files to be replaced to ``before-1``: the folder keeps every layout of the run.

    Called before anything is sent: the other nodes may share the folder.
    """
    number = 1
    while (kept := folder / _BEFORE.format(number)).exists():
        number += 1
    kept.mkdir()
    for name in names:
        if (folder / name).is_file():
            run_folder.write_atomic(kept / name, (folder / name).read_bytes())
