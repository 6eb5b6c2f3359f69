#!/usr/bin/env bash
# Trains a GPT with megatron-core on this container, as the script of the same name in Megatron-LM: tensor, pipeline,
# context and data parallel.
#
#   docker compose run trainer pretrain_gpt.sh [options of `tridock train`]
#
# TRIDOCK_EXPERIMENT names another experiment (/opt/tridock/configs/jean-zay/7.5b.yaml is one for 16 GPUs); without it a
# tiny one runs on the demo's data, which are made where they are missing. Variables: see pretrain.sh; checkpoints lie in
# the run's folder.
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain jean-zay/tiny-7.5b 4 "$@"
