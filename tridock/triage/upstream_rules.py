"""Rules about what upstream says: torch, NCCL, Gloo, DeepSpeed, Megatron, Python, the system, ssh."""

from typing import Final

from tridock.contracts.events import Cause
from tridock.triage.rule import Rule, regex

UPSTREAM: Final = (
    # Memory: of the GPU, of the host, shared.
    Rule(
        "cuda-out-of-memory",
        "the GPU ran out of memory",
        "lower batch.micro_batch_size, recompute activations, or split the model over more ranks: "
        "`fab plan --search` lists the layouts that fit",
        "torch, c10/cuda/CUDACachingAllocator.cpp",
        says=regex(
            r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
            r"|Cuda failure (?:2 )?'out of memory'"
        ),
        own=True,
        memory=True,
        proof="recorded",
    ),
    Rule(
        "shared-memory-too-small",
        "the shared memory of {node} (/dev/shm) is too small",
        "set container.ipc: host or a larger container.shm_size in the cluster's settings, then fab up",
        "torch, multiprocessing and its data loader; NCCL, shm.cc",
        says=regex(
            r"(?:unable to (?:write to|open|mmap|resize|allocate).*</?torch_.*|/dev/shm.*)"
            r"(?:No space left on device|Cannot allocate memory|\(28\)|\(12\))"
            r"|insufficient shared memory|out of shared memory|Error while creating shared memory segment"
            r"|No space left on device.*/dev/shm"
        ),
        own=True,
    ),
    Rule(
        "host-out-of-memory",
        "{node} ran out of memory",
        "give the container or the host more memory, start fewer ranks there, or lower batch.micro_batch_size",
        "torch, c10/core/impl/alloc_cpu.cpp; Python; numpy",
        says=regex(
            r"DefaultCPUAllocator|\bMemoryError\b|std::bad_alloc|Cannot allocate memory|Unable to allocate [\d.]+ "
        ),
        memory=True,
    ),
    Rule(
        "too-many-open-files",
        "the limit on open files was reached on {node}",
        "raise nofile in container.ulimits of the cluster's settings, then fab up",
        "the operating system (EMFILE)",
        says=regex(r"Too many open files|\[Errno 24\]|received 0 items of ancdata"),
    ),
    Rule(
        "too-many-processes",
        "the limit on processes or threads was reached on {node}",
        "raise container.ulimits nproc or Docker's --pids-limit (container.extra_args), or lower OMP_NUM_THREADS",
        "the operating system (EAGAIN)",
        says=regex(r"can't start new thread|Resource temporarily unavailable|BlockingIOError.*(?:fork|thread)"),
    ),
    # The way between the ranks: ssh, rendezvous, collectives.
    Rule(
        "address-in-use",
        "the rendezvous port was taken between launch and start",
        "launch again to use another port; a fixed launch.master_port must be free: `ss -ltnp` on the head shows what "
        "listens on it",
        "torch, TCPStore; the operating system (EADDRINUSE)",
        says=regex(r"EADDRINUSE|[Aa]ddress already in use"),
    ),
    Rule(
        "ssh-host-key",
        "a node presents a host key that is not the cluster's",
        "run fab keys; if that does not help, something else listens on the nodes' ssh port",
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
        "check that the node is up (fab status) and that the head resolves and reaches its name (fab check); "
        "nodes.<name>.address in the settings sets its address",
        "OpenSSH; pdsh",
        says=regex(
            r"ssh: (?:Could not resolve hostname|connect to host) \S+|^pdsh@\S+: \S+: ssh exited with exit code 255"
        ),
    ),
    Rule(
        "launcher-missing-program",
        "a program that the launcher needs is not in the image",
        "build the image again: make image",
        "bash; DeepSpeed's launcher",
        says=regex(r"pdsh: (?:command )?not found|'pdsh' is not installed|launcher 'pdsh' not installed"),
        proof="recorded",
    ),
    Rule(
        "collective-timeout",
        "a collective timed out: a rank does not take part in it",
        "read the log of the missing rank; DEEPSPEED_TIMEOUT (minutes) in the experiment's env sets a longer timeout",
        "NCCL's watchdog in torch; Gloo, unbound_buffer.cc",
        says=regex(
            r"Watchdog caught collective operation timeout|Timed out waiting \d+ ?ms for|wait timeout after \d+ms"
        ),
        own=True,
        waits=True,
    ),
    Rule(
        "no-such-interface",
        "{node} lacks a network interface that the environment names",
        "correct NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (Gloo needs exact names); fab check shows the interfaces",
        "Gloo, tcp/device.cc; NCCL, bootstrap.cc",
        says=regex(r"Unable to find address for:|no socket interface found|Unable to find interface"),
        own=True,
    ),
    Rule(
        "nccl-cannot-connect",
        "{node} cannot connect to the address that NCCL uses of a node: {peer}",
        "set NCCL_SOCKET_IFNAME in the cluster's env to the interface that joins the nodes, and open its ports in the "
        "firewall; fab check tests the addresses",
        "NCCL, misc/socket.cc",
        says=regex(r"Connect to (?P<peer>\S+) failed :"),
        own=True,
        proof="recorded",
    ),
    Rule(
        "duplicate-gpu",
        "two ranks of {node} use the same GPU",
        "start at most one rank per GPU there: lower its slots in the hostfile (or --world), and see which devices "
        "CUDA_VISIBLE_DEVICES names; NCCL does not join MIG slices of one GPU",
        "NCCL, init.cc",
        says=regex(r"Duplicate GPU detected"),
        own=True,
        proof="recorded",
    ),
    Rule(
        "rendezvous",
        "not all ranks reached the rendezvous",
        "look in logs/launcher.log for nodes that did not start; check that all nodes reach the head (fab check)",
        "Tridock, train/process_group.py",
        causes={Cause.RENDEZVOUS_FAILED},
    ),
    # Numbers and files: data, checkpoints, disks.
    Rule(
        "loss-not-finite",
        "the training diverged: the loss is not finite",
        "lower optimizer.lr, lengthen optimizer.lr_warmup_iters, clip the gradient, or use bf16 or fp32; "
        "resume from an earlier checkpoint with train.load",
        "Tridock; DeepSpeed, runtime/fp16/loss_scaler.py",
        causes={Cause.LOSS_NOT_FINITE},
        says=regex(r"Current loss scale already at minimum"),
        own=True,
    ),
    Rule(
        "vocabulary-too-small",
        "the data contain a token outside the model's vocabulary",
        "leave model.vocab_size out, or set the size of the tokenizer that created the data; "
        "`tridock data inspect` shows the largest token",
        "Tridock; torch, embedding and Indexing.cu",
        causes={Cause.TOKEN_OUTSIDE_VOCABULARY},
        says=regex(r"index out of range in self|srcSelectDimSize"),
        own=True,
    ),
    Rule(
        "checkpoint-of-another-layout",
        "the checkpoint was saved with another number of ranks, layout or model",
        "use the layout that saved it, or engine megatron-core, whose checkpoints load on any layout",
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
        "a file of the checkpoint is truncated or damaged",
        "use the previous checkpoint (train.load accepts an iter_… folder), and check the disk",
        "torch, PytorchStreamReader; pickle",
        says=regex(
            r"PytorchStreamReader failed|failed finding central directory|unexpected EOF, expected \d+ more bytes"
            r"|invalid load key|Ran out of input|UnpicklingError\(.?pickle data was truncated"
        ),
    ),
    Rule(
        "checkpoint-of-another-version",
        "the checkpoint holds objects that this version cannot read: another torch, DeepSpeed or Megatron wrote it",
        "load it with the image that wrote it (its run's manifest.json has the versions)",
        "torch, serialization.py; Tridock",
        causes={Cause.CHECKPOINT_FOREIGN_OBJECT},
        says=regex(r"Weights only load failed|Can't get attribute '?\S+'? on <module"),
    ),
    Rule(
        "index-maps-missing",
        "Megatron's index maps are missing on {node}",
        "run fab data with the experiment, which builds and copies them; or make the data folder writable",
        "Megatron, data/gpt2_dataset.py",
        causes={Cause.INDEX_MAPS_NOT_WRITABLE},
        says=regex(r"No such file or directory: '?(?P<path>[^'\n]*indexmap[^'\n]*\.npy)"),
        own=True,
    ),
    Rule(
        "disk-full",
        "a disk of {node} is full",
        "free space there (runs/ and checkpoints/ grow; see train.keep_checkpoints, docker system df), then resume "
        "with train.load from the last complete checkpoint",
        "the operating system (ENOSPC, EDQUOT, EFBIG); torch, inline_container.cc",
        says=regex(
            r"No space left on device|Disk quota exceeded|File too large|PytorchStreamWriter failed writing"
            r"|\] \. unexpected pos \d+ vs \d+"
        ),
        own=True,
    ),
    Rule(
        "missing-file",
        "a file is missing on {node}: {path}",
        "copy it to every node with fab data --path, or correct the field that names it",
        "the operating system (ENOENT); Tridock",
        says=regex(r"No such file or directory(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
    Rule(
        "permission",
        "{who} has no permission for a file or folder: {path}",
        "give it to the node's user (the ssh user's uid), or mount it writable",
        "the operating system (EACCES, EROFS)",
        says=regex(r"(?:Permission denied|Read-only file system|Operation not permitted)(?:: '?(?P<path>[^'\"\n)]+))?"),
    ),
    # Versions and programs: imports, drivers, GPUs that fail.
    Rule(
        "collectives-differ",
        "the ranks ran different collectives: a node has another version of the code, the patches or the experiment",
        "check that all nodes have the same image (fab check, fab up), then launch again",
        "torch, ProcessGroupWrapper.cpp; Gloo, pair.cc",
        says=regex(
            r"Detected mismatch between collectives|[Mm]ismatch between collective operation types"
            r"|op\.preamble\.length <= op\.nbytes"
        ),
        own=True,
    ),
    Rule(
        "cuda-driver",
        "the driver of {node} does not support the image's CUDA",
        "update the driver, or build on an older base image: make image BASE_IMAGE=nvcr.io/nvidia/pytorch:24.12-py3",
        "torch, c10/cuda/CUDAFunctions.cpp; CUDA's runtime",
        says=regex(
            r"CUDA driver version is insufficient|NVIDIA driver on your system is too old|Found no NVIDIA driver"
            r"|forward compatibility was attempted|CUDA_ERROR_COMPAT_NOT_SUPPORTED"
        ),
        own=True,
        proof="recorded",
    ),
    Rule(
        "cuda-architecture",
        "the image has no code for the GPUs of {node}",
        "build on a base image that supports these GPUs: make image BASE_IMAGE=…",
        "CUDA's runtime",
        says=regex(
            r"no kernel image is available for execution|is not compatible with the current PyTorch installation"
        ),
        proof="recorded",
    ),
    Rule(
        "gpu-fault",
        "a GPU of {node} failed, or a kernel wrote outside its memory",
        "look for Xid lines in dmesg there; leave the GPU out with --exclude; CUDA_LAUNCH_BLOCKING=1 finds a faulty "
        "kernel",
        "CUDA's runtime; NVIDIA's driver",
        says=regex(
            r"uncorrectable (?:NVLink|ECC) error|an illegal memory access was encountered|unspecified launch failure"
            r"|GPU has fallen off the bus|NVRM: Xid|device-side assert triggered"
        ),
        own=True,
        proof="recorded",
    ),
    Rule(
        "nccl-error",
        "NCCL failed on {node}",
        "launch again with NCCL_DEBUG=INFO in the experiment's env: the line before the error names the interface, "
        "device or peer",
        "torch, NCCLUtils.hpp",
        causes={Cause.NCCL_FAILED},
        says=regex(r"nccl(?:UnhandledCudaError|SystemError|InternalError|InvalidUsage|InvalidArgument)"),
        proof="recorded",
    ),
    Rule(
        "import",
        "a Python package, or a name in it, is missing on {node}: {name}",
        "check that all nodes have the same image (fab check); build it again with make image",
        "Python",
        says=regex(
            r"No module named '?(?P<name>[\w.]+)|cannot import name '(?P<what>\w+)'|ImportError"
            r"|undefined symbol: (?P<symbol>\w+)"
        ),
    ),
    Rule(
        "version-mismatch",
        "the code does not match a package: the node has another version of torch, DeepSpeed or a patch",
        "compare the nodes (fab check shows image, code and patch hashes), and build the image again: make image",
        "Python",
        says=regex(
            r"got an unexpected keyword argument|has no attribute '\w+'|missing \d+ required positional argument"
        ),
    ),
    Rule(
        "extension-not-built",
        "a CUDA extension could not be built or loaded on {node}",
        "use an image that contains it (make image), or leave the fused option out",
        "torch, utils/cpp_extension.py; DeepSpeed, ops/op_builder",
        says=regex(
            r"Error building extension|Ninja is required|CUDA_HOME (?:environment variable is not set|does not exist)"
        ),
        proof="recorded",
    ),
    Rule(
        "terminated",
        "{who} was terminated from outside the run: SIGTERM or Ctrl-C",
        "find the sender (a batch system's limit, a shutdown, docker stop); resume with train.load",
        "Tridock, train/rank.py",
        causes={Cause.TERMINATED, Cause.INTERRUPTED},
    ),
)
