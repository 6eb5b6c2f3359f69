"""The run to repeat, and how its environment differs from the current one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tridock.contracts import records, run_folder
from tridock.differences import ABSENT, Difference, differences, flattened
from tridock.errors import Problem, RequestError

Metrics = tuple[list[records.Record], records.Evaluations]
"""The result of :func:`tridock.contracts.records.read_metrics`."""
_OF_THE_RUN: Final = ("run_id", "created", "started_by", "config")
"""Fields of a manifest that do not affect the run."""
_DATA: Final = ("data_sha256", "data_sha256_by_manifest", "data_bytes")
_PLAN: Final = (
    "world_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "context_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "global_batch_size",
)
_MOVED: Final = "before-1"
"""A folder of a run that lost a node and continued on others."""


@dataclass(frozen=True, slots=True)
class Original:
    folder: Path
    manifest: records.Record
    plan: records.Record
    metrics: Metrics
    device: str | None
    """As the ranks logged it; None for a run that did not finish."""
    moved: bool
    """Whether the run continued on other nodes, so that its first losses have another layout."""

    @property
    def experiment(self) -> Path:
        return self.folder / run_folder.EXPERIMENT

    @property
    def world_size(self) -> int | None:
        size = self.plan.get("world_size")
        return size if isinstance(size, int) else None


def read_original(folder: Path, *, losses: bool = True) -> Original:
    """Reads a run folder. Raises :class:`RequestError` if it is not one, or has no losses where it needs some."""
    records.check_run(folder)
    original = Original(
        folder=folder,
        manifest=records.read_object(folder / run_folder.MANIFEST),
        plan=records.read_plan(folder),
        metrics=records.read_metrics(folder),
        device=records.latest(records.read_lines(folder / run_folder.EVENTS), "device"),
        moved=(folder / _MOVED).exists(),
    )
    problems = []
    if losses and not original.metrics[0]:
        where, todo = str(folder / run_folder.METRICS), "name a run that has logged losses"
        problems.append(Problem(where, "has no losses to compare with", "no logged iteration", todo))
    if original.world_size is None:
        where, todo = str(folder / run_folder.PLAN), "fetch the run's folder whole: tridock fetch"
        problems.append(Problem(where, "does not record the number of ranks", "no world_size", todo))
    RequestError.raise_for(problems)
    return original


def environment(original: Original, manifest: Mapping[str, Any], plan: Mapping[str, Any]) -> list[Difference]:
    then = {**original.manifest, "plan": {name: original.plan.get(name) for name in _PLAN}}
    now = {**manifest, "plan": {name: plan.get(name) for name in _PLAN}}
    return differences([then, now], _OF_THE_RUN)


def data_problems(original: Original, manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields data files that differ from those of the original run, among those known of both."""
    for section in _DATA:
        then, now = (dict(flattened(_section(it, section))) for it in (original.manifest, manifest))
        for name, value in then.items():
            here = now.get(name, ABSENT)
            if ABSENT not in (value, here) and value != here:
                what = f"is not the data that the run has read: {section} was {value}"
                yield Problem(name, what, here, "restore that data, or compare anyway with --force")


def knows_data(original: Original) -> bool:
    return any(_section(original.manifest, name) for name in _DATA)


def _section(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = manifest.get(name)
    return found if isinstance(found, Mapping) else {}
