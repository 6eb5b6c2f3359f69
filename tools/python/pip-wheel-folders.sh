#!/usr/bin/env bash
# Prints the local folders in which pip, as it is configured on this machine, looks for wheels (find-links), one a line.
#
#   tools/python/pip-wheel-folders.sh [PYTHON]
set -Eeuo pipefail

"${1:-python3}" -m pip config list 2>/dev/null |
    sed -n "s/^[^=]*\.find-links='\(.*\)'\$/\1/p" |
    sed 's/\\n/ /g' | tr ' ' '\n' | sed 's,^file://,,' |
    while IFS= read -r folder; do
        [[ ! -d $folder ]] || printf '%s\n' "$folder"
    done | sort -u
