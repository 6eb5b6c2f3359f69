#!/usr/bin/env bash
# Trains GPT-2 with torch.distributed alone, without DeepSpeed's ZeRO, like the script of the same name in Megatron-LM.
#
#   docker compose run --rm trainer pretrain_gpt2_distributed.sh [options of `tridock train`] [arguments of Megatron]
#
# TRIDOCK_EXPERIMENT selects another experiment (/opt/tridock/configs/megatron/gpt2-345m-distributed.yaml is upstream's).
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain megatron/tiny-345m-distributed 2 "$@"
