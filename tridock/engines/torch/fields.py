"""What engine ``torch`` does with each field of an experiment."""

from __future__ import annotations

from typing import Final

from tridock.engines.fields import COMMON, HONOURED, NO_TOKENIZER, Fields, Refused

FIELDS: Final[Fields] = {
    **COMMON,
    "model": HONOURED,
    "parallel": HONOURED,
    "train": HONOURED,
    "model.checkpoint_num_layers": Refused("engine torch stores every layer's"),
    "model.partition_activations": Refused(),
    "model.checkpoint_in_cpu": Refused(),
    "model.contiguous_checkpointing": Refused(),
    "model.synchronize_each_layer": Refused(),
    "model.recompute_granularity": Refused(),
    "model.recompute_method": Refused(),
    "model.recompute_num_layers": Refused(),
    "parallel.context_parallel_size": Refused(),
    "parallel.sequence_parallel": Refused(),
    "parallel.use_distributed_optimizer": Refused(),
    "train.checkpoint_folder": Refused("engine torch saves in the run's folder"),
    "megatron_args": Refused("engine torch has no such arguments"),
    "data.vocab_file": NO_TOKENIZER,
    "data.merge_file": NO_TOKENIZER,
}
