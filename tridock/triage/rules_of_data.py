"""Rules about numbers and files: data, checkpoints, disks."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule, words

DATA: Final = (
    Rule(
        "loss-not-finite",
        "the training diverged: the loss is no finite number",
        "lower optimizer.lr, lengthen optimizer.lr_warmup_iters, clip the gradient, or use bf16 or fp32; "
        "go on from a checkpoint of before with train.load",
        "Tridock; DeepSpeed, runtime/fp16/loss_scaler.py",
        says=words(r"the loss is not finite|Current loss scale already at minimum"),
        own=True,
    ),
    Rule(
        "vocabulary-too-small",
        "the data hold a token that the model's vocabulary does not",
        "leave model.vocab_size out, or give the size of the tokenizer that made the data; "
        "`tridock data inspect` shows the largest token",
        "Tridock; torch, embedding and Indexing.cu",
        says=words(r"model\.vocab_size: is too small for the data|index out of range in self|srcSelectDimSize"),
        own=True,
    ),
    Rule(
        "checkpoint-of-another-layout",
        "the checkpoint was saved by another number of ranks, layout or model",
        "train on what it was saved with, or use engine megatron-core, whose checkpoints load on any layout",
        "Tridock; DeepSpeed, runtime/engine.py; Megatron, checkpointing.py; torch",
        says=words(
            r"the checkpoint \S+ was saved with|checkpoint being loaded used a (?:DP|data parallel) world size"
            r"|value from checkpoint \(.*\) is not equal|Error\(s\) in loading state_dict"
            r"|DP world size from checkpoint"
        ),
        own=True,
    ),
    Rule(
        "checkpoint-corrupted",
        "a checkpoint's file is cut short or damaged",
        "use the checkpoint before it: train.load takes one iter_… folder; see that the disk is sound",
        "torch, PytorchStreamReader; pickle",
        says=words(
            r"PytorchStreamReader failed|failed finding central directory|unexpected EOF, expected \d+ more bytes"
            r"|invalid load key|Ran out of input|UnpicklingError\(.?pickle data was truncated"
        ),
    ),
    Rule(
        "checkpoint-of-another-version",
        "the checkpoint holds objects that this version does not read: another torch, DeepSpeed or Megatron wrote it",
        "load it with the image that wrote it (its run's manifest.json has the versions)",
        "torch, serialization.py; Tridock",
        says=words(
            r"Weights only load failed|Can't get attribute '?\S+'? on <module"
            r"|does not belong into a checkpoint's \.metadata"
        ),
    ),
    Rule(
        "index-maps-missing",
        "Megatron's index maps are not beside the data on {node}",
        "make and bring them with fab data, which makes them for the experiment; the folder of the data must be "
        "writable otherwise",
        "Megatron, data/gpt2_dataset.py",
        says=words(r"No such file or directory: '?(?P<path>[^'\n]*indexmap[^'\n]*\.npy)|index maps: cannot be made"),
        own=True,
    ),
    Rule(
        "disk-full",
        "a disk of {node} is full",
        "free space there (runs/ and checkpoints/ grow; train.save_interval, docker system df), then go on with "
        "train.load from the last whole checkpoint",
        "the operating system (ENOSPC, EDQUOT, EFBIG); torch, inline_container.cc",
        says=words(
            r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed writing"
            r"|\] \. unexpected pos \d+ vs \d+"
            r"|the checkpoint could not be written; got (?:no space|disk quota|file too large)"
        ),
        own=True,
    ),
    Rule(
        "missing-file",
        "a file is not on {node}: {path}",
        "bring it to every node: fab data --path, or mend the field that names it",
        "the operating system (ENOENT); Tridock",
        says=words(r"No such file or directory(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
    Rule(
        "permission",
        "{who} may not use a file or folder: {path}",
        "make it the node's user's (the ssh user's uid owns what a run writes), or mount it writable",
        "the operating system (EACCES, EROFS)",
        says=words(r"(?:Permission denied|Read-only file system|Operation not permitted)(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
)
