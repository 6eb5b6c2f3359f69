"""Rules about versions and programs: imports, drivers, GPUs that fail."""

from __future__ import annotations

from typing import Final

from tridock.triage.rule import Rule, words

SOFTWARE: Final = (
    Rule(
        "collectives-differ",
        "the ranks ran different collectives: another version of the code, the patches or the experiment on some node",
        "see that all nodes have the same image (fab check, fab up), then launch again",
        "torch, ProcessGroupWrapper.cpp; Gloo, pair.cc",
        says=words(
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
        says=words(
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
        says=words(
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
        says=words(
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
        says=words(
            r"No module named '?(?P<name>[\w.]+)|cannot import name '(?P<what>\w+)'|ImportError"
            r"|undefined symbol: (?P<symbol>\w+)"
        ),
    ),
    Rule(
        "version-mismatch",
        "the code and a package do not fit: another version of torch, DeepSpeed or a patch than on the other nodes",
        "compare the nodes (fab check shows image, code and patch hashes), and build the image anew: make image",
        "Python",
        says=words(
            r"got an unexpected keyword argument|has no attribute '\w+'|missing \d+ required positional argument"
        ),
    ),
    Rule(
        "extension-not-built",
        "a CUDA extension could not be built or loaded on {node}",
        "use an image that has it built (make image), or leave the fused option out",
        "torch, utils/cpp_extension.py; DeepSpeed, ops/op_builder",
        says=words(
            r"Error building extension|Ninja is required|CUDA_HOME (?:environment variable is not set|does not exist)"
        ),
        proof="recorded",
    ),
    Rule(
        "ended-from-outside",
        "{who} was told to end: SIGTERM or Ctrl-C from outside of the run",
        "find who did (a batch system's limit, a shutdown, docker stop); go on with train.load",
        "Tridock, train/rank.py",
        says=words(r"^(?:stopped by SIGTERM|interrupted)"),
    ),
)
