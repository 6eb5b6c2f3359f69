#!/usr/bin/env bash
# Makes the image's Python environment from the locks.
#
#   tools/image/environment.sh FOLDER cpu|gpu
#
# cpu: everything is installed, torch's CPU build too. gpu: the environment sees the base image's packages, torch among
# them, and gets only those of the lock that the base lacks; a package of the base is never replaced.
set -Eeuo pipefail

readonly VENV=$1 FLAVOR=$2
HERE=$(dirname "$(readlink -f "$0")")
readonly HERE
readonly TOOLS=$HERE/.. LOCKS=$HERE/../../locks
readonly PYTHON=$VENV/bin/python

step() {
    printf '%s %s\n' "$(date +%T)" "$1"
}

torch_version() {
    sed -n 's/^torch==//p' "$LOCKS/torch.txt"
}

make_environment() {
    if [[ $FLAVOR == gpu ]]; then
        python3 -m venv --without-pip --system-site-packages "$VENV"
    else
        python3 -m venv "$VENV"
    fi
}

install_locked() {
    local list=/tmp/requirements.txt
    if [[ $FLAVOR == gpu ]]; then
        "$PYTHON" "$HERE/missing-requirements.py" "$LOCKS/train-gpu.txt" >"$list"
        ! grep -q . "$list" || "$TOOLS/python/install-locked.sh" "$PYTHON" "$list"
        "$PYTHON" "$HERE/missing-requirements.py" --unfit "$LOCKS/train-gpu.txt" >"$list"
        ! grep -q . "$list" || "$TOOLS/python/install-locked.sh" "$PYTHON" "$list"
    else
        "$TOOLS/python/install-locked.sh" "$PYTHON" "$LOCKS/train-cpu.txt"
    fi
}

# The ops that DeepSpeed would otherwise compile at first use, where a node may have no compiler: the shared-memory
# reduction that it loads whenever a CPU process group is formed, its own Adam, and what reads and writes NVMe with the
# memory that it locks for that.
install_deepspeed() {
    export MAX_JOBS CXX="$HERE/portable-cxx.sh" DS_ENABLE_NINJA=1 DS_BUILD_AIO=1 DS_BUILD_PIN_MEMORY=1
    MAX_JOBS=$(nproc)
    if [[ $FLAVOR == cpu ]]; then
        export DS_BUILD_SHM_COMM=1 DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1 PORTABLE_CXX_COMPILED=/tmp/compiled-headers
        # DeepSpeed 0.19.8 does not link its ops for CPUs with the libraries that they name.
        export LDFLAGS="-Wl,--no-as-needed -laio"
    elif command -v nvcc >/dev/null; then
        # For every GPU generation in TORCH_CUDA_ARCH_LIST, which NVIDIA's images set.
        export DS_BUILD_CPU_ADAM=1 DS_BUILD_FUSED_ADAM=1
        # async_io is linked with the driver's library, which a build has no driver for; the toolkit has a stub of it.
        export LIBRARY_PATH=${CUDA_HOME:-/usr/local/cuda}/lib64/stubs:${LIBRARY_PATH:-}
    fi
    "$TOOLS/python/install-deepspeed.sh" "$PYTHON" || {
        # Its links to CUDA differ between base images. A run with states on NVMe is refused where the op is missing.
        [[ $FLAVOR == gpu ]] || return 3
        step "without async_io, which does not compile here"
        DS_BUILD_AIO=0 "$TOOLS/python/install-deepspeed.sh" "$PYTHON"
    }
    rm -rf /tmp/compiled-headers
}

# What an environment without a compiler, and without anybody's tests, has no use for.
strip_environment() {
    local packages
    packages=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    rm -rf "$packages"/torch/{include,share,test} "$packages"/torch/bin/{protoc*,test_*}
    find "$packages" -name '*.a' -delete
}

main() {
    local before after
    step "making $VENV"
    make_environment
    before=$("$PYTHON" -c 'import torch; print(torch.__version__, torch.__file__)' 2>/dev/null || true)
    step "installing the locked packages"
    install_locked
    step "installing torch"
    "$TOOLS/python/install-torch.sh" "$PYTHON" "$(torch_version)" "$FLAVOR" "$LOCKS/wheels"
    step "installing DeepSpeed and compiling its ops"
    install_deepspeed
    step "checking"
    if [[ $FLAVOR == gpu ]]; then
        after=$("$PYTHON" -c 'import torch; print(torch.__version__, torch.__file__)')
        [[ $before == "$after" ]] || { echo "image/environment: the base image's torch was replaced; got $after; expected $before" >&2; exit 3; }
    else
        "$PYTHON" -m pip check
        strip_environment
    fi
    "$PYTHON" -W ignore -c 'import deepspeed, megatron.core, numpy, tokenizers, yaml, pydantic, rich, matplotlib, tensorboard' >/dev/null
}

main
