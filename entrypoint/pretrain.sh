# shellcheck shell=bash
# Sourced by ds_pretrain_gpt2.sh, pretrain_gpt.sh and the like: runs an experiment with upstream's variables and options.
#
# Environment variables of upstream's scripts, and the field that each overrides:
#   GPUS_PER_NODE (ranks to start), MASTER_PORT launch.master_port, DATA_PATH data.data_path, VOCAB_PATH data.vocab_file,
#   MERGE_PATH data.merge_file, CHECKPOINT_PATH train.checkpoint_folder and train.load
#   NNODES, NODE_RANK, MASTER_ADDR: the script is started on every node, each with its rank, without ssh
#   DLWS_NUM_WORKER and DLWS_NUM_GPU_PER_WORKER: other names of NNODES and GPUS_PER_NODE
#
# Arguments after the script's name: options of `tridock train`, which win over variables; all others go to Megatron.

readonly CONFIGS=/opt/tridock/configs

has_megatron() {
    [[ -f ${TRIDOCK_MEGATRON:-/opt/megatron-v1.1.5}/pretrain_gpt2.py ]]
}

say() {
    printf '%s: %s\n' "${0##*/}" "$1" >&2
}

refuse() {
    say "$1: $2; got $3; $4"
    exit 2
}

# Prints its arguments as a YAML list of quoted strings.
yaml_list() {
    python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
}

options=() megatron_args=()

from_variable() {
    local variable=$1 field=$2
    [[ -z ${!variable:-} ]] || {
        say "$variable=${!variable} sets $field"
        options+=(--set "$field=$(python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "${!variable}")")
    }
}

sees_gpus() {
    [[ ${DS_ACCELERATOR:-} != cpu && -n ${CUDA_VISIBLE_DEVICES-all} ]] && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'
}

# read_environment RANKS: without GPUS_PER_NODE, a rank for every GPU, or RANKS on the CPU.
read_environment() {
    local nodes=${NNODES:-${DLWS_NUM_WORKER:-1}} ranks=${GPUS_PER_NODE:-${DLWS_NUM_GPU_PER_WORKER:-}}
    from_variable DATA_PATH data.data_path
    from_variable VOCAB_PATH data.vocab_file
    from_variable MERGE_PATH data.merge_file
    from_variable CHECKPOINT_PATH train.checkpoint_folder
    from_variable CHECKPOINT_PATH train.load
    if [[ -n ${MASTER_PORT:-} ]]; then
        say "MASTER_PORT=$MASTER_PORT sets launch.master_port"
        options+=(--set "launch.master_port=$MASTER_PORT")
    fi
    if [[ -n $ranks ]]; then
        say "GPUS_PER_NODE=$ranks ranks"
        options+=(--nproc "$ranks")
    elif [[ -n $1 ]] && ! sees_gpus; then
        options+=(--nproc "$1")
    fi
    [[ $nodes == 1 ]] || {
        say "NNODES=$nodes NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-}: this node is one of several"
        options+=(--nnodes "$nodes" --node-rank "${NODE_RANK:-0}" ${MASTER_ADDR:+--master-addr "$MASTER_ADDR"})
    }
}

read_options() {
    while (($#)); do
        case $1 in
        --set | --nproc | --workspace | --run-id-file | --nnodes | --node-rank | --master-addr)
            (($# > 1)) || refuse "$1" "needs a value" nothing "write $1 VALUE"
            options+=("$1" "$2")
            shift
            ;;
        --set=* | --nproc=* | --workspace=* | --run-id-file=* | --nnodes=* | --node-rank=* | --master-addr=* | --help | -h)
            options+=("$1")
            ;;
        --deepspeed) ;; # the experiments of the scripts that have it are DeepSpeed's
        --deepspeed_config)
            [[ -f ${2:-} ]] || refuse "$1" "cannot be read" "${2:-nothing}" "give DeepSpeed's JSON"
            options+=(--set "deepspeed=$(<"$2")")
            shift
            ;;
        *) megatron_args+=("$1") ;;
        esac
        shift
    done
}

# pretrain TWIN RANKS [OPTION...]: runs TRIDOCK_EXPERIMENT, or TWIN (megatron/… needs v1.1.5): with a rank for every GPU,
# or with RANKS ranks on the CPU.
pretrain() {
    local twin=$1 ranks=$2 experiment=${TRIDOCK_EXPERIMENT:-}
    shift 2
    if [[ -z $experiment ]]; then
        tridock data demo
        if [[ $twin != megatron/* ]] || has_megatron; then
            experiment=$CONFIGS/$twin.yaml
        else
            # Without Megatron, this script still trains something, because every image has it.
            [[ ${0##*/} == ds_pretrain_gpt2.sh ]] || refuse engine "this image is without Megatron-LM v1.1.5" \
                "${TRIDOCK_MEGATRON:-/opt/megatron-v1.1.5}" "build it with its source: tridock image --megatron WHERE"
            experiment=$CONFIGS/demo.yaml ranks=2
            say "this image is without Megatron-LM v1.1.5: the torch engine trains"
        fi
    fi
    [[ -z ${TRIDOCK_EXPERIMENT:-} ]] || ranks=
    read_environment "$ranks"
    read_options "$@"
    ((${#megatron_args[@]} == 0)) || options+=(--set "megatron_args=$(yaml_list "${megatron_args[@]}")")
    say "tridock train $experiment ${options[*]}"
    exec tridock train "$experiment" "${options[@]}"
}
