#!/usr/bin/env bash
# Writes locks/*.txt from locks/*.in, with the hashes of every file that the index has for a version.
#
#   tools/lock.sh [uv pip compile's options, such as --upgrade or --upgrade-package NAME]
#
# The locks name no index: a mirror or a private index serves them as well, and the hashes say whether it serves the same.
set -Eeuo pipefail
cd "$(dirname "$0")/../locks"

compile() {
    local output=$1
    shift
    UV_CUSTOM_COMPILE_COMMAND=tools/lock.sh uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-emit-index-url --no-emit-find-links "$@" --output-file "$output"
}

# No torch, whichever package requires it; and DeepSpeed, which is built against torch and so comes after it, alone.
trap 'rm -f deepspeed.in excluded.in' EXIT
echo torch >excluded.in
without_torch=(--excludes excluded.in)

compile train-cpu.txt train.in "${without_torch[@]}" --no-emit-package deepspeed "$@"
grep '^deepspeed==' train.in >deepspeed.in
compile deepspeed.txt deepspeed.in --no-deps "$@"
compile extras.txt operator.in data.in report.in --constraint train-cpu.txt "$@"
compile operator.txt operator.in --constraint extras.txt "$@"
# An environment of its own: none of the ranks' versions bind it.
compile trackers.txt trackers.in notify.in "$@"
compile dev.txt dev.in --constraint train-cpu.txt --constraint extras.txt "$@"
# Beside all of these in one environment.
compile remote.txt remote.in --constraint train-cpu.txt --constraint extras.txt --constraint dev.txt "$@"
compile docs.txt docs.in --constraint train-cpu.txt --constraint dev.txt "$@"
compile train-gpu.txt train.in train-gpu.in "${without_torch[@]}" --no-emit-package deepspeed \
    --constraint train-cpu.txt --constraint dev.txt "$@"
# The index's own build of torch for Linux, which has CUDA, and NVIDIA's libraries for it.
compile torch-cuda.txt torch.txt --constraint train-cpu.txt "$@"
compile uv.txt uv.in "$@"
# What recipes with others' programs install beside an image's torch, NumPy and DeepSpeed.
printf 'torch\nnumpy\n' >excluded.in
compile ../configs/recipes/sft/requirements.txt ../configs/recipes/requirements.in "${without_torch[@]}" "$@"
for recipe in dpo lora; do
    cp ../configs/recipes/sft/requirements.txt "../configs/recipes/$recipe/requirements.txt"
done
