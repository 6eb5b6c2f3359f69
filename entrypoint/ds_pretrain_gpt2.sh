#!/usr/bin/env bash
# Trains GPT-2 on this container, as the script of the same name in DeepSpeed's Megatron example does.
#
#   docker compose run trainer ds_pretrain_gpt2.sh [options of `tridock train`]
#
# TRIDOCK_EXPERIMENT names another experiment; without it the demo's runs, and its data are made where they are missing.
set -Eeuo pipefail

experiment=${TRIDOCK_EXPERIMENT:-}
if [[ -z $experiment ]]; then
    experiment=/opt/tridock/configs/demo.yaml
    tridock data demo
fi
printf 'ds_pretrain_gpt2.sh: the torch engine trains %s\n' "$experiment" >&2
exec tridock train "$experiment" "$@"
