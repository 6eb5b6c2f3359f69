#!/usr/bin/env bash
# Trains GPT-2 with DeepSpeed's ZeRO in this container, like the script of the same name in DeepSpeed's Megatron example.
#
#   docker compose run --rm trainer ds_pretrain_gpt2.sh [options of `tridock train`] [arguments of Megatron]
#
# TRIDOCK_EXPERIMENT selects another experiment (/opt/tridock/configs/megatron/gpt2-345m.yaml is upstream's). Without it,
# a tiny one runs on the demo's data, which is built if missing. Variables: see pretrain.sh.
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain megatron/tiny-345m 2 "$@"
