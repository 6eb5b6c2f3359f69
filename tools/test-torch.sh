#!/usr/bin/env bash
# Runs tests with another version of torch, in an environment of its own.
#
#   tools/test-torch.sh 2.6.0 [pytest's arguments]
#
# TESTED  what runs (default: the unit tests of train/). CORE  another version of megatron-core than the locks'.
# PYTHON  the interpreter (default: that of .venv).
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly VERSION=$1 VENV=.cache/torch-$1${CORE:+-core-$CORE}
shift
[[ -x $VENV/bin/pip ]] || "${PYTHON:-.venv/bin/python}" -m venv "$VENV"
pip=("$VENV/bin/pip" install --quiet --disable-pip-version-check)
"${pip[@]}" "torch==$VERSION" numpy pydantic pyyaml safetensors tensorboard pytest pytest-timeout hypothesis \
    setuptools wheel ninja einops hjson msgpack psutil py-cpuinfo tqdm
"${pip[@]}" --no-deps "megatron-core==${CORE:-$(sed -n 's/^megatron-core==\([^ ]*\).*/\1/p' locks/train-gpu.txt)}"
"$VENV/bin/python" -c 'import deepspeed' >/dev/null 2>&1 || tools/python/install-deepspeed.sh "$VENV/bin/python"
# One thread: processes are forked, and OpenMP waits for ever for threads that a fork has not.
read -ra tested <<<"${TESTED:-tests/unit/train}"
PATH=$PWD/$VENV/bin:$PATH OMP_NUM_THREADS=1 "$VENV/bin/python" -m pytest "${tested[@]}" "$@"
