"""What engine ``megatron-core`` does with each field of an experiment."""

from __future__ import annotations

from typing import Final

from tridock.engines.fields import COMMON, HONOURED, NO_TOKENIZER, Fields, Refused

_NO_DEEPSPEED: Final = "megatron-core runs without DeepSpeed"
_DISTRIBUTED: Final = "leave it out; parallel.use_distributed_optimizer shares out the optimizer's state"
_OTHER_NAME: Final = "has another name in megatron-core"

FIELDS: Final[Fields] = {
    **COMMON,
    "model": HONOURED,
    "parallel": HONOURED,
    "train": HONOURED,
    "parallel.strategy": Refused(_NO_DEEPSPEED, _DISTRIBUTED, default="ddp"),
    "parallel.zero_stage": Refused(_NO_DEEPSPEED, _DISTRIBUTED),
    "parallel.data_parallel_shard_size": Refused(),
    "parallel.pipeline_schedule": Refused(),
    "model.checkpoint_activations": Refused(
        _OTHER_NAME,
        "set model.recompute_granularity to full, recompute_method to uniform and recompute_num_layers to 1",
    ),
    "model.checkpoint_num_layers": Refused(_OTHER_NAME, "set model.recompute_num_layers instead"),
    "model.partition_activations": Refused(),
    "model.checkpoint_in_cpu": Refused(),
    "model.contiguous_checkpointing": Refused(),
    "model.synchronize_each_layer": Refused(),
    "train.checkpoint_folder": Refused("engine megatron-core saves in the run's folder"),
    "train.compile": Refused(),
    "megatron_args": Refused("engine megatron-core has no such arguments"),
    "data.vocab_file": NO_TOKENIZER,
    "data.merge_file": NO_TOKENIZER,
}
