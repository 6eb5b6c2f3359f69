#!/usr/bin/env bash
# Installs DeepSpeed, which is built from its source, into an environment that has torch and everything else already.
#
#   tools/python/install-deepspeed.sh PYTHON
#
# DS_BUILD_<OP>=1 in the environment compiles an op now; without any, nothing is compiled.
set -Eeuo pipefail

PYTHON=$(readlink -f "$(dirname "$1")")/$(basename "$1")
LOCK=$(dirname "$(readlink -f "$0")")/../../locks/deepspeed.txt
readonly PYTHON LOCK

# It picks the accelerator when it is built, and would ask a GPU that a build machine need not have.
DS_ACCELERATOR=${DS_ACCELERATOR:-cpu}
# The ninja of the environment; and no cache: what was built against another torch, or with other ops, must not come back.
export DS_ACCELERATOR DS_BUILD_OPS=0 PATH="${PYTHON%/*}:$PATH"
"$PYTHON" -m pip install --quiet --quiet --disable-pip-version-check --no-cache-dir --no-deps --require-hashes \
    --use-pep517 --no-build-isolation -r "$LOCK"
