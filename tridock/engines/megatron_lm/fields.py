"""What engine ``megatron-deepspeed`` does with each field of an experiment."""

from __future__ import annotations

from typing import Final

from tridock.engines.fields import COMMON, HONOURED, Fields, Refused, Unused

FIELDS: Final[Fields] = {
    **COMMON,
    "model": HONOURED,
    "parallel": HONOURED,
    "train": HONOURED,
    "megatron_args": HONOURED,
    "model.vocab_size": Unused("Megatron-LM v1.1.5 counts the tokens of data.vocab_file; the plan counts with this"),
    "parallel.data_parallel_shard_size": Refused(),
    "parallel.pipeline_schedule": Refused(),
    "parallel.virtual_pipeline_model_parallel_size": Refused(),
    "parallel.context_parallel_size": Refused(),
    "parallel.sequence_parallel": Refused(),
    "parallel.use_distributed_optimizer": Refused(),
    "model.recompute_granularity": Refused(),
    "model.recompute_method": Refused(),
    "model.recompute_num_layers": Refused(),
    "train.compile": Refused(),
}
