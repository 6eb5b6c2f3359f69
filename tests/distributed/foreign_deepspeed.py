"""Somebody else's program: transformers' model under ``deepspeed.initialize``, two steps, and ``save_checkpoint``.

Arguments: ZeRO's stage, a JSON file with transformers' ``config.json``, and a folder. The model itself is saved beside
the checkpoint, with ``save_pretrained`` in ``model``.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
import transformers

stage, config, folder = int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3])
# Otherwise it compiles a collective in the user's cache, where the lock of a killed compiler stops every later one.
deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed("gloo")
settings = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": stage, "sub_group_size": 3000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}
kind = getattr(transformers, config["architectures"][0])  # before zero.Init, under which its imports fail
torch.manual_seed(1)
with deepspeed.zero.Init(config_dict_or_path=settings, enabled=stage == 3):
    model = kind(transformers.AutoConfig.for_model(**config))
decayed = [it for it in model.parameters() if getattr(it, "ds_shape", it.shape)[1:]]
others = [it for it in model.parameters() if not getattr(it, "ds_shape", it.shape)[1:]]
groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=settings)
for step in range(2):
    torch.manual_seed(10 * step + dist.get_rank())
    tokens = torch.randint(config["vocab_size"], (2, 16))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
engine.save_checkpoint(str(folder))
with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "model")
    dist.barrier()
dist.destroy_process_group()
