#!/usr/bin/env bash
# Runs a command on this machine's devices: its GPUs where nvidia-smi lists some, else its CPU.
#
#   tools/on-devices.sh venv|image IMAGE COMMAND...
#
# venv   in .venv, which gets torch's CUDA build for GPUs
# image  in IMAGE, with this folder as its workspace
#
# DS_ACCELERATOR=cpu asks for the CPU on a machine with GPUs.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly WHERE=$1 IMAGE=$2

fail() {
    printf '%s\n' "$2" >&2
    exit "$1"
}

uses_gpus() {
    [[ ${DS_ACCELERATOR:-} != cpu ]] && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU '
}

run_in_venv() {
    if uses_gpus; then
        make --no-print-directory venv FLAVOR=gpu
    else
        make --no-print-directory venv
    fi
    PATH=$PWD/.venv/bin:$PATH exec "$@"
}

run_in_image() {
    local files=(--file docker-compose.yml)
    docker image inspect "$IMAGE" >/dev/null 2>&1 ||
        fail 3 "$IMAGE: the image is not on this machine; got $(docker image inspect "$IMAGE" 2>&1 | tail -n 1); build it with make image, or leave out IN=image"
    ! uses_gpus || files+=(--file docker-compose.gpu.yml)
    TRIDOCK_IMAGE=$IMAGE exec tools/compose.sh "${files[@]}" run --rm --env DS_ACCELERATOR trainer "$@"
}

case $WHERE in
venv) run_in_venv "${@:3}" ;;
image) run_in_image "${@:3}" ;;
*) fail 2 "IN: is not venv or image; got $WHERE; write IN=image for the image, or leave it out for .venv" ;;
esac
