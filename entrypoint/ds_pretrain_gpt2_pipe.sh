#!/usr/bin/env bash
# Trains GPT-2 with 3D parallelism (tensor, pipeline, data) in this container, like the script of the same name in
# DeepSpeed's Megatron example.
#
#   docker compose run --rm trainer ds_pretrain_gpt2_pipe.sh [options of `tridock train`] [arguments of Megatron]
#
# TRIDOCK_EXPERIMENT selects another experiment (/opt/tridock/configs/megatron/gpt2-345m-3d.yaml is upstream's).
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain megatron/tiny-345m-3d 4 "$@"
