"""What of engine ``torch`` is sharded with FSDP2."""

from __future__ import annotations

from tridock.experiment import Experiment


def is_sharded(experiment: Experiment) -> bool:
    """Whether FSDP2, tensor parallelism or a pipeline partitions the model or its states."""
    parallel = experiment.parallel
    split = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size > 1
    return split or parallel.strategy == "fsdp"


def shards_of(experiment: Experiment, replicas: int) -> int:
    """Ranks that hold one copy of the states together."""
    return (experiment.parallel.data_parallel_shard_size or replicas) if experiment.parallel.strategy == "fsdp" else 1
