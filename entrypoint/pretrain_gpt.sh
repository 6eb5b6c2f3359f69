#!/usr/bin/env bash
# Trains a GPT with megatron-core in this container, like the script of the same name in Megatron-LM, with tensor,
# pipeline, context and data parallelism.
#
#   docker compose run --rm trainer pretrain_gpt.sh [options of `tridock train`]
#
# TRIDOCK_EXPERIMENT selects another experiment (/opt/tridock/configs/jean-zay/7.5b.yaml is one for 16 GPUs). Without it, a
# tiny one runs on the demo's data, which is built if missing. Variables: see pretrain.sh.
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain jean-zay/tiny-7.5b 4 "$@"
