#!/usr/bin/env bash
# Makes the environment of trackers and notifications, beside that of the ranks.
#
#   tools/image/trackers.sh FOLDER cpu|gpu yes|""
#
# Without yes the folder stays empty. On NVIDIA's images a new environment has no pip: it borrows the base's.
set -Eeuo pipefail

readonly FOLDER=$1 FLAVOR=$2 WANTED=$3
HERE=$(dirname "$(readlink -f "$0")")
readonly HERE

mkdir -p "$FOLDER"
[[ -n $WANTED ]] || exit 0
borrowed=()
[[ $FLAVOR != gpu ]] || borrowed=(--without-pip --system-site-packages)
python3 -m venv "${borrowed[@]}" "$FOLDER"
"$HERE/../python/install-locked.sh" "$FOLDER/bin/python" "$HERE/../../locks/trackers.txt"
