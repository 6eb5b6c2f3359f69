"""The default experiment of a launch: a small GPT, with 3D parallelism if the slots allow it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

CONFIG: Final = Path("configs/demo-3d.yaml")
_MICRO_BATCH: Final = 4
"""The micro batch size in the file."""


def default_layout(slots: Mapping[str, Sequence[int]]) -> tuple[str, tuple[str, ...], str]:
    """Chooses TP2 PP2 if the number of slots is a multiple of four, TP2 or PP2 for another even number, or else only
    data parallelism. Returns the layout, the fields of :data:`CONFIG` that it overrides, and the reason."""
    counts = [len(numbers) for numbers in slots.values()]
    ranks = sum(counts)
    if ranks % 4 == 0:
        tensor, pipeline, why = 2, 2, "a multiple of four"
    elif ranks % 2 == 0 and all(count % 2 == 0 for count in counts):
        tensor, pipeline, why = 2, 1, "a multiple of two, but not of four"
    elif ranks % 2 == 0:
        tensor, pipeline, why = 1, 2, "a multiple of two, and a pair of ranks would cross nodes at every layer"
    else:
        tensor, pipeline, why = 1, 1, "odd"
    replicas = ranks // (tensor * pipeline)
    overrides = (
        f"parallel.tensor_model_parallel_size={tensor}",
        f"parallel.pipeline_model_parallel_size={pipeline}",
        # Four micro batches per replica, or two with several replicas.
        f"batch.global_batch_size={_MICRO_BATCH * replicas * max(2, 4 // replicas)}",
    )
    reason = "there is one slot" if ranks == 1 else f"{ranks} slots are {why}"
    return f"TP{tensor} PP{pipeline} DP{replicas}", overrides, reason


def choose_experiment(
    config: Path | None, overrides: Sequence[str], slots: Mapping[str, Sequence[int]]
) -> tuple[Path, Sequence[str], str]:
    """Returns the named experiment and its overrides, else the default one's with these after its own, and a note."""
    if config is not None:
        return config, overrides, ""
    layout, own, reason = default_layout(slots)
    note = f"no --config: {CONFIG}"
    if not any(override.startswith("parallel.") for override in overrides):
        note += f" with {layout}, because {reason}"
    return CONFIG, [*own, *overrides], note
