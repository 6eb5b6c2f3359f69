"""The run that is to be done once more, and how what it was made of differs from what is here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts import run_folder
from tridock.contracts.records import Record, check_run, read_lines, read_metrics, read_object, read_plan
from tridock.differences import ABSENT, Difference, differences, flattened
from tridock.errors import Problem, RequestError
from tridock.reproduction.losses import Metrics

_OF_THE_RUN: Final = ("run_id", "created", "config")
"""Fields of a manifest that say nothing of what the run was made of."""
_DATA: Final = ("data_sha256", "data_sha256_by_manifest", "data_bytes")
_PLAN: Final = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "global_batch_size",
)
_MOVED: Final = "before-1"
"""In the folder of a run that lost a node and went on elsewhere."""


@dataclass(frozen=True, slots=True)
class Original:
    """What a run's folder tells of it."""

    folder: Path
    manifest: Record
    plan: Record
    metrics: Metrics
    device: str | None
    """As the ranks named it; None for a run that did not come to its end."""
    moved: bool
    """Whether the run went on elsewhere on its way: then its first losses are of another layout."""

    @property
    def experiment(self) -> Path:
        return self.folder / run_folder.EXPERIMENT

    @property
    def world_size(self) -> int | None:
        size = self.plan.get("world_size")
        return size if isinstance(size, int) else None


def read_original(folder: Path) -> Original:
    """Reads the folder of a run. Raises :class:`RequestError` where it is none, or has nothing to compare with."""
    check_run(folder)
    original = Original(
        folder=folder,
        manifest=read_object(folder / run_folder.MANIFEST),
        plan=read_plan(folder),
        metrics=read_metrics(folder),
        device=_device(folder),
        moved=(folder / _MOVED).exists(),
    )
    problems = []
    if not original.metrics[0]:
        where, todo = str(folder / run_folder.METRICS), "name a run that has logged losses"
        problems.append(Problem(where, "has no losses to compare with", "no logged iteration", todo))
    if original.world_size is None:
        where, todo = str(folder / run_folder.PLAN), "fetch the run's folder whole: fab fetch"
        problems.append(Problem(where, "does not say on how many ranks the run was", "no world_size", todo))
    if problems:
        raise RequestError(problems)
    return original


def environment(original: Original, manifest: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Difference]:
    """What differs between the original run and one with this manifest and plan, field by field: then, now."""
    then = {**original.manifest, "plan": {name: original.plan.get(name) for name in _PLAN}}
    now = {**manifest, "plan": {name: plan.get(name) for name in _PLAN}}
    return differences([then, now], _OF_THE_RUN)


def data_problems(original: Original, manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Data that is not what the original run has read, file by file; only what is known of both can differ."""
    for section in _DATA:
        then, now = (dict(flattened(_section(it, section))) for it in (original.manifest, manifest))
        for name, value in then.items():
            here = now.get(name, ABSENT)
            if ABSENT not in (value, here) and value != here:
                what = f"is not the data that the run has read: {section} was {value}"
                yield Problem(name, what, here, "bring that data back, or compare all the same with --force")


def knows_data(original: Original) -> bool:
    """Whether the run's manifest says what its data was."""
    return any(_section(original.manifest, name) for name in _DATA)


def _section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}


def _device(folder: Path) -> str | None:
    named = [event["device"] for event in read_lines(folder / run_folder.EVENTS) if "device" in event]
    return str(named[-1]) if named else None
