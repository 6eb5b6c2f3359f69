#!/usr/bin/env bash
# Trains a GPT as trainer.py of PyTorch's data parallel benchmark does, under torchrun: DDP, FSDP, tensor parallelism, or
# a pipeline of data parallel replicas (pdp).
#
#   docker compose run --rm trainer ptd_benchmark.sh [options of torchrun] [options of trainer.py]
#   ptd_benchmark.sh --nproc_per_node=2
#   ptd_benchmark.sh --nproc_per_node=1 --ndevice_per_proc=2 --mode=pdp
#
# One process drives one device. Instead of one process with --ndevice_per_proc devices, as many processes start.
# TRIDOCK_EXPERIMENT names the experiment, whose strategy is used without --mode. Without TRIDOCK_EXPERIMENT, a small one
# runs with ddp on the demo's data, which is built if missing. --set FIELD=VALUE overrides a field (model.preset=gpt-xl).
set -Eeuo pipefail

readonly CONFIGS=/opt/tridock/configs

refuse() {
    printf '%s: %s: %s; got %s; %s\n' "${0##*/}" "$1" "$2" "$3" "$4" >&2
    exit 2
}

mode='' devices=1 processes=1 endpoint='' torchrun=() trainer=()

# parse_option OPTION: one option of the form --name=value.
parse_option() {
    local name=${1%%=*} value=${1#*=}
    case ${name//-/_} in
    __mode) mode=$value trainer+=("--mode=$value") ;;
    __ndevice_per_proc) devices=$value trainer+=("--ndevice_per_proc=$value") ;;
    __set | __workspace) trainer+=("$name" "$value") ;;
    __nproc_per_node) processes=$value ;;
    __rdzv_endpoint) endpoint=$value torchrun+=("$1") ;;
    *) torchrun+=("$1") ;;
    esac
}

read_options() {
    while (($#)); do
        case $1 in
        --standalone) torchrun+=("$1") endpoint=standalone ;;
        --*=*) parse_option "$1" ;;
        --*)
            (($# > 1)) || refuse "$1" "needs a value" nothing "write $1 VALUE"
            parse_option "$1=$2"
            shift
            ;;
        *) refuse "$1" "is no option" "$1" "write --name=value, of torchrun's or trainer.py's" ;;
        esac
        shift
    done
}

check() {
    [[ $devices =~ ^[1-9][0-9]*$ ]] || refuse --ndevice_per_proc "must be a whole number" "$devices" "write 1 or more"
    [[ $processes =~ ^[1-9][0-9]*$ ]] || refuse --nproc_per_node "must be a whole number" "$processes" "write 1 or more"
    case $mode in
    '' | ddp | fsdp) ;;
    pdp | tp) processes=$((processes * devices)) ;;
    *) refuse --mode "is not known" "$mode" "write ddp, fsdp, pdp or tp" ;;
    esac
}

read_options "$@"
check
experiment=${TRIDOCK_EXPERIMENT:-}
if [[ -z $experiment ]]; then
    tridock data demo
    experiment=$CONFIGS/demo.yaml
    [[ -n $mode ]] || trainer+=(--mode=ddp)
fi
[[ -n $endpoint || " ${torchrun[*]:-} " == *" --master"* ]] || torchrun+=(--standalone)
# As a module: a torchrun on the PATH may belong to a Python of the base image that lacks the other packages.
exec python3 -m torch.distributed.run "${torchrun[@]}" "--nproc_per_node=$processes" \
    -m tridock.train --config "$experiment" "${trainer[@]}"
