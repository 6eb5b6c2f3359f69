#!/usr/bin/env bash
# Runs the unit tests of train/ with another version of torch, in an environment of its own.
#
#   tools/test-torch.sh 2.6.0 [pytest's arguments]
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly VERSION=$1 VENV=.cache/torch-$1
shift
[[ -x $VENV/bin/pip ]] || .venv/bin/python -m venv "$VENV"
"$VENV/bin/pip" install --quiet "torch==$VERSION" numpy pydantic pyyaml safetensors tensorboard pytest pytest-timeout hypothesis
"$VENV/bin/python" -m pytest tests/unit/train "$@"
