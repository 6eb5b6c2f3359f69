#!/usr/bin/env bash
# Collects what tools/gpu_trial.py needs on a bare machine: Linux on x86-64 with a GPU, Python 3.12, torch and no network.
#
#   tools/gpu-wheels.sh FOLDER [MEGATRON]
#
# FOLDER    gets the wheels of what an image with torch lacks, in the locks' versions, and megatron/ where it is to be had
# MEGATRON  the source of Megatron-LM v1.1.5, as tools/megatron-source.sh takes it (default: none)
set -Eeuo pipefail
cd "$(dirname "$0")/.."

readonly FOLDER=$1 MEGATRON=${2:-none}
readonly PACKAGES='pydantic|pydantic-core|annotated-types|typing-inspection|typing-extensions|hjson|megatron-core|zstandard'

# The entries of the lock with their hashes.
locked() {
    awk -v "names=^($PACKAGES)==" '/^[a-z]/ { wanted = $0 ~ names } wanted && !/#/' locks/train-gpu.txt
}

mkdir -p "$FOLDER"
rm -rf "$FOLDER"/*.whl "$FOLDER/megatron"
locked | python -m pip download --quiet --no-deps --require-hashes --only-binary=:all: --python-version 3.12 \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$FOLDER" -r /dev/stdin
DS_ACCELERATOR=cpu DS_BUILD_OPS=0 python -m pip wheel --quiet --no-deps --require-hashes --use-pep517 --no-build-isolation \
    --wheel-dir "$FOLDER" -r locks/deepspeed.txt
if [[ $MEGATRON != none ]]; then
    tools/megatron-source.sh "$MEGATRON"
    tools/image-megatron.sh upstream/megatron-v1.1.5 patches/megatron-v1.1.5 "$FOLDER/megatron"
fi
du -sh "$FOLDER"
