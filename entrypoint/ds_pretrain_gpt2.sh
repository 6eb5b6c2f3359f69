#!/usr/bin/env bash
# Trains GPT-2 on this container, as the script of the same name in DeepSpeed's Megatron example does.
#
#   docker compose run trainer ds_pretrain_gpt2.sh [options of `tridock train`]
#
# TRIDOCK_EXPERIMENT names another experiment.
set -Eeuo pipefail

experiment=${TRIDOCK_EXPERIMENT:-/opt/tridock/configs/demo.yaml}
printf 'ds_pretrain_gpt2.sh: the torch engine trains %s\n' "$experiment" >&2
exec tridock train "$experiment" "$@"
