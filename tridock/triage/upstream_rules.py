"""Rules about what upstream says: torch, NCCL, Gloo, DeepSpeed, Megatron, Python, the system, ssh."""

from __future__ import annotations

from typing import Final

from tridock.contracts.events import Cause
from tridock.triage.rule import Rule, regex

UPSTREAM: Final = (
    # Memory: of the GPU, of the host, shared.
    Rule(
        "cuda-out-of-memory",
        "the GPU's memory ran out",
        "lower batch.micro_batch_size, checkpoint activations, or share the model among more ranks: "
        "`fab plan --search` lists the layouts that fit",
        "torch, c10/cuda/CUDACachingAllocator.cpp",
        says=regex(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        memory=True,
        proof="recorded",
    ),
    Rule(
        "shared-memory-too-small",
        "the shared memory of {node} (/dev/shm) is too small",
        "set container.ipc: host, or a larger container.shm_size, in the cluster's settings; then fab up",
        "torch, multiprocessing and its data loader; NCCL, shm.cc",
        says=regex(
            r"(?:unable to (?:write to|open|mmap|resize|allocate).*</?torch_.*|/dev/shm.*)"
            r"(?:No space left on device|Cannot allocate memory|\(28\)|\(12\))"
            r"|insufficient shared memory|out of shared memory|Error while creating shared memory segment"
            r"|No space left on device.*/dev/shm"
        ),
    ),
    Rule(
        "host-out-of-memory",
        "the memory of {node} ran out",
        "give the container or the host more memory, start fewer ranks there, or lower batch.micro_batch_size",
        "torch, c10/core/impl/alloc_cpu.cpp; Python; numpy",
        says=regex(
            r"DefaultCPUAllocator|\bMemoryError\b|std::bad_alloc|Cannot allocate memory|Unable to allocate [\d.]+ "
        ),
        memory=True,
    ),
    Rule(
        "too-many-open-files",
        "a limit of {node} on open files was reached",
        "raise it: nofile in container.ulimits of the cluster's settings, then fab up",
        "the operating system (EMFILE)",
        says=regex(r"Too many open files|\[Errno 24\]|received 0 items of ancdata"),
    ),
    Rule(
        "too-many-processes",
        "a limit of {node} on processes or threads was reached",
        "raise container.ulimits nproc or Docker's --pids-limit (container.extra_args), or lower OMP_NUM_THREADS",
        "the operating system (EAGAIN)",
        says=regex(r"can't start new thread|Resource temporarily unavailable|BlockingIOError.*(?:fork|thread)"),
    ),
    # The way between the ranks: ssh, rendezvous, collectives.
    Rule(
        "address-in-use",
        "the port of the rendezvous was taken between the launch and the start",
        "launch again, which picks another; a fixed launch.master_port has to be free: `ss -ltnp` on the head shows "
        "who listens",
        "torch, TCPStore; the operating system (EADDRINUSE)",
        says=regex(r"EADDRINUSE|[Aa]ddress already in use"),
    ),
    Rule(
        "ssh-host-key",
        "a node shows another host key than the cluster's",
        "bring the keys in order with fab keys; if it stays so, something else listens on the nodes' ssh port",
        "OpenSSH",
        says=regex(r"Host key verification failed|REMOTE HOST IDENTIFICATION HAS CHANGED"),
    ),
    Rule(
        "ssh-refused",
        "a node refuses the cluster's key, or something else listens on its ssh port",
        "run fab keys, then fab up; fab check names the node",
        "OpenSSH",
        says=regex(r"Permission denied \((?:publickey|password)[^)]*\)|Too many authentication failures"),
    ),
    Rule(
        "ssh-unreachable",
        "the head cannot reach a node over ssh",
        "see that the node is up (fab status) and that the head resolves and reaches its name (fab check); "
        "nodes.<name>.address in the settings says how",
        "OpenSSH; pdsh",
        says=regex(
            r"ssh: (?:Could not resolve hostname|connect to host) \S+|^pdsh@\S+: \S+: ssh exited with exit code 255"
        ),
    ),
    Rule(
        "launcher-missing-program",
        "a program that the launcher needs is not in the image",
        "build the image anew: make image",
        "bash; DeepSpeed's launcher",
        says=regex(r"pdsh: (?:command )?not found|'pdsh' is not installed|launcher 'pdsh' not installed"),
        proof="recorded",
    ),
    Rule(
        "collective-timeout",
        "a collective did not end in time: a rank does not take part in it",
        "look at the log of the rank that was late; DEEPSPEED_TIMEOUT (minutes) in the experiment's env allows more",
        "NCCL's watchdog in torch; Gloo, unbound_buffer.cc",
        says=regex(
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ ?ms for|wait timeout after \d+ms"
        ),
        own=True,
        waits=True,
    ),
    Rule(
        "no-such-interface",
        "a network interface that the environment names is not on {node}",
        "mend NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (Gloo takes exact names); fab check shows the interfaces",
        "Gloo, tcp/device.cc; NCCL, bootstrap.cc",
        says=regex(r"Unable to find address for:|no socket interface found|Unable to find interface"),
        own=True,
    ),
    Rule(
        "rendezvous",
        "not all ranks met",
        "see logs/launcher.log for nodes that did not start, and that all nodes reach the head's address (fab check)",
        "Tridock, train/process_group.py",
        causes={Cause.RENDEZVOUS_FAILED},
    ),
    Rule(
        "nccl-error",
        "NCCL failed on {node}",
        "launch again with NCCL_DEBUG=INFO in the experiment's env: the line before the error names the interface, "
        "device or peer",
        "torch, NCCLUtils.hpp",
        says=regex(r"nccl(?:UnhandledCuda|System|Internal|InvalidUsage|Remote)Error|NCCL error"),
        proof="recorded",
    ),
    # Numbers and files: data, checkpoints, disks.
    Rule(
        "loss-not-finite",
        "the training diverged: the loss is no finite number",
        "lower optimizer.lr, lengthen optimizer.lr_warmup_iters, clip the gradient, or use bf16 or fp32; "
        "go on from a checkpoint of before with train.load",
        "Tridock; DeepSpeed, runtime/fp16/loss_scaler.py",
        causes={Cause.LOSS_NOT_FINITE},
        says=regex(r"Current loss scale already at minimum"),
        own=True,
    ),
    Rule(
        "vocabulary-too-small",
        "the data hold a token that the model's vocabulary does not",
        "leave model.vocab_size out, or give the size of the tokenizer that made the data; "
        "`tridock data inspect` shows the largest token",
        "Tridock; torch, embedding and Indexing.cu",
        causes={Cause.TOKEN_OUTSIDE_VOCABULARY},
        says=regex(r"index out of range in self|srcSelectDimSize"),
        own=True,
    ),
    Rule(
        "checkpoint-of-another-layout",
        "the checkpoint was saved by another number of ranks, layout or model",
        "train on what it was saved with, or use engine megatron-core, whose checkpoints load on any layout",
        "Tridock; DeepSpeed, runtime/engine.py; Megatron, checkpointing.py; torch",
        causes={Cause.CHECKPOINT_MISMATCH},
        says=regex(
            r"checkpoint being loaded used a (?:DP|data parallel) world size"
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
        says=regex(
            r"PytorchStreamReader failed|failed finding central directory|unexpected EOF, expected \d+ more bytes"
            r"|invalid load key|Ran out of input|UnpicklingError\(.?pickle data was truncated"
        ),
    ),
    Rule(
        "checkpoint-of-another-version",
        "the checkpoint holds objects that this version does not read: another torch, DeepSpeed or Megatron wrote it",
        "load it with the image that wrote it (its run's manifest.json has the versions)",
        "torch, serialization.py; Tridock",
        causes={Cause.CHECKPOINT_FOREIGN_OBJECT},
        says=regex(r"Weights only load failed|Can't get attribute '?\S+'? on <module"),
    ),
    Rule(
        "index-maps-missing",
        "Megatron's index maps are not beside the data on {node}",
        "make and bring them with fab data, which makes them for the experiment; the folder of the data must be "
        "writable otherwise",
        "Megatron, data/gpt2_dataset.py",
        causes={Cause.INDEX_MAPS_NOT_WRITABLE},
        says=regex(r"No such file or directory: '?(?P<path>[^'\n]*indexmap[^'\n]*\.npy)"),
        own=True,
    ),
    Rule(
        "disk-full",
        "a disk of {node} is full",
        "free space there (runs/ and checkpoints/ grow; train.save_interval, docker system df), then go on with "
        "train.load from the last whole checkpoint",
        "the operating system (ENOSPC, EDQUOT, EFBIG); torch, inline_container.cc",
        says=regex(
            r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed writing"
            r"|\] \. unexpected pos \d+ vs \d+"
        ),
        own=True,
    ),
    Rule(
        "missing-file",
        "a file is not on {node}: {path}",
        "bring it to every node: fab data --path, or mend the field that names it",
        "the operating system (ENOENT); Tridock",
        says=regex(r"No such file or directory(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
    Rule(
        "permission",
        "{who} may not use a file or folder: {path}",
        "make it the node's user's (the ssh user's uid owns what a run writes), or mount it writable",
        "the operating system (EACCES, EROFS)",
        says=regex(r"(?:Permission denied|Read-only file system|Operation not permitted)(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
    # Versions and programs: imports, drivers, GPUs that fail.
    Rule(
        "collectives-differ",
        "the ranks ran different collectives: another version of the code, the patches or the experiment on some node",
        "see that all nodes have the same image (fab check, fab up), then launch again",
        "torch, ProcessGroupWrapper.cpp; Gloo, pair.cc",
        says=regex(
            r"Detected mismatch between collectives|[Mm]ismatch between collective operation types"
            r"|op\.preamble\.length <= op\.nbytes"
        ),
        own=True,
    ),
    Rule(
        "cuda-driver",
        "the driver of {node} does not go with the image's CUDA",
        "update the driver, or build on an older base: make image BASE_IMAGE=nvcr.io/nvidia/pytorch:24.12-py3",
        "torch, c10/cuda/CUDAFunctions.cpp; CUDA's runtime",
        says=regex(
            r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|Found no NVIDIA driver"
            r"|forward compatibility was attempted|CUDA_ERROR_COMPAT_NOT_SUPPORTED"
        ),
        proof="recorded",
    ),
    Rule(
        "cuda-architecture",
        "the image has no code for the GPUs of {node}",
        "build the image on a base that still, or already, has them: make image BASE_IMAGE=…",
        "CUDA's runtime",
        says=regex(
            r"no kernel image is available for execution|is not compatible with the current PyTorch installation"
        ),
        proof="recorded",
    ),
    Rule(
        "gpu-fault",
        "a GPU of {node} failed, or a kernel wrote outside its memory",
        "look for Xid lines in dmesg there, take the GPU out with --exclude, and set CUDA_LAUNCH_BLOCKING=1 to find a "
        "kernel of ours",
        "CUDA's runtime; NVIDIA's driver",
        says=regex(
            r"uncorrectable (?:NVLink|ECC) error|an illegal memory access was encountered|unspecified launch failure"
            r"|GPU has fallen off the bus|NVRM: Xid|device-side assert triggered"
        ),
        proof="recorded",
    ),
    Rule(
        "import",
        "a Python package or a name in it is missing on {node}: {name}",
        "see that all nodes have the same image (fab check); build it anew with make image",
        "Python",
        says=regex(
            r"No module named '?(?P<name>[\w.]+)|cannot import name '(?P<what>\w+)'|ImportError"
            r"|undefined symbol: (?P<symbol>\w+)"
        ),
    ),
    Rule(
        "version-mismatch",
        "the code and a package do not fit: another version of torch, DeepSpeed or a patch than on the other nodes",
        "compare the nodes (fab check shows image, code and patch hashes), and build the image anew: make image",
        "Python",
        says=regex(
            r"got an unexpected keyword argument|has no attribute '\w+'|missing \d+ required positional argument"
        ),
    ),
    Rule(
        "extension-not-built",
        "a CUDA extension could not be built or loaded on {node}",
        "use an image that has it built (make image), or leave the fused option out",
        "torch, utils/cpp_extension.py; DeepSpeed, ops/op_builder",
        says=regex(
            r"Error building extension|Ninja is required|CUDA_HOME (?:environment variable is not set|does not exist)"
        ),
        proof="recorded",
    ),
    Rule(
        "ended-from-outside",
        "{who} was told to end: SIGTERM or Ctrl-C from outside of the run",
        "find who did (a batch system's limit, a shutdown, docker stop); go on with train.load",
        "Tridock, train/rank.py",
        causes={Cause.TERMINATED, Cause.INTERRUPTED},
    ),
)
