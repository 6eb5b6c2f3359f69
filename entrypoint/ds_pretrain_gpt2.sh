#!/usr/bin/env bash
# Trains GPT-2 with DeepSpeed's ZeRO on this container, as the script of the same name in DeepSpeed's Megatron example.
#
#   docker compose run trainer ds_pretrain_gpt2.sh [options of `tridock train`] [arguments of Megatron]
#
# TRIDOCK_EXPERIMENT names another experiment (/opt/tridock/configs/megatron/gpt2-345m.yaml is upstream's); without it a
# tiny one runs on the demo's data, which are made where they are missing. Variables: see pretrain.sh.
set -Eeuo pipefail
# shellcheck source=entrypoint/pretrain.sh
source "$(dirname "$(readlink -f "$0")")/pretrain.sh"

pretrain megatron/tiny-345m 2 "$@"
