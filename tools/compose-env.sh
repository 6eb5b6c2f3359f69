#!/usr/bin/env bash
# Writes into .env what `docker compose` should use from now on: the image that was built last, and its compose files.
# The user's own lines stay; only the block between the two marks is ours.
#
#   tools/compose-env.sh cpu|gpu IMAGE [FOLDER]
set -Eeuo pipefail
TOOLS=$(cd "$(dirname "$0")" && pwd)
cd "${3:-$TOOLS/..}"

readonly FLAVOR=$1 IMAGE=$2
readonly BEGIN='# --- written by make image ---' END='# --- end ---'

files=docker-compose.yml
[[ $FLAVOR == cpu ]] || files+=:docker-compose.gpu.yml

partial=$(mktemp .env.XXXXXX)
trap 'rm -f "$partial"' EXIT
{
    [[ ! -e .env ]] || awk -v begin="$BEGIN" -v end="$END" '$0 == begin { ours = 1 } !ours { print } $0 == end { ours = 0 }' .env
    printf '%s\n' "$BEGIN" "COMPOSE_FILE=$files" "TRIDOCK_IMAGE=$IMAGE" "$END"
} >"$partial"
[[ ! -e .env ]] || chmod --reference .env "$partial"
mv "$partial" .env
"$TOOLS/compose.sh" || true # the image is there, also for hosts that need no Compose
if [[ $FLAVOR == cpu ]] && nvidia-smi --list-gpus 2>/dev/null | grep -q '^GPU'; then
    printf 'docker compose run trainer now trains on the CPU of this machine; for its GPUs: make image\n'
fi
