#!/usr/bin/env bash
# Opens the base image's environment to the operator, who is another user than the image's own, with the home HOME: the
# folders on PATH, the interpreters there, and what `pip install --user` has put into HOME/.local.
#
#   tools/image-open-base.sh HOME
set -Eeuo pipefail
home=$1

# Lets everybody pass through the folders above a path.
reach() {
    local folder
    folder=$(dirname "$1")
    while [[ $folder != [/.] ]]; do
        [[ ! -d $folder ]] || chmod o+x "$folder"
        folder=$(dirname "$folder")
    done
}

IFS=: read -ra folders <<<"$PATH"
for folder in "${folders[@]}"; do
    [[ -d $folder ]] || continue
    chmod o+rx "$folder"
    reach "$folder"
    for program in "$folder"/python*; do
        [[ ! -e $program ]] || reach "$(readlink -f "$program")"
    done
done
if [[ -d $home/.local && ! -e /home/tridock/.local ]]; then
    reach "$home/.local"
    # Folders only: a file whose mode changes is in the image twice.
    find "$home/.local" -type d -exec chmod o+rwx {} +
    ln -s "$home/.local" /home/tridock/.local
fi
