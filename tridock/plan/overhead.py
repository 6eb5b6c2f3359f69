"""The fixed overhead of a GPU rank: what no tensor of the run accounts for.

EleutherAI's calculator leaves about 5 GiB a GPU unexplained ("Transformer Math 101", 2023). Here it is three terms, of
which the last is set by the one run whose whole use is known: 7.5B on 16 V100, 14,659 MiB by ``nvidia-smi``
(docs/planner.md). It is only taken where there is room: before it fails, torch's allocator gives back what it merely
keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tridock.engines import engine_of
from tridock.experiment import Experiment
from tridock.layout.shape import Shape, Term, total_bytes

_MIB: Final = 2**20
CONTEXT_BYTES: Final = 512 * _MIB
"""CUDA's context, kernels, cuBLAS's workspaces."""
COMMUNICATOR_BYTES: Final = 150 * _MIB
"""NCCL's channels and buffers, for each group that a rank is in."""
SLACK_BYTES: Final = 4480 * _MIB
"""What torch's allocator reserves beyond what is in use, where there is room."""


def communicators(experiment: Experiment, shape: Shape) -> int:
    """NCCL's groups that a rank takes part in: those of the layout, the model's (for the norm), and the world's."""
    parallel = experiment.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    return 1 + (1 if split else 0) + len(engine_of(experiment).traffic(experiment, shape))


def overhead_terms(experiment: Experiment, shape: Shape, used: Sequence[Term], limit_bytes: int) -> list[Term]:
    """On top of what is ``used``, on a GPU of ``limit_bytes``."""
    count, in_use = communicators(experiment, shape), total_bytes(used)
    fixed = [
        Term("CUDA context", CONTEXT_BYTES, "fixed overhead: context, kernels, cuBLAS workspaces"),
        Term("NCCL", count * COMMUNICATOR_BYTES, f"fixed overhead: {count} communicators x 150 MiB"),
    ]
    left = max(0, limit_bytes - in_use - total_bytes(fixed))
    slack = Term("allocator slack", min(SLACK_BYTES, left), "fixed overhead: reserved beyond what is in use, if free")
    return [*fixed, slack]
