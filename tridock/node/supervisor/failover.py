"""Failover: queries the spares, lays the run out on other nodes, and sends them its new files.

The planner lays out a run with a plan, in a process of its own. Your own program keeps its ranks: a spare replaces each
lost node, as Tridock cannot know whether it works on fewer. That takes the standard library alone; your image has
nothing else.
"""

import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from tridock.contracts import run_folder
from tridock.contracts.codec import decode
from tridock.contracts.events import Event, append_event
from tridock.contracts.node_answers import SpareStatus
from tridock.contracts.records import read_plan, slots_of
from tridock.contracts.supervision import NewLayout, Reach, Supervision
from tridock.errors import ClusterError, Problem
from tridock.node.agent.spare_lock import busy_with

_ASK_S: Final = 30.0
_REPLAN_S: Final = 300.0
_BEFORE: Final = "before-{}"
_SCRIPTS: Final = (run_folder.LAUNCH_SCRIPT, run_folder.RESUME_SCRIPT)


@dataclass(frozen=True, slots=True)
class FailoverResult:
    """How the run continues. ``supervision`` is None if it cannot, and ``reason`` gives the cause."""

    reason: str
    supervision: Supervision | None = None


def spare_status(folder: Path, *, reserve: bool = False) -> SpareStatus:
    """Returns a spare's answer. ``reserve``: reserves it for this run, unless it is busy with another."""
    manifest = json.loads((folder / run_folder.MANIFEST).read_text())
    sizes = {folder.parent.parent / name: size for name, size in (manifest.get("data_bytes") or {}).items()}
    missing = tuple(str(path) for path, size in sizes.items() if not path.is_file() or path.stat().st_size != size)
    return SpareStatus(busy_with(folder.name, reserve=reserve), missing)


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
            send(after.reach, node, folder, _archive(files))
    except ClusterError as error:
        return FailoverResult(str(error) + unready)
    for name, content in _archive(files):
        run_folder.write_atomic(folder / name, content)
    about = {"lost": lost, "nodes": found.nodes, "layout": found.layout, "world_size": found.world_size}
    append_event(folder, Event.RUN_MOVED, **about, reason=found.summary + unready)
    return FailoverResult(found.summary + unready, after)


def _new_layout(
    folder: Path, supervision: Supervision, lost: Sequence[str], ready: Sequence[str], from_scratch: bool
) -> NewLayout | str:
    """Returns the layout without the lost nodes, or why there is none."""
    if supervision.observed:
        return _on_spares(folder, supervision, lost, ready)
    done = _replan(folder, supervision.head, lost, ready, from_scratch)
    return done.stderr.decode(errors="replace").strip() if done.returncode else decode(NewLayout, done.stdout)


def _on_spares(folder: Path, supervision: Supervision, lost: Sequence[str], ready: Sequence[str]) -> NewLayout | str:
    """Returns the run with a spare in the place of each lost node, or why there is none.

    A spare needs the same slots as the node, which the nodes' scripts name.
    """
    plan = read_plan(folder)
    slots, places = slots_of(plan), dict[str, str]()
    for node in lost:
        free = [name for name in ready if name not in places.values()]
        spare = next((name for name in free if {*slots[node]} <= {*supervision.spares[name]}), None)
        if spare is None:
            what = f"no spare has the slots of {node}, {', '.join(map(str, sorted(slots[node])))}"
            todo = f"bring {node} back, or add a spare to the cluster's settings"
            return str(Problem(folder.name, what, ", ".join(free) or "none", todo))
        if any(f"{node}:" in run_folder.read_text(folder / script) for script in _SCRIPTS):
            what, todo = f"names slots of {node} in its command", f"bring {node} back, or use its first slots"
            return str(Problem(folder.name, what, "--include", todo))
        places[node] = spare
    ranks = {places.get(node, node): numbers for node, numbers in supervision.ranks.items()}
    remote = tuple(node for node in ranks if node != supervision.head)
    spares = {node: numbers for node, numbers in supervision.spares.items() if node not in ranks}
    for rank in plan["ranks"]:
        rank["node"] = places.get(rank["node"], rank["node"])
    hosts = [line.partition(" ") for line in (folder / run_folder.HOSTFILE).read_text().splitlines()]
    files = {
        run_folder.HOSTFILE: "".join(f"{places.get(node, node)} {slots}\n" for node, _, slots in hosts),
        run_folder.PLAN: json.dumps(plan, indent=2) + "\n",
        run_folder.SUPERVISION: replace(supervision, ranks=ranks, remote=remote, spares=spares).to_json(),
    }
    summary = "; ".join(f"{spare} takes the place of {node}" for node, spare in places.items())
    return NewLayout(summary, "", len(plan["ranks"]), tuple(ranks), files)


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


def _archive(files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """Yields the files; the supervision file, which a node's agent reads, comes last."""
    yield from sorted(files.items(), key=lambda item: item[0] == run_folder.SUPERVISION)


def send(reach: Reach, node: str, folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
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


def _pack(files: Iterable[tuple[str, bytes]], stream: IO[bytes]) -> None:
    with tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, content in files:
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
