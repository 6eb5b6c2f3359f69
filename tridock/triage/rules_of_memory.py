"""Rules about memory: of the GPU, of the host, shared."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule, words

MEMORY: Final = (
    Rule(
        "cuda-out-of-memory",
        "the GPU's memory ran out",
        "lower batch.micro_batch_size, checkpoint activations, or share the model among more ranks: "
        "`fab plan --search` lists the layouts that fit",
        "torch, c10/cuda/CUDACachingAllocator.cpp",
        says=words(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"),
        memory=True,
        proof="recorded",
    ),
    Rule(
        "shared-memory-too-small",
        "the shared memory of {node} (/dev/shm) is too small",
        "set container.ipc: host, or a larger container.shm_size, in the cluster's settings; then fab up",
        "torch, multiprocessing and its data loader; NCCL, shm.cc",
        says=words(
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
        says=words(
            r"DefaultCPUAllocator|\bMemoryError\b|std::bad_alloc|Cannot allocate memory|Unable to allocate [\d.]+ "
        ),
        memory=True,
    ),
    Rule(
        "too-many-open-files",
        "a limit of {node} on open files was reached",
        "raise it: nofile in container.ulimits of the cluster's settings, then fab up",
        "the operating system (EMFILE)",
        says=words(r"Too many open files|\[Errno 24\]|received 0 items of ancdata"),
    ),
    Rule(
        "too-many-processes",
        "a limit of {node} on processes or threads was reached",
        "raise container.ulimits nproc or Docker's --pids-limit (container.extra_args), or lower OMP_NUM_THREADS",
        "the operating system (EAGAIN)",
        says=words(r"can't start new thread|Resource temporarily unavailable|BlockingIOError.*(?:fork|thread)"),
    ),
)
